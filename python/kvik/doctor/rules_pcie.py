"""Rules about the PCIe tree and the place of devices in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvik.doctor.cost import Traffic, chipset_percent, width_percent
from kvik.doctor.links import link_gbs, link_speed, payload_share, pcie_gbs, slot_link
from kvik.doctor.model import Cost, Finding, Machine, Nic, PciDevice
from kvik.doctor.pci import NVIDIA

PCIE = "PCI Express Base Specification 6.0: lanes x GT/s x encoding"
_MODEL = "kvik.doctor.cost: model of a decode step, near the article's TP = 2; rough, trust the sign"
_BAR1_BYTES = 256 << 20  # What GPUs have without Resizable BAR.


def pcie_findings(machine: Machine, traffic: Traffic) -> Iterator[Finding]:
    """All of this module."""
    yield from _nic_links(machine)
    yield from _other_links(machine, traffic)
    yield from _chipset(machine, traffic)
    yield from _numa(machine)
    yield from _acs(machine)
    yield from _iommu(machine)
    yield from _bar1(machine)


def _nic_links(machine: Machine) -> Iterator[Finding]:
    """A NIC whose link carries less than its ports. Functions of one card with the same link count once."""
    for nic in machine.nics:
        device = machine.devices[nic.address] if nic.address else None
        now = link_gbs(machine.devices, device) if device else None
        if device is None or now is None or not nic.rate_gbits:
            continue
        usable = now * payload_share(device.max_payload or 256)
        rate = nic.rate_gbits / 8
        if usable < rate:
            yield Finding(
                "nic-link-narrow",
                nic.name,
                f"its PCIe link has {_said(machine.devices, device)}: {now:.1f} GB/s, and its ports "
                f"{rate:.1f} GB/s{_slot(machine.devices, device)}",
                Cost((1 - usable / rate) * 100, f"{PCIE}, less 24 bytes a packet", usable, rate),
                _wider(machine.devices, device),
                "kv,collectives",
            )


def _other_links(machine: Machine, traffic: Traffic) -> Iterator[Finding]:
    for device in machine.devices.values():
        link = device.link
        if device.kind not in ("gpu", "nvme") or not link.width or not link.max_width or not link.max_speed:
            continue
        gpu = device.kind == "gpu"
        now = link_gbs(machine.devices, device)
        speed = link_speed(machine.devices, device) if gpu else link.max_speed
        could = pcie_gbs(speed or link.max_speed, link.max_width)
        if now is None or now >= could * 0.99:
            continue
        # Of a link without a speed the model makes no time.
        modelled = gpu and traffic.tp > 1 and now > 0
        # More than the wire carries helps no collective.
        needed = min(could, max((nic.rate_gbits / 8 for nic in machine.nics), default=0.0) or could)
        percent = width_percent(min(now, needed), needed, traffic) if modelled else (1 - now / could) * 100
        yield Finding(
            f"{device.kind}-link-narrow",
            device.address,
            f"its PCIe link has {_said(machine.devices, device)} of x{link.max_width}: {now:.1f} of "
            f"{could:.1f} GB/s{_slot(machine.devices, device)}",
            Cost(percent, _MODEL if modelled else PCIE, now, could),
            _wider(machine.devices, device),
            "kv,collectives,load" if gpu else "load",
        )


def _said(devices: Mapping[str, PciDevice], device: PciDevice) -> str:
    speed = link_speed(devices, device)
    return f"x{device.link.width} at {speed:g} GT/s" if speed else f"x{device.link.width}"


def _slot(devices: Mapping[str, PciDevice], device: PciDevice) -> str:
    slot = slot_link(devices, device)
    if slot is None or not slot.max_width:
        return ""
    where = f", {device.attachment}" if device.attachment else ""
    return f" (the port above it has x{slot.max_width} at most{where})"


def _wider(devices: Mapping[str, PciDevice], device: PciDevice) -> str:
    """The port is narrow, or the link came up with less than both ends can."""
    slot, link = slot_link(devices, device), device.link
    if slot and slot.max_width and link.max_width and slot.max_width < link.max_width:
        return (
            "Move it to a slot with more lanes of the CPU. Where the board has one such slot, the NIC of a "
            "cluster gains more by it than the GPU."
        )
    if link.width and link.max_width and link.width < link.max_width:
        return "The slot has more lanes: seat the card again, clean its contacts, try another riser or cable."
    return "Look in the firmware setup for the slot's PCIe generation, at riser and cable; update firmware."


def _chipset(machine: Machine, traffic: Traffic) -> Iterator[Finding]:
    nics = {nic.address: nic for nic in machine.nics if nic.rate_gbits}
    for device in machine.devices.values():
        gpu = device.kind == "gpu"
        if not device.chipset or not (gpu or device.address in nics):
            continue
        paths = [
            pair.gbs or 1.0
            for pair in machine.pairs
            if device.address in (pair.a, pair.b)
            or (not gpu and nics[device.address].name in (pair.a, pair.b))
        ]
        percent = chipset_percent(min(paths, default=1.0), 1, traffic)
        name = device.address if gpu else nics[device.address].name
        dmi = f" ({machine.dmi_gbs:.1f} GB/s for all behind it)" if machine.dmi_gbs else ""
        yield Finding(
            f"{'gpu' if gpu else 'nic'}-behind-chipset",
            name,
            f"its path to the CPU goes through the chipset {machine.chipset or '(unknown)'}{dmi}",
            Cost(percent, _MODEL, min(paths, default=None), None),
            "Move it to a slot of the CPU. A GPU can use the CPU's M.2 port by an OCuLink cable and an "
            "external box."
            if gpu
            else "Move it to a slot of the CPU, even where the GPU then has the narrower one.",
            "collectives",
        )


def _numa(machine: Machine) -> Iterator[Finding]:
    nics = [nic for nic in machine.nics if nic.rate_gbits and nic.numa is not None]
    homes = {gpu.numa for gpu in machine.gpus if gpu.numa is not None}
    if len(machine.nodes) > 1:
        for nic in machine.nics:
            if nic.address and nic.numa is None:
                yield Finding(
                    "numa-unknown", nic.name, f"the firmware does not say its NUMA node of "
                                              f"{len(machine.nodes)}",
                    Cost(None, "no formula: what a crossing costs is the interconnect's"),
                    "Update the firmware, or give an explicit map of NICs.", "kv,collectives",
                )  # fmt: skip
    if len(nics) < len(homes):
        return  # Some GPU has to cross.
    per_node = {node: sum(nic.rate_gbits for nic in nics if nic.numa == node) / 8 for node in homes}
    for node in sorted(homes):
        if per_node[node] or not nics:
            continue
        gpus = [gpu.address for gpu in machine.gpus if gpu.numa == node]
        far = [nic for nic in nics if nic.numa != node]
        yield Finding(
            "nic-across-numa",
            _crowded(far, len(machine.nodes)),
            f"{len(gpus)} GPUs of NUMA node {node} have no NIC on their node: all traffic of theirs "
            f"crosses sockets",
            Cost(
                100 * len(gpus) / len(machine.gpus),
                "part of the GPUs whose whole traffic crosses; bandwidth of a crossing: `kvik doctor "
                "--measure`",
            ),
            f"Move half of the NICs to slots of NUMA node {node}.",
            "kv,collectives",
        )


def _crowded(far: list[Nic], nodes: int) -> str:
    """The NICs that are more than their node's share."""
    share = -(-len(far) // max(nodes, 1))
    return ", ".join(nic.name for nic in sorted(far, key=lambda nic: nic.name)[share:]) or far[0].name


def _acs(machine: Machine) -> Iterator[Finding]:
    """Peer traffic below a shared switch that ACS sends up to the root and back."""
    seen = set()
    for gpu in machine.gpus:
        for nic in machine.nics:
            if nic.address is None:
                continue
            a, b = machine.devices[gpu.address], machine.devices[nic.address]
            common = next((bridge for bridge in a.chain if bridge in b.chain), None)
            if common is None:
                continue
            for chain in (a.chain, b.chain):
                for bridge in chain[: chain.index(common)]:
                    if machine.devices[bridge].acs_redirects and bridge not in seen:
                        seen.add(bridge)
                        yield _acs_finding(machine.devices, common, bridge)


def _acs_finding(devices: Mapping[str, PciDevice], switch: str, bridge: str) -> Finding:
    up = link_gbs(devices, devices[switch])
    return Finding(
        "acs-on-path",
        bridge,
        f"ACS sends requests between a GPU and a NIC below {switch} up to the root complex and back",
        Cost(
            50.0,
            "each byte passes the switch's upstream link twice: half of its GB/s",
            up / 2 if up else None,
            up,
        ),
        "Turn ACS off in the firmware, or by `setpci` on this port at each boot (not where virtual "
        "machines share it).",
        "kv,collectives",
    )


def _iommu(machine: Machine) -> Iterator[Finding]:
    wanted = {gpu.address for gpu in machine.gpus} | {nic.address for nic in machine.nics if nic.address}
    translated = [
        machine.devices[name]
        for name in sorted(wanted)
        if (machine.devices[name].iommu or "").startswith("DMA")
    ]
    if translated and machine.nics:
        yield Finding(
            "iommu-translates",
            ", ".join(device.address for device in translated),
            f"the IOMMU translates the addresses of {len(translated)} GPUs and NICs (domain type "
            f"{translated[0].iommu})",
            Cost(
                None,
                "no formula: depends on the IOMMU's cache; peer traffic is sent through the root complex",
            ),
            "Start the kernel with iommu=pt (and intel_iommu=on or amd_iommu=on), or turn the IOMMU off.",
            "kv,collectives",
        )


def _bar1(machine: Machine) -> Iterator[Finding]:
    if not machine.nics:
        return
    for gpu in machine.gpus:
        nvidia = machine.devices[gpu.address].vendor == NVIDIA
        if nvidia and gpu.bar1_bytes is not None and gpu.bar1_bytes <= _BAR1_BYTES:
            yield Finding(
                "bar1-small",
                gpu.address,
                f"its window for NICs (BAR1) has {gpu.bar1_bytes >> 20} MiB",
                Cost(None, "GPUDirect RDMA registers no more GPU memory at once than BAR1 has", fails=True),
                "Turn on Resizable BAR and Above 4G Decoding in the firmware.",
                "kv",
            )
