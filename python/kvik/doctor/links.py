"""What a link can carry, and what the path between two devices can.

Sources: PCI Express Base Specification 6.0: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, FLITs of 236 bytes
of packets in 256 at 64 GT/s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvik.doctor.model import Link, Machine, Pair, PciDevice

_UNREADABLE = "no link of the path says its speed"


def pcie_gbs(gts: float, lanes: int) -> float:
    """GB/s each way of `lanes` lanes of `gts` GT/s, after line encoding and before packet headers."""
    if gts <= 5:
        share = 8 / 10
    elif gts <= 32:
        share = 128 / 130
    else:
        share = 236 / 256
    return gts * share * lanes / 8


def payload_share(max_payload: int) -> float:
    """The part of a link's bytes that is payload, when packets carry `max_payload` bytes each: 24 more are
    framing (4), header of 64-bit addresses (16) and LCRC (4)."""
    return max_payload / (max_payload + 24)


def link_speed(devices: Mapping[str, PciDevice], device: PciDevice) -> float | None:
    """GT/s of the link above a device. An idle GPU lowers its speed and raises it under load, so of a GPU
    and of bridges the speed that both ends can have is taken."""
    link = device.link
    if device.kind not in ("gpu", "bridge") or link.max_speed is None:
        return link.speed
    # Of bridges, the one below a root port is the upper end of a switch; others may be its ports below.
    port = slot_link(devices, device) if device.kind == "gpu" or len(device.chain) == 1 else None
    # A port with fewer lanes than are in use is not what is plugged into: virtual machines have such.
    if port is None or port.max_speed is None or (port.max_width or 0) < (link.width or 0):
        return link.max_speed
    return min(link.max_speed, port.max_speed)


def link_gbs(devices: Mapping[str, PciDevice], device: PciDevice) -> float | None:
    """GB/s of the link above a device, by its speed and its present width."""
    speed, width = link_speed(devices, device), device.link.width
    return None if speed is None or width is None else pcie_gbs(speed, width)


def slot_link(devices: Mapping[str, PciDevice], device: PciDevice) -> Link | None:
    """The port that a device is in: its own maximum is the slot's."""
    return devices[device.chain[0]].link if device.chain else None


def pairs(machine: Machine) -> tuple[Pair, ...]:
    """Each pair that traffic may take: GPU and NVMe with memory, NIC with memory and wire, GPU with NIC, GPU
    with GPU."""
    found = []
    gpus = [(gpu.address, machine.devices[gpu.address]) for gpu in machine.gpus]
    nics = [(nic.name, machine.devices[nic.address]) for nic in machine.nics if nic.address]
    nvmes = [(nvme.name, machine.devices[nvme.address]) for nvme in machine.nvmes]
    found += [_to_memory(machine, name, device) for name, device in (*gpus, *nics, *nvmes)]
    for nic in machine.nics:
        if nic.rate_gbits:
            rate = nic.rate_gbits / 8
            found.append(
                Pair(nic.name, "wire", rate, f"ports of {nic.name}, {nic.rate_gbits:g} Gbit/s", 0, False)
            )
    found += [between(machine, gpu, nic) for gpu in gpus for nic in nics]
    found += [between(machine, a, b) for index, a in enumerate(gpus) for b in gpus[index + 1 :]]
    return tuple(found)


def between(machine: Machine, a: tuple[str, PciDevice], b: tuple[str, PciDevice]) -> Pair:
    """The path between two devices: up to the first bridge that is above both, or through the root."""
    above_b = (b[1].address, *b[1].chain)
    common = next((bridge for bridge in (a[1].address, *a[1].chain) if bridge in above_b), None)
    gbs, bottleneck = _least(
        [*_upward(machine.devices, a[1], common), *_upward(machine.devices, b[1], common)]
    )
    through = 0 if common else int(a[1].chipset) + int(b[1].chipset)
    both_behind = a[1].chipset and b[1].chipset
    if through and not both_behind:
        gbs, bottleneck = _least([(gbs, bottleneck), (machine.dmi_gbs, _dmi(machine.chipset))])
    crosses = a[1].numa is not None and b[1].numa is not None and a[1].numa != b[1].numa
    return Pair(a[0], b[0], gbs, bottleneck, 0 if both_behind else through, crosses)


def _to_memory(machine: Machine, name: str, device: PciDevice) -> Pair:
    gbs, bottleneck = _least(list(_upward(machine.devices, device, None)))
    if device.chipset:
        gbs, bottleneck = _least([(gbs, bottleneck), (machine.dmi_gbs, _dmi(machine.chipset))])
    return Pair(name, "memory", gbs, bottleneck, int(device.chipset), False)


def _dmi(chipset: str | None) -> str:
    return f"link between chipset {chipset or '(unknown)'} and CPU"


def _upward(
    devices: Mapping[str, PciDevice], device: PciDevice, stop: str | None
) -> Iterator[tuple[float | None, str]]:
    way = (device.address, *device.chain)
    for address in way:
        if address == stop:
            return
        here = devices[address]
        link = here.link
        # The top bridge is a root port: what it says is the link below it, which the next one says too.
        if here.kind != "bridge" or address != way[-1]:
            said = f"link of {address}" + (f", x{link.width}" if link.width else "")
            yield link_gbs(devices, here), said


def _least(hops: list[tuple[float | None, str]]) -> tuple[float | None, str]:
    known = [(gbs, said) for gbs, said in hops if gbs is not None]
    return min(known) if known else (None, _UNREADABLE)
