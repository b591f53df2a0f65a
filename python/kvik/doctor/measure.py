"""What `--measure` adds: memory bandwidth of each NUMA node, what kvik moves on this host, and to its GPUs.

Memory: one thread a processor of the node copies between two buffers that it touched first, so the pages are
on its node; a copy of n bytes counts as n, although the memory reads n and writes n. Loopback: `kvik bench
transfer`, in a process of its own. Host and GPU: `gpu_copies`, in a process for each GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvik.doctor.model import Machine, NumaNode
from kvik.doctor.near import OfGpu, near_gpus
from kvik.doctor.pci import NVIDIA

_BUFFER = 64 << 20  # a thread and side: above the caches that a thread shares
_ROUNDS = 5
_THREADS = 16  # enough for any node's memory
_BENCH_S = 120.0
_GPU_S = 120.0


@dataclass(frozen=True)
class Measured:
    """A rate in GB/s, or why there is none."""

    what: str
    gbs: float | None
    note: str


def measure(machine: Machine) -> list[Measured]:
    """All of it: about twenty seconds, and some more for each GPU."""
    gpus = [gpu.address for gpu in machine.gpus if machine.devices[gpu.address].vendor == NVIDIA]
    memory = (_memory(node) for node in machine.nodes)
    return [*memory, *_loopback(), *_gpus(gpus, near_gpus(machine))]


def _memory(node: NumaNode) -> Measured:
    what = f"memory of node {node.number}"
    usable = sorted(node.processors & os.sched_getaffinity(0))[:_THREADS]
    if not usable:
        return Measured(what, None, "this process may run on none of its processors")
    ready = threading.Barrier(len(usable))
    spans: list[list[tuple[float, float]]] = [[] for _ in usable]
    failed: list[Exception] = []

    def copy(index: int, cpu: int) -> None:
        try:
            os.sched_setaffinity(threading.get_native_id(), {cpu})
            source, target = (np.full(_BUFFER, value, dtype=np.uint8) for value in (1, 2))
            for _ in range(_ROUNDS):
                ready.wait()
                begin = time.perf_counter()
                np.copyto(target, source)  # Without the GIL.
                spans[index].append((begin, time.perf_counter()))
        except (OSError, MemoryError, threading.BrokenBarrierError) as error:
            failed.append(error)
            ready.abort()  # The others would wait for this one for ever.

    threads = [threading.Thread(target=copy, args=item, name="kvik-doctor") for item in enumerate(usable)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:  # The system has no more threads for this process.
        failed.append(error)
        ready.abort()
    for thread in started:
        thread.join()
    if failed:
        return Measured(what, None, f"a thread could not copy: {failed[0]}")
    rates = [
        len(usable) * _BUFFER / (max(end for _, end in spans_of) - min(begin for begin, _ in spans_of)) / 1e9
        for spans_of in zip(*spans, strict=True)
    ]
    return Measured(what, float(np.median(rates)), f"copies by {len(usable)} threads, median of {_ROUNDS}")


def _loopback() -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "kvik.cli", "bench", "transfer", "--page", "1MiB", "--pages", "16",
                   "--inflight", "1", "--op", "write", "--duration", "1", "--json", str(report)]  # fmt: skip
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_BENCH_S, check=False)
            if ended.returncode:
                said = " ".join((ended.stderr or ended.stdout).split())[-200:]
                why = f"kvik bench transfer ended with status {ended.returncode}: {said}"
                yield Measured("loopback", None, why)
                return
            document = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            yield Measured("loopback", None, f"kvik bench transfer gave no report: {error}")
            return
    yield from _of_report(document)


def _of_report(document: dict[str, Any]) -> Iterator[Measured]:
    """kvik over each transport, and the plain TCP stream beside it."""
    for cell in document.get("cells", []):
        for one in cell["kvik"]:
            yield Measured(
                f"loopback by kvik, {one['transport']}", one["bytes_per_s"] / 1e9, "16 pages of 1 MiB a write"
            )
        stream = cell.get("tcp_stream", {}).get("bytes_per_s")
        if stream:
            yield Measured("loopback, a TCP stream", stream / 1e9, "as kvik bench has it beside kvik")


def _gpus(gpus: Sequence[str], near: Sequence[OfGpu]) -> Iterator[Measured]:
    """Copies between the host and each GPU, each way; `near` has the NICs of each, kind by kind."""
    if not gpus:
        yield Measured("copies between host and GPU", None, "this machine has no NVIDIA GPU")
    for gpu in gpus:
        kinds = [one for one in near if one.gpu == gpu]
        found = next(((one.kind, one.near) for one in kinds if one.near is not None), None)
        if found is not None:
            kind, nics = found
            yield from gpu_copies(gpu, f"{kind}:{','.join(nics.devices)}" if nics.devices else kind)
            continue
        yield from gpu_copies(gpu, None)
        why = "; ".join(dict.fromkeys(one.unknown for one in kinds)) or "no RDMA NIC and no EFA is seen"
        yield Measured(f"kvik, host and GPU {gpu} while a NIC is busy", None, why)


def gpu_copies(gpu: str, nics: str | None) -> Iterator[Measured]:
    """What `kvik.doctor.gpu_copies` says of a GPU, or why it says nothing."""
    what = f"kvik, host and GPU {gpu}"
    command = [sys.executable, "-m", "kvik.doctor.gpu_copies", gpu, *([nics] if nics else [])]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Measured(what, None, f"nothing was copied: {error}")
        return
    if ended.returncode:
        said = " ".join(ended.stderr.split())[-300:]
        yield Measured(what, None, said or f"nothing was copied: status {ended.returncode}")
        return
    yield from (Measured(**one) for one in json.loads(ended.stdout))
