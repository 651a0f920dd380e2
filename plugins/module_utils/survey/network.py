"""Ports that are taken, and URLs that answer."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from .host import Host, first_line, names, read

_LISTENING = "0A"


def ports(host: Host, wanted: list[int]) -> dict[str, dict[str, Any]]:
    """For each port whether something listens, and what. Keys are strings, as in JSON."""
    taken: dict[int, list[dict[str, str]]] = {}
    for table in ("tcp", "tcp6"):
        for line in (read(host.live("net", table)) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENING:
                address, _, number = fields[1].rpartition(":")
                port = int(number, 16)
                if port in wanted:
                    taken.setdefault(port, []).append({"address": _address(address), "inode": fields[9]})
    owners = _socket_owners(host, {s["inode"] for sockets in taken.values() for s in sockets}) if taken else {}
    found = {}
    for port in wanted:
        sockets = taken.get(port, [])
        owner = next((owners[s["inode"]] for s in sockets if s["inode"] in owners), {})
        found[str(port)] = {
            "listening": bool(sockets),
            "addresses": sorted({s["address"] for s in sockets}),
            "pid": owner.get("pid"),
            "process": owner.get("process"),
            "unit": owner.get("unit"),
        }
    return found


def _address(text: str) -> str:
    """An address of /proc/net/tcp: 32-bit words in the processor's byte order, which is little-endian on both."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[n : n + 4][::-1] for n in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def _socket_owners(host: Host, inodes: set[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for pid in host.processes():
        for descriptor in names(host.live(pid, "fd")):
            try:
                target = os.readlink(host.live(pid, "fd", descriptor))
            except OSError:
                continue
            match = re.match(r"socket:\[(\d+)\]$", target)
            if match and match.group(1) in inodes and match.group(1) not in found:
                found[match.group(1)] = {
                    "pid": int(pid),
                    "process": first_line(host.live(pid, "comm")),
                    "unit": _unit(read(host.live(pid, "cgroup")) or ""),
                }
    return found


def _unit(cgroup: str) -> str | None:
    match = re.search(r"/([^/\n]+\.(?:service|scope))", cgroup)
    return match.group(1) if match else None


# --- URLs --------------------------------------------------------------------------------------------------------


def urls(
    wanted: list[str], timeout: float, proxies: dict[str, str] | None, tokens: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """How each URL answers. All are asked at the same time, so that dead ones cost one time-out together.

    `tokens`: what to log in with, by URL.
    """
    found: dict[str, dict[str, Any]] = {}
    threads = []
    for url in sorted(set(wanted)):
        thread = threading.Thread(
            target=_into, args=(found, url, timeout, proxies, (tokens or {}).get(url)), daemon=True
        )
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(timeout * 2 + 5)
    late = {"status": None, "error": f"no answer within {timeout:g} s", "kind": "timeout"}
    return {url: found.get(url, late) for url in sorted(set(wanted))}


def _into(
    found: dict[str, dict[str, Any]], url: str, timeout: float, proxies: dict[str, str] | None, token: str | None
) -> None:
    found[url] = _url(url, timeout, proxies, token)


def _url(url: str, timeout: float, proxies: dict[str, str] | None, token: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "status": None,
        "kind": None,
        "error": None,
        "proxy": None,
        "seconds": None,
        "skew_seconds": None,
    }
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        if os.path.exists(parts.path):
            facts["status"] = 200
        else:
            facts["kind"], facts["error"] = "missing", f"{parts.path} does not exist on the host"
        return facts
    known = proxies if proxies is not None else urllib.request.getproxies()
    if not urllib.request.proxy_bypass(parts.hostname or ""):
        facts["proxy"] = _without_credentials(known.get(parts.scheme))
    try:
        context = ssl.create_default_context()
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
        )
        for method in ("HEAD", "GET"):
            headers = {"User-Agent": "host-survey", "Accept": "*/*"}
            if method == "GET":
                headers["Range"] = "bytes=0-0"
            before = time.time()
            request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - http, https, file: above
            if token:
                # To this address alone, not to where it may send us.
                request.add_unredirected_header("Authorization", "Bearer " + token)
            try:
                with opener.open(request, timeout=timeout) as answer:
                    status, date = answer.status, answer.headers.get("Date")
            except urllib.error.HTTPError as error:
                status, date = error.code, error.headers.get("Date") if error.headers else None
                error.close()
            after = time.time()
            facts["status"] = 200 if status == 206 else status
            facts["seconds"] = round(after - before, 3)
            facts["skew_seconds"] = _skew(date, before, after)
            if method == "HEAD" and status in (403, 404, 405, 501):
                continue  # some servers answer GET only
            break
    except (OSError, ValueError, urllib.error.URLError) as error:
        facts["kind"], facts["error"] = explained(error, facts["proxy"])
    except Exception as error:  # http.client has errors of its own for answers that are not HTTP
        facts["kind"], facts["error"] = "protocol", f"{type(error).__name__}: {error}"
    return facts


def endpoints(wanted: list[dict[str, Any]], timeout: float) -> dict[str, dict[str, Any]]:
    """What each server says of its health and of the models it serves."""
    found = {}
    for entry in wanted:
        base = entry["url"].rstrip("/")
        facts: dict[str, Any] = {"url": base, "health_status": None, "models": [], "error": None}
        try:
            facts["health_status"], _ = _get(base + entry["health_path"], timeout)
            status, body = _get(base + "/v1/models", timeout)
            if status == 200:
                facts["models"] = [str(model.get("id")) for model in json.loads(body).get("data") or []]
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            facts["error"] = explained(error, None)[1]
        found[entry["name"]] = facts
    return found


def _get(url: str, timeout: float) -> tuple[int, str]:
    # Straight to the host itself: a proxy has no business here.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return answer.status, answer.read(1 << 20).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def _without_credentials(proxy: str | None) -> str | None:
    return re.sub(r"//[^/@]*@", "//", proxy) if proxy else None


def _skew(date: str | None, before: float, after: float) -> float | None:
    """How far the host's clock is ahead of the server's."""
    if not date:
        return None
    try:
        then = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    return round((before + after) / 2 - then, 1)


def explained(error: BaseException, proxy: str | None) -> tuple[str, str]:
    reason: object = getattr(error, "reason", None) or error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "tls", f"the certificate is not accepted: {reason.verify_message}"
    if isinstance(reason, ssl.SSLError):
        return "tls", f"TLS failed: {reason.reason or reason}"
    if isinstance(reason, socket.gaierror):
        return "dns", f"the name does not resolve: {reason.strerror}"
    if isinstance(reason, socket.timeout) or "timed out" in str(reason):
        return "timeout", "no answer in time"
    if "Tunnel connection failed" in str(reason):
        return "proxy", f"the proxy {proxy} refused: {reason}"
    if isinstance(reason, ConnectionRefusedError):
        return "refused", "connection refused" + (f" by the proxy {proxy}" if proxy else "")
    if isinstance(reason, OSError) and reason.strerror:
        return "unreachable", reason.strerror
    return "unreachable", str(reason)
