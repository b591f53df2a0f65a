"""Which NICs a rank's engine opens, where its option `nics` does not name them, and where its threads run.

`verbs`, `efa` and `libfabric:PROVIDER` may have a word in the place of devices: `near`, or `all`. Without one
they mean `near` where the KV lies on a GPU, and `all` where it lies in the host's memory, which has no place
that other ranks could know of. What is near is looked up in the machine (`kvik.doctor`), by each rank alone.
What cannot be looked up makes it `all`, and is said.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # A fifth of what a rank imports, and seldom asked.
    from kvik.doctor import Machine
    from kvik.doctor.near import Near

NEAR, ALL = "near", "all"
_MOST_CPUS = 1024  # as many as the engine's own sets of them have


@dataclass(frozen=True)
class Spot:
    """Where a rank is. gpu: the PCI address of the GPU that its KV lies on; empty where the driver does not
    tell, None where the KV lies in the host's memory. number, ranks: which of the server's ranks on this host
    it is, and of how many."""

    gpu: str | None = None
    number: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Choice:
    """What a rank's engine is told. `nics`: as `kvik.Engine` takes it. `cpus`: for its threads; None leaves
    them to the kernel. `why`: the reason in words, empty where somebody has named the devices or there are
    none. `unknown`: what could not be looked up; then all NICs are taken."""

    nics: str | None = None
    cpus: tuple[int, ...] | None = None
    why: str = ""
    unknown: str = ""

    def options(self) -> dict[str, Any]:
        """Arguments of `kvik.Engine`."""
        told = {"nics": self.nics, "cpus": self.cpus}
        return {name: value for name, value in told.items() if value is not None}

    def __str__(self) -> str:
        why = self.why or (f"all: {self.unknown}" if self.unknown else "")
        return (self.nics or "none") + (f" ({why})" if why else "")


def look() -> Machine:
    """This machine."""
    from kvik.doctor import examine, live

    return examine(live(cables=False))


def choose(
    text: str | None, spot: Spot, placed: bool = False, machine: Callable[[], Machine] | None = None
) -> Choice:
    """What the rank at `spot` makes of its option `nics`. `placed`: options say where its threads run.
    `machine`, by default `look`, is called only where it matters."""
    prefix, provider, devices = _split(text)
    if text is None or devices not in (None, NEAR, ALL):
        return Choice(text)
    if devices == ALL:
        return Choice(prefix, why="all")
    if devices is None and spot.gpu is None:
        return Choice(prefix, why="all: the KV lies in host memory")
    return _found(prefix, provider, devices, spot, placed, machine or look)


def _found(
    prefix: str, provider: str, devices: str | None, spot: Spot, placed: bool, machine: Callable[[], Machine]
) -> Choice:
    """What is near `spot` in the machine, of the NICs of `provider`."""
    from kvik.doctor.near import EFA, VERBS, NearUnknownError

    kind = {"efa": EFA, "verbs": VERBS}.get(provider)
    if kind is None:
        what = f"{prefix} has no devices that /sys/class/infiniband knows"
        return Choice(prefix, why=f"all: {what}") if devices is None else Choice(prefix, unknown=what)
    try:
        here = machine()
        near = _near(spot, kind, here)
    except NearUnknownError as error:
        return Choice(prefix, unknown=str(error))
    cpus, why = (None, "") if placed else _threads(near, here)
    nics = f"{prefix}:{','.join(near.devices)}" if near.devices else prefix
    return Choice(nics, cpus, near.why + why)


def _split(text: str | None) -> tuple[str, str, str | None]:
    """Of `libfabric:efa:near` what is before the devices, the provider (or the kind), and the devices."""
    kind, _, rest = (text or "").partition(":")
    if kind != "libfabric":
        return kind, kind, rest or None
    provider, _, rest = rest.partition(":")
    return f"{kind}:{provider}", provider.partition(";")[0], rest or None


def _near(spot: Spot, kind: str, machine: Machine) -> Near:
    from kvik.doctor.near import NearNics, NearUnknownError

    if spot.gpu == "":
        raise NearUnknownError("the driver does not say which GPU the KV lies on")
    nics = NearNics(machine, kind)
    return nics.of_rank(spot.number, spot.ranks) if spot.gpu is None else nics.of_gpu(spot.gpu)


def _threads(near: Near, machine: Machine) -> tuple[tuple[int, ...] | None, str]:
    """The processors of the NICs' node that this process may use, and what is said of them."""
    if near.node is None:
        return None, ""
    node = next((node for node in machine.nodes if node.number == near.node), None)
    found = tuple(sorted(node.processors & _allowed())) if node is not None else ()
    if not found:
        return None, f"; threads not on their NUMA node {near.node}, whose processors are not this process's"
    return found, f"; threads on their NUMA node {near.node}"


def _allowed() -> set[int]:
    """The processors that the cpuset of this process allows. What the calling thread was pinned to says
    nothing about kvik's threads, so another one asks for all, and sees what it gets."""
    found: set[int] = set()

    def ask() -> None:
        with contextlib.suppress(OSError):  # Then it sees what it had.
            os.sched_setaffinity(0, range(_MOST_CPUS))
        found.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=ask, name="kvik-cpus")
    thread.start()
    thread.join()
    return found
