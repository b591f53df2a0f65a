"""What a network device's driver says of its port, by ioctl: link settings, and the memory of what is plugged
in.

Linux, include/uapi/linux/ethtool.h. Link settings are for everybody; a module's memory is for who may set up
the network (CAP_NET_ADMIN). It is read by its first 256 bytes, which are the lower half and page 00h.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_GMODULEINFO, _GMODULEEEPROM, _GLINKSETTINGS = 0x42, 0x43, 0x4C
_SETTINGS = 48  # bytes of `struct ethtool_link_settings` before its masks
_WORDS_AT = 15  # of them: `link_mode_masks_nwords`, a signed byte
_MOST_WORDS = 127
MODULE_BYTES = 256


def link(net: str) -> bytes:
    """`struct ethtool_link_settings` with its masks: what is supported, what is advertised, what the partner
    advertises. OSError as the kernel says it."""
    asked = bytearray(_SETTINGS)
    struct.pack_into("=I", asked, 0, _GLINKSETTINGS)
    # The first call answers with the number of words, negated, and nothing else.
    words = -struct.unpack_from("=b", _ask(net, asked), _WORDS_AT)[0]
    if not 0 < words <= _MOST_WORDS:
        raise OSError(0, f"it says that masks have {words} words")
    asked = bytearray(_SETTINGS + 3 * 4 * words)
    struct.pack_into("=I", asked, 0, _GLINKSETTINGS)
    struct.pack_into("=b", asked, _WORDS_AT, words)
    return _ask(net, asked)


def module(net: str) -> bytes:
    """The memory of the module or cable in the port. OSError as the kernel says it."""
    asked = bytearray(44)  # `struct ethtool_modinfo`: cmd, type, eeprom_len, eight words
    struct.pack_into("=I", asked, 0, _GMODULEINFO)
    length = min(struct.unpack_from("=I", _ask(net, asked), 8)[0], MODULE_BYTES)
    asked = bytearray(16 + length)  # `struct ethtool_eeprom`: cmd, magic, offset, len, data
    struct.pack_into("=4I", asked, 0, _GMODULEEEPROM, 0, 0, length)
    return _ask(net, asked)[16:]


def _ask(net: str, data: bytearray) -> bytes:
    buffer = (ctypes.c_char * len(data)).from_buffer(data)
    name = net.encode()
    if len(name) > 15:
        raise OSError(0, "its name is longer than the kernel's")
    # `struct ifreq`: the name in 16 bytes, and a union of 24, here the address of the command.
    request = struct.pack("=16sQ16x", name, ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as at:
        fcntl.ioctl(at, _SIOCETHTOOL, request)
    return buffer.raw
