"""Tickets that were tampered with by somebody who knows the format: right checksum, wrong content."""

import base64
import struct

PREFIX = "kvik1."
ENGINE, INCARNATION, GRANT, LAYOUT = slice(0, 16), slice(16, 24), slice(24, 40), slice(45, 53)

_MASK = (1 << 64) - 1
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)


def altered(text: str, field: slice, value: bytes) -> str:
    """The ticket with a field of its bytes replaced, and a checksum that fits."""
    body = text.removeprefix(PREFIX)
    raw = bytearray(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))[:-4]
    assert len(raw[field]) == len(value)
    raw[field] = value
    return seal(bytes(raw))


def seal(raw: bytes) -> str:
    """The text of a ticket with these bytes before its checksum."""
    whole = raw + struct.pack("<I", xxh3_64(raw) & 0xFFFFFFFF)
    return PREFIX + base64.urlsafe_b64encode(whole).decode().rstrip("=")


def xxh3_64(data: bytes) -> int:
    """XXH3 with 64 bits, for the 17 to 128 bytes that a ticket with up to 4 addresses has."""
    assert 17 <= len(data) <= 128
    total = len(data) * 0x9E3779B185EBCA87
    for step in range((len(data) - 1) // 32, -1, -1):
        total += _mix(data, 16 * step, 32 * step)
        total += _mix(data, len(data) - 16 * (step + 1), 32 * step + 16)
    total &= _MASK
    total ^= total >> 37
    total = total * 0x165667919E3779F9 & _MASK
    return total ^ (total >> 32)


def _mix(data: bytes, at: int, secret: int) -> int:
    low, high = struct.unpack_from("<QQ", data, at)
    key_low, key_high = struct.unpack_from("<QQ", _SECRET, secret)
    product: int = (low ^ key_low) * (high ^ key_high)
    return (product & _MASK) ^ (product >> 64)
