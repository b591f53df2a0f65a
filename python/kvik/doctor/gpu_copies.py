"""What kvik copies between the host and a GPU, each way: alone, and while a NIC moves pages of the host.

    python -m kvik.doctor.gpu_copies 0000:1a:00.0 [NICS]

`kvik doctor --measure` runs it in a process of its own, since who has used CUDA keeps it. An engine reads its
own ticket, so the way is kvik's: a stream of its own and page-locked buffers. The NIC (`NICS`, as the option
`nics` names it) moves pages from one engine to another one of this process, over its own port and back.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import kvik
from kvik._native import gpu_address
from kvik.errors import KvikError

PAGES, PAGE = 64, 1 << 20
_ROUNDS, _LEAST_S = 7, 0.4
"""Of one way, at least: long enough that many transfers of a NIC begin and end meanwhile."""
_BUSY_PAGES, _OPEN = 8, 2
_FIRST_S = 20.0  # until the NIC has moved its first pages, or one at all beside a way
_DEADLINE_S = 30.0
_CUDA_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CannotMeasureError(Exception):
    """There is nothing to measure; the text says why."""


@dataclass(frozen=True)
class Copied:
    """A rate in GB/s, or why there is none."""

    what: str
    gbs: float | None
    note: str


class _Cuda:
    """The driver, as a program of CUDA's uses it; kvik takes the copy that a process has."""

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CannotMeasureError(f"libcuda.so.1 cannot be loaded: {error}") from error
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = self._driver[name](*arguments)
        if code == _CUDA_MEMORY:
            raise CannotMeasureError(f"the GPU has no {PAGES * PAGE >> 20} MiB that are free ({name})")
        if code:
            raise CannotMeasureError(f"{name} of the driver returned {code}")

    def allocate(self, address: str) -> int:
        """Memory on the GPU at this PCI address. It stays for as long as this process."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        for number in range(count.value):
            context, at, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
            self.call("cuDeviceGet", ctypes.byref(device), number)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.call("cuCtxSetCurrent", context)
            self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(PAGES * PAGE))
            if gpu_address(at.value) == address:
                return at.value
            self.call("cuMemFree_v2", at)
        raise CannotMeasureError(
            f"none of the {count.value} GPUs that CUDA shows to this process is {address}"
        )


def copies(address: str, nics: str | None) -> Iterator[Copied]:
    """Both ways, alone; then both ways while `nics` are busy, where there are some."""
    with kvik.Engine() as engine, ExitStack() as stack:
        layout = kvik.Layout(PAGES, PAGE)
        gpu = engine.register((_Cuda().allocate(address), layout.nbytes))
        regions = engine.allocate(layout.nbytes), gpu, engine.allocate(layout.nbytes)
        given, there, back = (region.pages(layout, range(PAGES)) for region in regions)
        ways = {f"kvik, host to GPU {address}": (given, there), f"kvik, GPU {address} to host": (there, back)}
        for what, (source, target) in ways.items():
            yield _way(engine, what, source, target)
        if nics is None:
            return
        try:
            busy = stack.enter_context(_busy(nics))
            for what, (source, target) in ways.items():
                yield _way(engine, what, source, target, busy, nics)
        except (KvikError, CannotMeasureError) as error:
            yield Copied(f"kvik, host and GPU {address} while {nics} is busy", None, str(error))


def _way(
    engine: kvik.Engine, what: str, source: kvik.PageSet, target: kvik.PageSet,
    busy: Callable[[], int] = int, nics: str | None = None,
) -> Copied:  # fmt: skip
    seconds: list[float] = []
    moved, begun = busy(), time.perf_counter()

    def enough() -> bool:
        took = time.perf_counter() - begun
        # A NIC whose threads get no processor is late, and does move something.
        late = nics is not None and busy() == moved and took < _FIRST_S
        return len(seconds) >= _ROUNDS and took >= _LEAST_S and not late

    while not enough():
        ticket = engine.grant(source).ticket
        begin = time.perf_counter()
        engine.read(target, ticket, verify="off", deadline=_DEADLINE_S).wait()
        seconds.append(time.perf_counter() - begin)
    new, took = busy() - moved, time.perf_counter() - begun
    note = f"{PAGES} pages of 1 MiB, median of {len(seconds)}, no checks"
    if nics is not None:
        what = f"{what} while {nics} is busy"
        if not new:
            return Copied(what, None, f"{nics} moved nothing meanwhile")
        note = f"{note}; {nics} moved {new / took / 1e9:.3g} GB/s meanwhile, to itself"
    return Copied(what, PAGES * PAGE / statistics.median(seconds) / 1e9, note)


@contextmanager
def _busy(nics: str) -> Iterator[Callable[[], int]]:
    """NICs that move pages of the host until the end. What is given tells how many bytes they have moved."""
    layout = kvik.Layout(_BUSY_PAGES, PAGE)
    first, stop, moved, failed = threading.Event(), threading.Event(), [0], []

    def move(owner: kvik.Engine, mover: kvik.Engine) -> None:
        running: deque[tuple[kvik.Transfer, list[kvik.PageSet]]] = deque()
        try:
            free = [
                [
                    engine.allocate(layout.nbytes).pages(layout, range(_BUSY_PAGES))
                    for engine in (owner, mover)
                ]
                for _ in range(_OPEN)
            ]
            while not stop.is_set():
                while free:
                    there, here = pair = free.pop()
                    ticket = owner.grant(there).ticket
                    transfer = mover.read(here, ticket, verify="off", deadline=_DEADLINE_S)
                    running.append((transfer, pair))
                transfer, pair = running.popleft()
                moved[0] += transfer.wait().bytes
                free.append(pair)
                first.set()
        except KvikError as error:
            failed.append(error)
            first.set()

    def so_far() -> int:
        if failed:
            raise CannotMeasureError(f"{nics} cannot be kept busy: {failed[0]}")
        return moved[0]

    with (
        kvik.Engine(nics=nics, transport="nics") as owner,
        kvik.Engine(nics=nics, transport="nics") as mover,
    ):
        thread = threading.Thread(target=move, args=(owner, mover), name="kvik-doctor")
        thread.start()
        try:
            if not first.wait(_FIRST_S):
                raise CannotMeasureError(f"{nics} moved nothing in {_FIRST_S:g} s")
            so_far()
            yield so_far
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    try:
        print(json.dumps([asdict(one) for one in copies(sys.argv[1], sys.argv[2] if sys.argv[2:] else None)]))
    except (KvikError, CannotMeasureError) as error:
        sys.exit(str(error))
