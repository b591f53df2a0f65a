"""What has changed between two machines, or one before and after a move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvik.doctor.cost import Prediction, Traffic, predict
from kvik.doctor.model import Finding, Machine
from kvik.doctor.ranking import findings


@dataclass(frozen=True)
class Change:
    """The GB/s of a kind of path, before and after; None where it is not there."""

    path: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Comparison:
    """Findings that are gone and new, paths whose GB/s differ, and what a cluster of such hosts would do."""

    gone: list[Finding]
    new: list[Finding]
    changes: list[Change]
    predictions: list[Prediction]


def compare(before: Machine, after: Machine, traffic: Traffic | None = None) -> Comparison:
    """Compare two machines. Devices are told apart by kind and order: a moved card has another address."""
    old, new = findings(before, traffic), findings(after, traffic)
    were, are = (
        {(finding.code, _place(machine, finding.device)) for finding in found}
        for machine, found in ((before, old), (after, new))
    )
    paths = _paths(before), _paths(after)
    changes = [
        Change(name, paths[0].get(name), paths[1].get(name))
        for name in sorted({*paths[0], *paths[1]})
        if paths[0].get(name) != paths[1].get(name)
    ]
    return Comparison(
        gone=[finding for finding in old if (finding.code, _place(before, finding.device)) not in are],
        new=[finding for finding in new if (finding.code, _place(after, finding.device)) not in were],
        changes=changes,
        predictions=predict(before, after),
    )


def _place(machine: Machine, device: str) -> str:
    """What a finding is about, by kind and order where it has an address."""
    addresses: Mapping[str, Sequence[str | None]] = {
        "NIC": [nic.address for nic in machine.nics],
        "GPU": [gpu.address for gpu in machine.gpus],
        "NVMe": [nvme.address for nvme in machine.nvmes],
    }
    for kind, of_kind in addresses.items():
        for index, address in enumerate(of_kind):
            if address is not None:
                device = device.replace(address, f"{kind} {index}")
    return device


def _paths(machine: Machine) -> dict[str, float | None]:
    names = {gpu.address: f"GPU {index}" for index, gpu in enumerate(machine.gpus)}
    return {f"{names.get(pair.a, pair.a)} - {names.get(pair.b, pair.b)}": pair.gbs for pair in machine.pairs}
