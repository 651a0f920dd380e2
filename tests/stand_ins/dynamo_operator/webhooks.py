"""The operator's webhooks: TLS on loopback, registered with the API server as the real ones are."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.stand_ins.dynamo_operator import admission, names
from tests.stand_ins.dynamo_operator.graph import Manifest

LOOPBACK = "127.0.0.1"
REGISTRATION = "admissionregistration.k8s.io/v1"
MUTATING = ("MutatingWebhookConfiguration", "dynamo-operator-mutating", "mdynamographdeployment.kb.io")
VALIDATING = ("ValidatingWebhookConfiguration", "dynamo-operator-validating", "vdynamographdeployment.kb.io")
PATHS: dict[str, Callable[[Any], Manifest]] = {
    "/mutate-nvidia-com-v1beta1-dynamographdeployment": admission.mutate,
    "/validate-nvidia-com-v1beta1-dynamographdeployment": admission.validate,
}
REGISTERED = tuple(zip((MUTATING, VALIDATING), PATHS, strict=True))


class Webhooks:
    """Serves from construction until stop; certificate is the one it serves with and what a caller has to trust."""

    def __init__(self) -> None:
        self.certificate, key = self_signed(LOOPBACK)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as directory:  # ssl reads from files only
            pair = Path(directory) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_bytes(key + self.certificate)
            tls.load_cert_chain(pair)
        self._server = Server((LOOPBACK, 0), tls)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"https://{LOOPBACK}:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Stop answering. What is registered stays, and fails, as with an operator that is down."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self._thread.join()

    def registrations(self) -> list[Manifest]:
        made = []
        for (kind, name, webhook), path in REGISTERED:
            entry: Manifest = {
                "name": webhook,
                "clientConfig": {
                    "url": self.address + path,
                    "caBundle": base64.b64encode(self.certificate).decode(),
                },
                "rules": [
                    {
                        "apiGroups": [names.GROUP],
                        "apiVersions": [names.VERSION],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": ["dynamographdeployments"],
                        "scope": "Namespaced",
                    }
                ],
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 10,
            }
            made.append(
                {"apiVersion": REGISTRATION, "kind": kind, "metadata": {"name": name}, "webhooks": [entry]},
            )
        return made


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext) -> None:
        super().__init__(address, Handler)
        self.tls = tls
        self._calls: set[ssl.SSLSocket] = set()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # The handshake is for the request's own thread: a caller that is slow must not keep others waiting.
        with self.tls.wrap_socket(request, server_side=True) as wrapped:
            self._calls.add(wrapped)
            try:
                super().finish_request(wrapped, client_address)
            finally:
                self._calls.discard(wrapped)

    def hang_up(self) -> None:
        """End the connections that callers keep for their next request."""
        for call in list(self._calls):
            with suppress(OSError):
                call.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is no concern; the API server reports what it made of it."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        decide = PATHS.get(self.path.partition("?")[0])
        if decide is None:
            self.send_error(404)
            return
        review = json.loads(body)
        response = dict(decide(review["request"]))
        changes = response.pop("changes", None)
        if changes:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(changes).encode()).decode()
        answer = json.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name it overrides
        pass


def self_signed(address: str) -> tuple[bytes, bytes]:
    """A certificate for an address that is its own authority, and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dynamo-operator-webhook-service")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
