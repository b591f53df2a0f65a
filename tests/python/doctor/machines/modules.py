"""Memory of modules and cables, and link settings of ports, as the standards lay them out.

SFF-8472 rev. 12.4 table 4-1, SFF-8636 rev. 2.10a tables 6-1 and 6-14, CMIS 5.2 tables 8-4 to 8-30; for link
settings include/uapi/linux/ethtool.h. Vendors, parts and serial numbers are invented.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

SERIAL = b"SN0123456789    "
_DATE = b"261125  "


def _put(memory: bytearray, at: int, text: bytes, length: int = 16) -> None:
    memory[at : at + length] = text.ljust(length)


def _sum(memory: bytearray, begin: int, at: int) -> None:
    memory[at] = sum(memory[begin:at]) & 0xFF


def sfp(code: int = 0x0B, mbd: int = 25_750, copper: int = 4, metres: int = 3, encoding: int = 0) -> bytes:
    """An SFP by SFF-8472: address A0h. `copper`: bits 2 (passive) and 3 (active) of byte 8."""
    memory = bytearray(256)
    memory[0:3] = 0x03, 0x04, 0x21
    memory[8], memory[11], memory[18], memory[36] = copper, encoding, metres, code
    memory[12] = 0xFF if mbd > 25_400 else mbd // 100
    memory[66] = mbd // 250 if mbd > 25_400 else 0
    _put(memory, 20, b"A maker")
    _put(memory, 40, b"SFP-PART")
    _put(memory, 68, SERIAL)
    _put(memory, 84, _DATE, 8)
    _put(memory, 96, b"for " + SERIAL, 32)
    _sum(memory, 0, 63)
    _sum(memory, 64, 95)
    return bytes(memory)


def qsfp(
    code: int = 0x0B, mbd: int = 25_750, technology: int = 0xA, metres: int = 2, encoding: int = 5,
    infiniband: int = 0, ethernet: int = 0, kind: int = 0x11, connector: int = 0x23,
) -> bytes:  # fmt: skip
    """A QSFP by SFF-8636: lower page and page 00h."""
    memory = bytearray(256)
    memory[0] = memory[128] = kind
    memory[130] = connector
    memory[131], memory[139], memory[146], memory[147] = ethernet, encoding, metres, technology << 4
    memory[140] = 0xFF if mbd > 25_400 else mbd // 100
    memory[222] = mbd // 250 if mbd > 25_400 else 0
    memory[164], memory[192] = infiniband, code
    _put(memory, 148, b"A maker")
    _put(memory, 168, b"QSFP-PART")
    _sum(memory, 128, 191)
    _put(memory, 196, SERIAL)
    _put(memory, 212, _DATE, 8)
    _sum(memory, 192, 223)
    _put(memory, 224, b"for " + SERIAL, 32)
    return bytes(memory)


def cmis(
    hosts: Iterable[int] = (0x50,), technology: int = 0x0A, length: int = 0x0F, kind: int = 0x19
) -> bytes:
    """A module by CMIS: lower memory and page 00h. `hosts`: host interfaces of its applications; `length`:
    two bits of a multiplier (0.1, 1, 10, 100 m) and six of a number."""
    memory = bytearray(256)
    memory[0] = memory[128] = kind
    memory[1] = 0x52
    for index, host in enumerate((*hosts, 0xFF)):
        memory[86 + 4 * index : 90 + 4 * index] = host, 0x01, 0x44, 0x01
    _put(memory, 129, b"A maker")
    _put(memory, 148, b"OSFP-PART")
    _put(memory, 166, SERIAL)
    _put(memory, 182, _DATE, 8)
    memory[202], memory[212] = length, technology
    _sum(memory, 128, 222)
    return bytes(memory)


def link_settings(
    supported: Iterable[int], partner: Iterable[int] = (), port: int = 5, speed: int = 0, words: int = 4
) -> bytes:
    """`struct ethtool_link_settings` with its three masks, whose bits are given."""
    head = struct.pack("=IIBBBBBBBbBBBB28x", 0x4C, speed, 1, port, 0, 1, 0, 0, 0, words, 0, 0, 0, 0)
    masks = (sum(1 << bit for bit in set(bits)) for bits in (supported, supported, partner))
    return head + b"".join(mask.to_bytes(4 * words, "little") for mask in masks)
