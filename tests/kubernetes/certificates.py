"""The certificates and keys of one throwaway control plane."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=30)
SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files and in memory."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    certificate_file: Path
    key_file: Path


@dataclass(frozen=True)
class Certificates:
    authority: Path
    server: Pair
    administrator: Pair
    service_account_key: Path
    service_account_public_key: Path


def issue(directory: Path, *, addresses: Sequence[str]) -> Certificates:
    """One authority, a serving certificate for loopback and the service address, an administrator, a token key."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = _pair(directory, "ca", [(NameOID.COMMON_NAME, "gpt-oss-test")], None, authority=True)
    server = _pair(
        directory,
        "server",
        [(NameOID.COMMON_NAME, "kube-apiserver")],
        authority,
        usages=[ExtendedKeyUsageOID.SERVER_AUTH],
        alternatives=[
            *(x509.DNSName(name) for name in SERVER_NAMES),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
        ],
    )
    administrator = _pair(
        directory,
        "admin",
        [(NameOID.ORGANIZATION_NAME, "system:masters"), (NameOID.COMMON_NAME, "gpt-oss-test-admin")],
        authority,
        usages=[ExtendedKeyUsageOID.CLIENT_AUTH],
    )
    tokens = ec.generate_private_key(ec.SECP256R1())
    public_key = directory / "sa.pub"
    public_key.write_bytes(
        tokens.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return Certificates(
        authority=authority.certificate_file,
        server=server,
        administrator=administrator,
        service_account_key=_write_key(directory / "sa.key", tokens),
        service_account_public_key=public_key,
    )


def _pair(
    directory: Path,
    name: str,
    subject: Sequence[tuple[x509.ObjectIdentifier, str]],
    issuer: Pair | None,
    *,
    authority: bool = False,
    usages: Sequence[x509.ObjectIdentifier] = (),
    alternatives: Sequence[x509.GeneralName] = (),
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.Name([x509.NameAttribute(oid, value) for oid, value in subject])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(names)
        .issuer_name(issuer.certificate.subject if issuer else names)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    certificate = builder.sign(issuer.key if issuer else key, hashes.SHA256())
    certificate_file = directory / f"{name}.crt"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Pair(certificate, key, certificate_file, _write_key(directory / f"{name}.key", key))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path
