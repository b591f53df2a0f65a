"""What of a machine a measurement depends on, in a few lines, for comparing it with itself and with others.

`python -m kvik.doctor.summary` prints it as one JSON object. It is made of what `kvik doctor --save` keeps,
so nothing in it names the machine; and nothing changes by itself, as counters and an idle GPU's link do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvik.doctor.examining import examine
from kvik.doctor.links import link_gbs
from kvik.doctor.model import Nic, PciDevice
from kvik.doctor.ranking import findings
from kvik.doctor.saving import save
from kvik.doctor.tree import RecordedTree, Tree, live


def summary(tree: Tree, host: str | None = None) -> dict[str, Any]:
    """The machine by the name of what is said of it: texts, numbers, and lists of texts; None is what could
    not be read. `host`: as of `save`."""
    machine = examine(RecordedTree(save(tree, "summary", host)))
    limits = machine.limits
    memlock = "unlimited" if limits.memlock is None or limits.locks_freely else limits.memlock
    return {
        "board": machine.board or None,
        "chipset": machine.chipset,
        "container": machine.container,
        "nodes": [f"{node.number}: processors {node.cpus}" for node in machine.nodes],
        "gpus": [
            f"{gpu.address}: {gpu.name}{_place(machine.devices, gpu.address)}{_window(gpu.bar1_bytes)}"
            for gpu in machine.gpus
        ],
        "nics": [_nic(nic, machine.devices) for nic in machine.nics],
        "nvmes": [f"{nvme.address}{_place(machine.devices, nvme.address)}" for nvme in machine.nvmes],
        "gpu_driver": machine.gpu_driver,
        "modules": sorted(machine.modules),
        "libraries": sorted({f"{library.name} {library.version}" for library in machine.libraries}),
        "processors": limits.cpus_allowed,
        "cpu_quota": _limit(limits.cpu_quota, limits.cpu_quota_known),
        "memory_limit": _limit(limits.memory_limit, limits.memory_limit_known),
        "memlock": memlock if limits.memlock_known else None,
        "huge_pages": limits.huge_pages,
        "clock": limits.clock_source,
        "findings": sorted({f"{finding.code}: {finding.device}" for finding in findings(machine)}),
    }


def _limit(value: float | None, known: bool) -> float | str | None:
    return ("unlimited" if value is None else value) if known else None


def _place(devices: Mapping[str, PciDevice], address: str) -> str:
    """The link and the node of a device."""
    device = devices[address]
    gbs = link_gbs(devices, device)
    link = "" if gbs is None else f", x{device.link.width} {gbs:.1f} GB/s"
    return link + ("" if device.numa is None else f", node {device.numa}")


def _window(bar1: int | None) -> str:
    return "" if bar1 is None else f", window of {bar1 >> 20} MiB"


def _nic(nic: Nic, devices: Mapping[str, PciDevice]) -> str:
    rate = f"{nic.rate_gbits:g} Gbit/s" if nic.rate_gbits else "no link"
    mtu = "" if nic.mtu is None else f", mtu {nic.mtu}"
    return f"{nic.name}: {nic.driver}, {rate}{mtu}{_place(devices, nic.address) if nic.address else ''}"


if __name__ == "__main__":
    print(json.dumps(summary(live())))
