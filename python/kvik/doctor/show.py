"""A machine, its findings and a comparison, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvik.doctor.comparing import Comparison
from kvik.doctor.links import link_gbs
from kvik.doctor.maps import nics_for_ranks
from kvik.doctor.model import Finding, Limits, Machine, Missing, NetDevice, Pair
from kvik.doctor.near import OfGpu, near_gpus


def to_json(machine: Machine, found: list[Finding]) -> dict[str, Any]:
    """What `kvik doctor --json` prints."""
    return {
        "machine": asdict(machine),
        "findings": [asdict(finding) for finding in found],
        "near": [asdict(one) for one in near_gpus(machine)],
    }


def machine_lines(machine: Machine) -> Iterator[str]:
    """The machine: board, nodes, the tree, the pairs."""
    yield f"board     {machine.board or 'not said'}"
    if machine.chipset:
        dmi = f", {machine.dmi_gbs:.1f} GB/s to the CPU" if machine.dmi_gbs else ""
        yield f"chipset   {machine.chipset}{dmi}"
    for node in machine.nodes:
        memory = f"{node.memory_bytes / 2**30:.0f} GiB" if node.memory_bytes else "memory not said"
        yield f"node {node.number}    processors {node.cpus or 'none'}, {memory}"
    rows = process_rows(machine.limits, machine.container_marks, machine.not_there)
    yield from (f"{what:<9} {said}" for what, said in rows)
    for net in machine.nets:
        yield f"port      {net.name}: {port_text(net)}"
    for library in machine.libraries:
        yield f"library   {library.name} {library.version} ({library.origin}) {library.path}"
    yield ""
    yield from tree_lines(machine)
    if machine.pairs:
        yield ""
        shown = near_pairs(machine)
        yield f"paths, ideal GB/s each way ({len(machine.pairs) - len(shown)} more are in --json and --page):"
        yield from (f"  {pair_text(pair)}" for pair in shown)
    near = near_gpus(machine)
    if near:
        yield ""
        yield "NICs of a serving engine's rank, by the GPU that its KV lies on:"
        yield from (f"  {near_text(one)}" for one in near)


def group_text(limits: Limits) -> str:
    """What the control groups and the affinity leave this process."""
    memory = "unlimited" if limits.memory_limit is None else f"{limits.memory_limit / 2**20:,.0f} MiB"
    quota = "all their time" if limits.cpu_quota is None else f"time of {limits.cpu_quota:g} of them"
    return ", ".join(
        (
            f"processors {limits.cpus_allowed or 'not said'}",
            quota if limits.cpu_quota_known else "quota not said",
            f"memory {memory if limits.memory_limit_known else 'limit not said'}",
        )
    )


def port_text(net: NetDevice) -> str:
    """What a port can, what its partner offers, and what is plugged in."""
    rates = (("can", net.able_mbits), ("partner offers", net.partner_mbits))
    said = [net.port or "connector not said"]
    said += [f"{what} {mbits / 1000:g} Gbit/s" for what, mbits in rates if mbits is not None]
    cable = net.cable
    if cable is None:
        return ", ".join([*said, "cable not read"])
    length = "" if cable.length_m is None else f" {cable.length_m:g} m"
    rate = "rate not said" if cable.rate_gbits is None else f"{cable.rate_gbits} Gbit/s"
    return ", ".join(
        [*said, f"{cable.form} {cable.vendor} {cable.part}", f"{cable.technology}{length}", rate]
    )


def process_rows(
    limits: Limits, container_marks: Sequence[str], not_there: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """What confines this process."""
    lock = (
        "not said"
        if not limits.memlock_known
        else "unlimited"
        if limits.memlock is None
        else f"{limits.memlock:,} bytes"
    )
    free = " (this process may lock more)" if limits.locks_freely and limits.memlock is not None else ""
    yield "limits", f"memlock {lock}{free}, huge pages {limits.huge_pages}"
    yield "group", group_text(limits)
    if container_marks:
        lacks = f"; not there: {', '.join(not_there)}" if not_there else ""
        yield "container", f"told by {', '.join(container_marks)}{lacks}"
    yield "kernel", f"clock {limits.clock_source}, ptrace scope {limits.ptrace_scope}"


def near_pairs(machine: Machine) -> list[Pair]:
    """Paths to memory and wire, and of each GPU those to the NICs that its rank would take."""
    near = nics_for_ranks(machine, max(len(machine.gpus), 1))
    wanted = {(gpu.address, name) for gpu, names in zip(machine.gpus, near, strict=False) for name in names}
    return [pair for pair in machine.pairs if pair.b in ("memory", "wire") or (pair.a, pair.b) in wanted]


def tree_lines(machine: Machine) -> Iterator[str]:
    """The PCIe tree, a device a line."""
    if not machine.devices:
        yield "no GPU, NIC or NVMe on PCIe"
    for address, depth in tree_order(machine):
        yield f"{'  ' * depth}{address}  {label(machine, address)}"


def tree_order(machine: Machine) -> Iterator[tuple[str, int]]:
    """Addresses in the order of the tree, each with its depth."""
    order = sorted(machine.devices.values(), key=lambda device: (*reversed(device.chain), device.address))
    return ((device.address, len(device.chain)) for device in order)


def label(machine: Machine, address: str) -> str:
    """What a device is, its link, node and place."""
    device = machine.devices[address]
    names = [gpu.name for gpu in machine.gpus if gpu.address == address]
    names += [
        f"{nic.name} {nic.rate_gbits:g} Gbit/s" if nic.rate_gbits else f"{nic.name} (no link)"
        for nic in machine.nics
        if nic.address == address
    ]
    names += [nvme.name for nvme in machine.nvmes if nvme.address == address]
    said = [f"{device.kind} {', '.join(names)}".strip()]
    gbs = link_gbs(machine.devices, device)
    if gbs is not None and (device.kind != "bridge" or device.chain):
        said.append(f"x{device.link.width} {gbs:.1f} GB/s")
    if device.numa is not None and len(machine.nodes) > 1:
        said.append(f"node {device.numa}")
    if device.kind != "bridge":
        said += ["behind the chipset"] * device.chipset + ([device.attachment] if device.attachment else [])
    return ", ".join(said)


def pair_text(pair: Pair) -> str:
    """One pair."""
    gbs = "unknown" if pair.gbs is None else f"{pair.gbs:.1f}"
    notes = ["through the chipset"] * (pair.chipset > 0) + ["crosses NUMA nodes"] * pair.crosses_numa
    return f"{pair.a} - {pair.b}: {gbs} ({'; '.join([pair.bottleneck, *notes])})"


def near_text(one: OfGpu) -> str:
    """The NICs of a GPU, as the option `nics` names them."""
    if one.near is None:
        return f"{one.gpu}: all of {one.kind}, since those near are not known: {one.unknown}"
    nics = f"{one.kind}:{','.join(one.near.devices)}" if one.near.devices else one.kind
    return f"{one.gpu}: {nics} ({one.near.why})"


def finding_lines(found: Iterable[Finding]) -> Iterator[str]:
    """Each finding: fact, cost, advice."""
    for number, finding in enumerate(found, 1):
        yield f"{number}. {finding.code}: {finding.device}"
        yield f"   fact    {finding.fact}"
        yield f"   cost    {cost_text(finding)}"
        yield f"   advice  {finding.advice}"
        yield f"   assumes {finding.assumes.replace(',', ', ')}"


def cost_text(finding: Finding) -> str:
    """The cost and its source."""
    cost = finding.cost
    said = [f"about {cost.percent:.1f} %"] if cost.percent is not None else []
    if cost.gbs_now is not None and cost.gbs_could is not None:
        said.append(f"{cost.gbs_now:.1f} instead of {cost.gbs_could:.1f} GB/s")
    said += ["transfers fail or take another path"] * cost.fails
    return f"{', '.join(said) or 'not known'} ({cost.source})"


def unread_lines(unread: Iterable[Missing]) -> Iterator[str]:
    """Every fact that was not read."""
    for missing in unread:
        yield f"not read: {missing.path}: {missing.reason}"


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Findings gone and new, paths that differ, predictions."""
    for finding in comparison.gone:
        yield f"gone: {finding.code}: {finding.device}"
    for finding in comparison.new:
        yield f"new:  {finding.code}: {finding.device}: {finding.fact}"
    for change in comparison.changes:
        before, after = (
            "none" if gbs is None else f"{gbs:.1f} GB/s" for gbs in (change.before, change.after)
        )
        yield f"path: {change.path}: {before} -> {after}"
    if comparison.predictions:
        yield "predicted change of tokens a second, such hosts with one GPU each (rough: trust the sign):"
        for row in comparison.predictions:
            yield f"  TP={row.tp} PP={row.pp} {row.model:<14} {row.percent:+6.1f} %"
    if not (comparison.gone or comparison.new or comparison.changes):
        yield "nothing has changed"
