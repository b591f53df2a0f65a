"""The NICs near a rank of a serving engine, by the names that an engine's option `nics` takes.

The map is one of the whole host, and no rank's or server's own: each GPU of the rank's model has its NICs,
whoever uses it. So ranks agree without asking each other, also where they do not see the same devices: those
of another server, replica or container, and those with another CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvik.doctor.host import RDMA
from kvik.doctor.maps import nics_for_ranks, usable
from kvik.doctor.model import Machine, Nic, Port

EFA, VERBS = "efa", "verbs"
_EFA_DRIVER = "efa"
_SLOW = 2
"""A NIC of less than the fastest one's rate by this is of another network: the host's own, or storage's."""
_INFORMATION = "/proc/driver/nvidia/gpus/{}/information"


class NearUnknownError(Exception):
    """Which NICs are near cannot be told; the text says what could not be read, or is not there."""


@dataclass(frozen=True)
class Near:
    """What a rank takes. `devices`: nearest first; empty where those are all that there are. `node`: the NUMA
    node of all of them, on a machine with several. `why`: the choice in words."""

    devices: tuple[str, ...]
    node: int | None
    why: str


class NearNics:
    """The NICs of one kind (`EFA` or `VERBS`) of a machine, shared out. `NearUnknownError` where there are
    none to share."""

    def __init__(self, machine: Machine, kind: str) -> None:
        linked = [nic for nic in usable(machine) if (nic.driver == _EFA_DRIVER) == (kind == EFA)]
        able = [nic for nic in linked if nic.node is not None and any(map(_can_be_reached, nic.ports))]
        if not able:
            raise NearUnknownError(_why_none(linked, kind, machine))
        hardware = [nic for nic in able if nic.address is not None] or able
        fastest = max(nic.rate_gbits for nic in hardware)
        self._machine = machine
        self._nics = tuple(nic for nic in hardware if _SLOW * nic.rate_gbits >= fastest)
        # Others that an engine would open which is told of none.
        self._rest = [nic for nic in able if nic not in self._nics]
        # This container has the device files of some NICs only.
        self._allotted = any(nic.node is None for nic in linked)

    def of_gpu(self, address: str) -> Near:
        """Those of the rank whose KV lies on the GPU at this PCI address."""
        gpus = self._gpus(address)
        only = replace(self._machine, nics=self._nics)
        names = nics_for_ranks(only, len(gpus), gpus=gpus)[gpus.index(address)]
        among = f" of {len(gpus)} alike" if len(gpus) > 1 else ""
        return self._near(names, f"near GPU {address}{among}")

    def of_rank(self, number: int, ranks: int) -> Near:
        """Those of rank `number` of `ranks` on this host, whose KV lies in the host's memory: an even share,
        by names. No rank can know on which node the others' memory is, so no share is nearer than another."""
        only = replace(self._machine, nics=self._nics, gpus=())
        names = nics_for_ranks(only, ranks)[number]
        return replace(self._near(names, f"the share of rank {number} of {ranks} on this host"), node=None)

    def _gpus(self, address: str) -> list[str]:
        """The GPUs that share the NICs: those of the model of this one. Others, such as the display's, have
        none.

        A container that was allotted some NICs was allotted some GPUs as well, and shares among those;
        NVIDIA's tools leave the others' files out of /proc."""
        devices = self._machine.devices
        if address not in {gpu.address for gpu in self._machine.gpus}:
            raise NearUnknownError(f"GPU {address} is not among the GPUs of /sys/bus/pci/devices")
        own = devices[address]
        alike = [
            gpu.address
            for gpu in self._machine.gpus
            if (devices[gpu.address].vendor, devices[gpu.address].device) == (own.vendor, own.device)
        ]
        if self._allotted:
            hidden = {missing.path for missing in self._machine.unread}
            shown = [one for one in alike if _INFORMATION.format(one) not in hidden]
            return shown if address in shown else alike
        return alike

    def _near(self, names: Sequence[str], why: str) -> Near:
        by_name = {nic.name: nic for nic in self._nics}
        chosen = [by_name[name] for name in names]
        nodes = {nic.numa for nic in chosen}
        node = nodes.pop() if len(self._machine.nodes) > 1 and len(nodes) == 1 else None
        every = len(chosen) == len(self._nics) and not (self._rest or self._allotted)
        if self._rest:
            left = ", ".join(f"{nic.name} ({nic.rate_gbits:g} Gbit/s)" for nic in self._rest)
            why += f"; left out as slower or in software: {left}"
        return Near(() if every else tuple(port for nic in chosen for port in _ports(nic)), node, why)


@dataclass(frozen=True)
class OfGpu:
    """What a rank takes whose KV lies on this GPU, when it is told of NICs of this kind, or why that is not
    known."""

    gpu: str
    kind: str
    near: Near | None
    unknown: str = ""


def near_gpus(machine: Machine) -> list[OfGpu]:
    """Of each GPU and each kind of NICs that there is."""
    there = {EFA if nic.driver == _EFA_DRIVER else VERBS for nic in machine.nics if nic.ports}
    found = []
    for kind in sorted(there):
        for gpu in machine.gpus:
            try:
                found.append(OfGpu(gpu.address, kind, NearNics(machine, kind).of_gpu(gpu.address)))
            except NearUnknownError as error:
                found.append(OfGpu(gpu.address, kind, None, str(error)))
    return found


def _can_be_reached(port: Port) -> bool:
    """Whether it has a link, and over Ethernet a GID, which it has with an address."""
    return port.active and (port.layer != "Ethernet" or bool(port.gids))


def _why_none(linked: Sequence[Nic], kind: str, machine: Machine) -> str:
    unread = next((missing for missing in machine.unread if missing.path == RDMA), None)
    if unread is not None:
        return f"{RDMA}: {unread.reason}"
    what = "EFA" if kind == EFA else "RDMA NIC"
    if any(nic.node is None for nic in linked):
        return f"no {what} has its device file in /dev/infiniband"
    return f"{RDMA} has no {what} with a link" + (" and an address" if linked else "")


def _ports(nic: Nic) -> list[str]:
    """The ports of a NIC that can be used, as an engine names them: the first one as the device."""
    usable_ports = [port.number for port in nic.ports if _can_be_reached(port)]
    return [nic.name if number == 1 else f"{nic.name}/{number}" for number in usable_ports]
