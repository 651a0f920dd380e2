"""The key that signs the stand-in repositories, derived from a fixed seed: its fingerprint is the same everywhere.

It guards nothing: everybody can derive it. OpenPGP v4 packets (RFC 4880, EdDSA as GnuPG has it), as GnuPG imports them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

SEED = hashlib.sha256(b"stand-in package repositories, signing key").digest()
CREATED = 1767225600  # 2026-01-01
USER_ID = b"Stand-in package repositories <stand-in@example.invalid>"
ED25519 = bytes.fromhex("2b06010401da470f01")
EDDSA, SHA256 = 22, 8


def _mpi(number: bytes) -> bytes:
    number = number.lstrip(b"\0")
    bits = (len(number) - 1) * 8 + number[0].bit_length() if number else 0
    return bits.to_bytes(2, "big") + number


def _packet(tag: int, body: bytes) -> bytes:
    return bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body


def _subpacket(kind: int, body: bytes) -> bytes:
    return bytes([len(body) + 1, kind]) + body


def _public_body(key: Ed25519PrivateKey) -> bytes:
    point = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    algorithm = bytes([EDDSA, len(ED25519)]) + ED25519
    return b"\x04" + CREATED.to_bytes(4, "big") + algorithm + _mpi(b"\x40" + point)


def _fingerprint(body: bytes) -> bytes:
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).digest()


def fingerprint() -> str:
    return _fingerprint(_public_body(Ed25519PrivateKey.from_private_bytes(SEED))).hex().upper()


def secret_key() -> bytes:
    """The transferable secret key, for `gpg --import`."""
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    public = _public_body(key)
    secret = _mpi(key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()))
    checksum = (sum(secret) & 0xFFFF).to_bytes(2, "big")

    hashed = (
        _subpacket(33, b"\x04" + _fingerprint(public))
        + _subpacket(2, CREATED.to_bytes(4, "big"))
        + _subpacket(27, b"\x03")  # certify and sign
        + _subpacket(11, b"\x09")
        + _subpacket(21, bytes([SHA256]))
    )
    head = bytes([4, 0x13, EDDSA, SHA256]) + len(hashed).to_bytes(2, "big") + hashed
    signed = (
        b"\x99" + len(public).to_bytes(2, "big") + public
        + b"\xb4" + len(USER_ID).to_bytes(4, "big") + USER_ID
        + head
        + b"\x04\xff" + len(head).to_bytes(4, "big")
    )  # fmt: skip
    digest = hashlib.sha256(signed).digest()
    signature = key.sign(digest)
    unhashed = _subpacket(16, _fingerprint(public)[-8:])
    body = head + len(unhashed).to_bytes(2, "big") + unhashed + digest[:2] + _mpi(signature[:32]) + _mpi(signature[32:])
    return _packet(5, public + b"\0" + secret + checksum) + _packet(13, USER_ID) + _packet(2, body)


def write(path: Path) -> None:
    path.write_bytes(secret_key())
