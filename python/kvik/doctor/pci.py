"""The PCIe tree: GPUs, NICs, NVMe controllers and the bridges above them, as sysfs and config space say.

Sources: Linux Documentation/ABI/testing/sysfs-bus-pci; PCI Express Base Specification 6.0 (capability 0x10,
extended capability 0x0D: ACS); Intel ARK for the widths of DMI (chipset to CPU link).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvik.doctor.model import Link, PciDevice
from kvik.doctor.reader import Reader

ROOT = "/sys/bus/pci/devices"
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

INTEL, NVIDIA, AMD, AMD_CPU, MELLANOX, AMAZON = 0x8086, 0x10DE, 0x1002, 0x1022, 0x15B3, 0x1D0F
_SERVER_GRAPHICS = (0x1A03, 0x102B)  # ASPEED, Matrox: the display of a board's management
_EFA = range(0xEFA0, 0xEFB0)

# Chipsets of desktop boards: id of the LPC/eSPI bridge, GT/s a lane and lanes of the link to the CPU.
INTEL_CHIPSETS = {
    "Q670": (0x7A83, 16.0, 8),
    "Z690": (0x7A84, 16.0, 8),
    "H670": (0x7A85, 16.0, 8),
    "B660": (0x7A86, 16.0, 4),
    "H610": (0x7A87, 16.0, 4),
    "W680": (0x7A88, 16.0, 8),
    "Z790": (0x7A04, 16.0, 8),
    "H770": (0x7A05, 16.0, 8),
    "B760": (0x7A06, 16.0, 4),
}
_PCH_SLOTS = range(0x1A, 0x1E)  # On bus 0 of Intel's, root ports of the chipset; those of the CPU are below.
_CPU_X4_SLOT = 0x06  # The CPU's port for NVMe of 11th generation Core and later.
_GONE = 63  # lanes: all bits of the field, which is what is read of a device that does not answer
_AMD_CHIPSET_SWITCH = range(0x43B0, 0x4400)  # "Promontory" and later: a switch below a port of the CPU


def read_devices(reader: Reader) -> dict[str, PciDevice]:
    """Endpoints that matter and every bridge above them, by address."""
    resolved = {}
    for address in reader.names(ROOT):
        target = reader.target(f"{ROOT}/{address}")
        if ADDRESS.fullmatch(address):
            resolved[address] = target or f"{ROOT}/{address}"
    kinds = {address: _kind(reader, address) for address in resolved}
    lpc = "0000:00:1f.0"
    pch = lpc in resolved and reader.text(f"{ROOT}/{lpc}/vendor") == f"{INTEL:#06x}"
    found: dict[str, PciDevice] = {}
    for address, kind in kinds.items():
        if kind not in ("gpu", "nic", "nvme"):
            continue
        chain = _chain(resolved[address], address)
        found[address] = _device(reader, address, kind, chain)
        for index, bridge in enumerate(chain):
            if bridge not in found:
                found[bridge] = _device(reader, bridge, "bridge", chain[index + 1 :])
    return {address: _placed(device, found, pch) for address, device in sorted(found.items())}


def chipset_of(reader: Reader, board: str) -> tuple[str | None, float | None, int | None]:
    """Name of the chipset, GT/s a lane and lanes of its link to the CPU: by the id of its bridge, else by
    the board's name."""
    bridge = reader.text(f"{ROOT}/0000:00:1f.0/device", optional=True)
    vendor = reader.text(f"{ROOT}/0000:00:1f.0/vendor", optional=True)
    for name, (device, speed, lanes) in INTEL_CHIPSETS.items():
        by_id = bridge == f"{device:#06x}" and vendor == f"{INTEL:#06x}"
        if by_id or re.search(rf"\b{name}", board, re.IGNORECASE):
            return name, speed, lanes
    return None, None, None


def _kind(reader: Reader, address: str) -> str:
    path = f"{ROOT}/{address}"
    code = reader.hexadecimal(f"{path}/class")
    vendor = reader.hexadecimal(f"{path}/vendor")
    device = reader.hexadecimal(f"{path}/device")
    base = code >> 16
    integrated = address == "0000:00:02.0"  # Intel's graphics in the CPU
    kind = "other"
    if code >> 8 == 0x0604:
        kind = "bridge"
    elif base in (0x03, 0x12) and (vendor in (NVIDIA, AMD) or (vendor == INTEL and not integrated)):
        kind = "gpu"
    elif base == 0x02 or (vendor == AMAZON and device in _EFA):
        kind = "nic"
    elif code >> 8 == 0x0108:
        kind = "nvme"
    return "other" if vendor in _SERVER_GRAPHICS else kind


def _chain(target: str, address: str) -> tuple[str, ...]:
    above = [part for part in target.split("/") if ADDRESS.fullmatch(part)]
    return tuple(part for part in reversed(above) if part != address)


