"""Public keys as apt wants them: armored or binary, and their fingerprints. Needs no gnupg on the host.

Packet format: RFC 9580, sections 4.2 (headers), 5.5.4 (fingerprints) and 6.2 (armor).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Iterator

_BLOCK = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n]+: [^\r\n]*\r?\n)*\r?\n(.*?)-----END PGP PUBLIC KEY",
    re.DOTALL,
)
_PUBLIC_KEY, _PUBLIC_SUBKEY, _USER_ID, _SIGNATURE = 6, 14, 13, 2


class NotAKeyError(ValueError):
    """The bytes are not an OpenPGP public key."""


def dearmored(data: bytes) -> bytes:
    """The key in binary form, whichever form it came in."""
    if b"-----BEGIN PGP" not in data:
        return data
    blocks = _BLOCK.findall(data)
    if not blocks:
        raise NotAKeyError("an armored block without a public key")
    try:
        return b"".join(
            base64.b64decode(re.sub(rb"\s", b"", block.rsplit(b"\n=", 1)[0]), validate=True) for block in blocks
        )
    except binascii.Error as error:
        raise NotAKeyError(f"damaged armor: {error}") from None


def armored(binary: bytes) -> bytes:
    text = base64.b64encode(binary)
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    return b"\n".join(
        [b"-----BEGIN PGP PUBLIC KEY BLOCK-----", b"", *lines, b"-----END PGP PUBLIC KEY BLOCK-----", b""]
    )


def fingerprints(data: bytes) -> list[str]:
    """Fingerprints of the primary keys, upper case, in the order of the file."""
    found = []
    packets = list(_packets(dearmored(data)))
    if not packets or packets[0][0] != _PUBLIC_KEY:
        raise NotAKeyError("it does not begin with a public key")
    for tag, body in packets:
        if tag != _PUBLIC_KEY:
            continue
        if body[:1] == b"\x04":
            digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)  # noqa: S324 - what version 4 prescribes
        elif body[:1] == b"\x06":
            digest = hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body)
        else:
            raise NotAKeyError(f"a key of version {body[0] if body else 0}, which is not known here")
        found.append(digest.hexdigest().upper())
    return found


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        head = data[position]
        if not head & 0x80:
            raise NotAKeyError("not OpenPGP data")
        try:
            if head & 0x40:
                tag, position, length = head & 0x3F, *_new_length(data, position + 1)
            else:
                width = (1, 2, 4, 0)[head & 3]
                if width == 0:
                    raise NotAKeyError("a packet of unknown length")
                tag, length = (head >> 2) & 0x0F, int.from_bytes(data[position + 1 : position + 1 + width], "big")
                position += 1 + width
        except IndexError:
            raise NotAKeyError("it is cut short") from None
        if position + length > len(data):
            raise NotAKeyError("it is cut short")
        yield tag, data[position : position + length]
        position += length


def _new_length(data: bytes, position: int) -> tuple[int, int]:
    """Where the body starts, and its length."""
    first = data[position]
    if first < 192:
        return position + 1, first
    if first < 224:
        return position + 2, ((first - 192) << 8) + data[position + 1] + 192
    if first == 255:
        return position + 5, int.from_bytes(data[position + 1 : position + 5], "big")
    raise NotAKeyError("a packet in parts, which keys do not have")
