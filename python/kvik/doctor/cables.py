"""What is plugged into a port, as its memory says, and what the port itself can.

Sources: SFF-8472 (SFP), SFF-8636 (QSFP to QSFP56), CMIS 5 (QSFP-DD, OSFP, QSFP112), and SFF-8024 for the
codes of all of them; Linux, include/uapi/linux/ethtool.h for link settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvik.doctor.model import Cable, NetDevice
from kvik.doctor.reader import Reader

ETHTOOL = "/ioctl/ethtool"
"""Where a tree has what `ethtool` asks a driver for: `NAME/link` and `NAME/module`."""

# SFF-8024, table 4-1.
_SFP = {0x03: "SFP", 0x0B: "SFP"}
_QSFP = {0x0C: "QSFP", 0x0D: "QSFP+", 0x11: "QSFP28"}
_CMIS = {
    0x18: "QSFP-DD", 0x19: "OSFP", 0x1B: "DSFP", 0x1E: "QSFP", 0x1F: "SFP-DD", 0x20: "SFP", 0x21: "OSFP-XD",
}  # fmt: skip


def _codes(groups: Mapping[int, Iterable[int]]) -> dict[int, int]:
    return {code: rate for rate, codes in groups.items() for code in codes}


# SFF-8024, table 4-4: Gbit/s of a QSFP, which has four lanes, and of an SFP, which has one.
_QSFP_RATES = _codes(
    {
        40: (0x10, 0x11, 0x12, 0x1F),
        100: (*range(0x01, 0x0A), 0x0B, *range(0x17, 0x1C), *range(0x20, 0x29), 0x2A, 0x2B, 0x34, 0x35, 0x3A),
        200: (0x30, 0x31, 0x32, 0x33, 0x40, 0x41, 0x42, 0x43, 0x44, 0x46),
        400: (0x29, 0x36, 0x3F, 0x47, 0x48, 0x49, 0x4B, 0x4C),
    }
)
_SFP_RATES = _codes(
    {
        10: (0x16, 0x1C, 0x37),
        25: (0x01, 0x02, 0x03, 0x04, 0x08, 0x0B, 0x0C, 0x0D, 0x18, 0x19, 0x38),
        50: (0x30, 0x31, 0x32, 0x33, 0x39, 0x40, 0x41, 0x42, 0x45, 0x4A),
        100: (0x29, 0x36, 0x3F),
    }
)
# SFF-8024, table 4-5: what an application of CMIS asks of the host.
_HOST_RATES = _codes(
    {
        10: (0x03, 0x04, 0x13),
        25: (0x05, 0x14, 0x15, 0x16),
        40: (0x06, 0x07, 0x17, 0x2E),
        50: (0x08, 0x09, 0x0A, 0x18, 0x43, 0x44, 0x45),
        56: (0x2F,),
        100: (0x0B, 0x0C, 0x0D, 0x19, 0x1A, 0x1B, 0x30, 0x41, 0x42, 0x46, 0x4B, 0x4C),
        200: (0x0E, 0x0F, 0x1C, 0x31, 0x47, 0x4D, 0x4E, 0x80),
        400: (0x10, 0x11, 0x1D, 0x32, 0x48, 0x4F, 0x50, 0x59, 0x81),
        800: (0x49, 0x51, 0x52, 0x57, 0x82),
        1600: (0x55, 0x56, 0x58, 0x83),
    }
)
_INFINIBAND = {6: 400, 5: 200, 4: 100, 3: 56, 2: 40}  # bits of byte 164 of SFF-8636
_STEPS = (10, 25, 40, 50, 56, 100, 200, 400, 800)
_NOT_SEPARABLE = 0x23  # SFF-8024, table 4-3
_PAM4 = 8  # SFF-8024, table 4-2
# Bits of the kernel's masks of link modes, in Mbit/s a bit.
_MODES = _codes(
    {
        1000: (4, 5, 17, 41),
        2500: (15, 47),
        5000: (48,),
        10000: (12, 18, 19, 20, *range(42, 47)),
        20000: (21, 22),
        25000: (31, 32, 33),
        40000: range(23, 27),
        50000: (34, 35, 40, *range(52, 57)),
        56000: range(27, 31),
        100000: (*range(36, 40), *range(57, 62), *range(75, 80)),
        200000: (*range(62, 67), *range(80, 85)),
        400000: (*range(69, 74), *range(85, 90)),
        800000: range(93, 99),
    }
)
_PORTS = {0: "twisted pair", 3: "fibre", 5: "direct attach", 0xEF: "none"}


class CableError(Exception):
    """What a driver or a module says that cannot be understood; the text says why."""


def read_cables(reader: Reader, nets: Iterable[NetDevice]) -> tuple[NetDevice, ...]:
    """The devices with what their ports can, and with what is plugged in."""
    found = []
    for net in nets:
        for name, understand in (("link", _with_link), ("module", _with_module)):
            path = f"{ETHTOOL}/{net.name}/{name}"
            said = reader.blob(path)
            try:
                net = net if said is None else understand(net, said)
            except CableError as error:
                reader.miss(path, str(error))
        found.append(net)
    return tuple(found)


def _with_link(net: NetDevice, said: bytes) -> NetDevice:
    settings = read_link(said)
    if settings is None:
        raise CableError(f"has {len(said)} bytes, which are no link settings")
    return replace(
        net, port=settings.port, able_mbits=settings.able_mbits, partner_mbits=settings.partner_mbits
    )


def _with_module(net: NetDevice, memory: bytes) -> NetDevice:
    return replace(net, cable=read_module(memory))


@dataclass(frozen=True)
class LinkSettings:
    """The port's connector, and the fastest mode that it has and that its partner offers."""

    port: str | None
    able_mbits: int | None
    partner_mbits: int | None