def _device(reader: Reader, address: str, kind: str, chain: tuple[str, ...]) -> PciDevice:
    path = f"{ROOT}/{address}"
    numa = reader.whole(f"{path}/numa_node", optional=True)
    physical = reader.target(f"{path}/physfn")
    driver = reader.target(f"{path}/driver")
    group = reader.target(f"{path}/iommu_group")
    config = reader.blob(f"{path}/config")
    acs = None if config is None else _acs(config)
    if config is not None and len(config) <= 64:
        reader.miss(f"{path}/config", "only its first 64 bytes; as root, the capabilities (ACS, payload) too")
    return PciDevice(
        address=address,
        vendor=reader.hexadecimal(f"{path}/vendor"),
        device=reader.hexadecimal(f"{path}/device"),
        class_code=reader.hexadecimal(f"{path}/class"),
        kind=kind,
        chain=chain,
        link=_link(reader, path, virtual=not chain and kind != "bridge"),
        numa=None if numa is None or numa < 0 else numa,
        physical=None if physical is None else physical.rpartition("/")[2],
        driver=None if driver is None else driver.rpartition("/")[2],
        iommu=None if group is None else reader.text(f"{group}/type"),
        bar1_bytes=_bar1(reader, path) if kind == "gpu" else None,
        acs_redirects=acs,
        max_payload=None if config is None else _max_payload(config),
    )


def _link(reader: Reader, path: str, virtual: bool) -> Link:
    """The link's state. A virtual machine's devices on its root bus have none, which is not worth a note."""
    width = reader.whole(f"{path}/current_link_width", virtual)
    max_width = reader.whole(f"{path}/max_link_width", virtual)
    if width == _GONE or max_width == _GONE:
        reader.miss(path, f"says {_GONE} lanes: the device does not answer (it is asleep, or off the bus)")
        return Link()
    # 0 and 255 are what the kernel shows where a port has no link.
    return Link(
        speed=_speed(reader, f"{path}/current_link_speed", virtual),
        width=width if width not in (0, 255) else None,
        max_speed=_speed(reader, f"{path}/max_link_speed", virtual),
        max_width=max_width if max_width not in (0, 255) else None,
    )


def _speed(reader: Reader, path: str, virtual: bool) -> float | None:
    said = reader.text(path, virtual)
    if said is not None and said.startswith("Unknown"):
        reader.miss(path, "the device says that its speed is unknown")
        return None
    return None if said is None else reader.number(path)


def _bar1(reader: Reader, path: str) -> int | None:
    """Bytes of the GPU's window for others: its largest BAR but the first."""
    lines = (reader.text(f"{path}/resource") or "").splitlines()
    sizes = []
    for line in lines[1:6]:
        try:
            start, end = (int(word, 16) for word in line.split()[:2])
        except ValueError:
            reader.miss(f"{path}/resource", f"a line says {line[:60]!r}")
            return None
        sizes.append(end - start + 1 if end > start else 0)
    return max(sizes, default=0) or None


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    at = config[0x34] & 0xFC if len(config) > 0x34 else 0
    for _ in range(48):
        if at < 0x40 or at + 1 >= len(config):
            return
        yield config[at], at
        at = config[at + 1] & 0xFC


def extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Id and offset of each extended capability; none where only a part of the space was read."""
    at = 0x100
    for _ in range(96):
        if at < 0x100 or at + 4 > len(config):
            return
        head = int.from_bytes(config[at : at + 4], "little")
        if head in (0, 0xFFFFFFFF):
            return
        yield head & 0xFFFF, at
        at = head >> 20 & 0xFFC


def _acs(config: bytes) -> bool | None:
    """Whether peer requests or completions are redirected (bits 2 and 3 of ACS control)."""
    if len(config) <= 0x100:
        return None
    for kind, at in extended_capabilities(config):
        if kind == 0x0D and at + 8 <= len(config):
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & 0b1100)
    return False


def _max_payload(config: bytes) -> int | None:
    """Bytes of payload a packet: bits 7:5 of Device Control."""
    for kind, at in _capabilities(config):
        if kind == 0x10 and at + 10 <= len(config):
            return int(128 << (int.from_bytes(config[at + 8 : at + 10], "little") >> 5 & 7))
    return None


def _placed(device: PciDevice, found: dict[str, PciDevice], pch: bool) -> PciDevice:
    top = found[device.chain[-1]] if device.chain else device
    domain, bus, rest = top.address.split(":")
    slot = int(rest.split(".")[0], 16)
    intel = top.vendor == INTEL and bus == "00" and int(domain, 16) == 0
    behind = pch and intel and slot in _PCH_SLOTS
    for address in device.chain:
        bridge = found[address]
        behind = behind or (bridge.vendor == AMD_CPU and bridge.device in _AMD_CHIPSET_SWITCH)
    attachment = None
    if intel and pch and slot == _CPU_X4_SLOT and device.kind != "bridge":
        attachment = "CPU x4 port (M.2 or OCuLink)"
    return replace(device, chipset=behind, attachment=attachment)
