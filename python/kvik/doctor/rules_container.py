"""Rules about what confines the process: too little time of processors, too little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvik.doctor.model import Cost, Finding, Limits, Machine, NetDevice, Nic, processors

TCP_CPU_S = 0.46
"""CPU seconds a GiB of one side over `tcp`."""
NIC_CPU_S = 0.02
"""The same over NICs, in extents of 16 KiB: 9.4 s a million requests, of 512 KiB each."""
_TCP = "bench/results/2026-11-20-loopback-2-cores.json: tcp, 2,000 pages of 16 KiB a read"
_NICS = "bench/README.md, Threads of NICs: requests in extents of 16 KiB"
_LEAST = 1.0  # Below one, heartbeats come late (`docs/deploy.md`).
STORE, PROCESS, ENGINE = 1 << 30, 100 << 20, 256 << 20
"""Bytes of a store's blocks by default, of its process, and of an engine (`memory_cap`)."""


def container_findings(machine: Machine) -> Iterator[Finding]:
    """All of this module."""
    every = set().union(*(node.processors for node in machine.nodes))
    yield from _cpu(machine.limits, every, _rate(machine.nics, machine.nets))
    yield from _memory(machine.limits)


def _cpu(limits: Limits, every: set[int], rate: tuple[float, float, str]) -> Iterator[Finding]:
    allowed = len(processors(limits.cpus_allowed)) if limits.cpus_allowed else len(every)
    confined: list[tuple[float, str]] = []
    if limits.cpu_quota is not None:
        confined.append((limits.cpu_quota, "its control groups give it"))
    if allowed < len(every):
        confined.append((float(allowed), f"of {len(every)} processors it may use"))
    if not confined:
        return
    have, by = min(confined)
    gbs, cost, source = rate
    need = gbs * 1e9 / 2**30 * cost
    why = f"needs {need:.1f} at {gbs:.1f} GB/s, the rate of its ports"
    source = f"{cost:g} CPU s a GiB: {source}"
    if need < _LEAST:
        need, why, source = _LEAST, "needs one, however little it moves", "docs/deploy.md: late heartbeats"
    if have < need:
        yield Finding(
            "cpu-quota-low", "this process", f"{by} {have:g}, and kvik alone {why}",
            Cost((1 - have / need) * 100, source),
            "Take the CPU limit away, and ask for as many processors as the engine uses: one that is "
            "throttled answers heartbeats late, and its peers take it for dead.",
            "kv",
        )  # fmt: skip


def _rate(nics: Iterable[Nic], nets: Iterable[NetDevice]) -> tuple[float, float, str]:
    """GB/s of the ports that kvik would use, and what each GiB costs: NICs where there are some."""
    gbs = sum(nic.rate_gbits for nic in nics if nic.address and nic.node) / 8
    if gbs:
        return gbs, NIC_CPU_S, _NICS
    return max((net.speed_mbits or 0 for net in nets), default=0) / 8000, TCP_CPU_S, _TCP


def _memory(limits: Limits) -> Iterator[Finding]:
    limit = limits.memory_limit
    need = STORE + PROCESS + ENGINE
    if limit is not None and limit < need:
        yield Finding(
            "memory-limit-low", "this process",
            f"its control groups let it have {limit >> 20} MiB; a store as it is by default takes up to "
            f"{need >> 20} MiB, and an engine its KV and {(PROCESS + ENGINE) >> 20} MiB",
            Cost(None, "docs/deploy.md, sizes: the kernel ends a process that exceeds its limit", fails=True),
            "Raise the memory limit above the KV or the store's `memory` and what is beside it.",
            "kv,load",
        )  # fmt: skip