def read_link(said: bytes) -> LinkSettings | None:
    """What `struct ethtool_link_settings` says; None where it is none."""
    words = said[15] if len(said) > 48 else 0
    if not 0 < words < 128 or len(said) < 48 + 12 * words:
        return None
    masks = [said[48 + 4 * words * index :][: 4 * words] for index in range(3)]
    return LinkSettings(_PORTS.get(said[9]), _fastest(masks[0]), _fastest(masks[2]))


def _fastest(mask: bytes) -> int | None:
    bits = int.from_bytes(mask, "little")
    return max((rate for bit, rate in _MODES.items() if bits >> bit & 1), default=None)


def read_module(memory: bytes) -> Cable:
    """What a module says of itself. Its serial number and date are not looked at."""
    kind = memory[0] if memory else 0
    for names, fields, length in ((_SFP, _sfp, 96), (_QSFP, _qsfp, 256), (_CMIS, _cmis, 256)):
        if kind in names:
            if len(memory) < length:
                raise CableError(f"it has {len(memory)} bytes of {length}")
            return fields(names[kind], memory)
    raise CableError(f"it is of a kind that is not known here ({kind:#04x} of SFF-8024)")


def _sfp(form: str, memory: bytes) -> Cable:
    _summed(memory, 0, 63)
    copper = "passive copper" if memory[8] & 4 else "active copper" if memory[8] & 8 else ""
    nominal = memory[66] * 250 if memory[12] == 0xFF else memory[12] * 100
    claims = [_SFP_RATES.get(memory[36]), _step(nominal, 2 if memory[11] == _PAM4 else 1)]
    length = float(memory[18]) if copper else None
    return Cable(
        form, _text(memory, 20), _text(memory, 40), copper or "optical", length or None, _most(claims)
    )


def _qsfp(form: str, memory: bytes) -> Cable:
    _summed(memory, 128, 191)
    nominal = memory[222] * 250 if memory[140] == 0xFF else memory[140] * 100
    claims = [_QSFP_RATES.get(memory[192]), _step(nominal, 8 if memory[139] == _PAM4 else 4)]
    claims += [rate for bit, rate in _INFINIBAND.items() if memory[164] >> bit & 1]
    claims += [40] * bool(memory[131] & 0x0F)
    technology = _technology(memory[147] >> 4)
    # Of a module that a fibre is plugged into, byte 146 is the reach of OM4.
    whole = technology != "optical" or memory[130] == _NOT_SEPARABLE
    length = float(memory[146]) if whole else None
    return Cable(form, _text(memory, 148), _text(memory, 168), technology, length or None, _most(claims))


def _cmis(form: str, memory: bytes) -> Cable:
    _summed(memory, 128, 222)
    claims = [_HOST_RATES.get(host) for host in _applications(memory)]
    length = (memory[202] & 0x3F) * (0.1, 1, 10, 100)[memory[202] >> 6]
    return Cable(
        form, _text(memory, 129), _text(memory, 148), _technology(memory[212]), length or None, _most(claims)
    )


def _applications(memory: bytes) -> Iterator[int]:
    """The host interface of each application: bytes 86 to 117, four each, up to one of FFh."""
    for at in range(86, 118, 4):
        if memory[at] == 0xFF:
            return
        yield memory[at]


def _summed(memory: bytes, begin: int, at: int) -> None:
    """Each standard has a byte that is the sum of those before it."""
    total = sum(memory[begin:at]) & 0xFF
    if total != memory[at]:
        raise CableError(
            f"its sum is wrong: byte {at} is {memory[at]:#04x}, and those before it add up to {total:#04x}"
        )


def _technology(code: int) -> str:
    if code in (0x0A, 0x0B):
        return "passive copper"
    return "active copper" if code in (0x0C, 0x0D, 0x0E, 0x0F) else "optical"


def _step(nominal_mbd: int, bits: int) -> int | None:
    """The Ethernet rate that a signalling rate carries: 25.78 GBd on four lanes are 100 Gbit/s."""
    return max((step for step in _STEPS if step * 1000 <= nominal_mbd * bits), default=None)


def _most(claims: Iterable[int | None]) -> int | None:
    return max((rate for rate in claims if rate is not None), default=None)


def _text(memory: bytes, at: int) -> str:
    said = memory[at : at + 16].decode("ascii", errors="replace")
    return "".join(letter for letter in said if letter.isprintable()).strip()


def without_serial(memory: bytes) -> bytes:
    """A module's memory without serial number, date, and what its vendor put there for itself."""
    content = bytearray(memory)
    kind = memory[0] if memory else 0
    spans = [(68, 92), (96, 256)] if kind in _SFP else [(196, 220), (224, 256)] if kind in _QSFP else []
    if kind in _CMIS:
        spans = [(166, 190), (214, 222), (223, 256)]
    elif not spans:
        spans = [(1, 256)]
    for begin, end in spans:
        content[begin:end] = bytes(len(content[begin:end]))
    if kind in _CMIS and len(content) > 222:
        content[222] = (content[222] - _lost(memory, spans[:2])) & 0xFF
    return bytes(content)


def _lost(memory: bytes, spans: Iterable[tuple[int, int]]) -> int:
    """What the sum had of the bytes that are gone: a wrong sum stays as wrong as it was."""
    return sum(sum(memory[begin:end]) for begin, end in spans)
