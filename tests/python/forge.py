"""Tickets that were tampered with by somebody who knows the format: right checksum, wrong content."""

import base64
import struct

from xxhash import xxh3_64_intdigest

PREFIX = "kvik1."
ENGINE, INCARNATION, GRANT, LAYOUT = slice(0, 16), slice(16, 24), slice(24, 40), slice(45, 53)


def altered(text: str, field: slice, value: bytes) -> str:
    """The ticket with a field of its bytes replaced, and a checksum that fits."""
    body = text.removeprefix(PREFIX)
    raw = bytearray(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))[:-4]
    assert len(raw[field]) == len(value)
    raw[field] = value
    return seal(bytes(raw))


def seal(raw: bytes) -> str:
    """The text of a ticket with these bytes before its checksum."""
    whole = raw + struct.pack("<I", xxh3_64_intdigest(raw) & 0xFFFFFFFF)
    return PREFIX + base64.urlsafe_b64encode(whole).decode().rstrip("=")
