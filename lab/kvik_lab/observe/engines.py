"""Counters of kvik's engines, which answer on this node without a port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from kvik.roles.processes import descendants
from kvik.stat import engines
from kvik_lab.observe.prometheus import parse
from kvik_lab.records import Counters


def engines_of(pid: int) -> dict[str, Counters]:
    """What each engine of a process and of all below it counts, by its id.

    They are seen in this network namespace only. An engine that does not answer is left out: a gate that
    needs it says so.
    """
    family = descendants(pid)
    found: dict[str, Counters] = {}
    for name in engines.names():
        with contextlib.suppress(engines.StatError):
            about, text = engines.snapshot(name)
            if about.pid in family:
                found[about.engine] = parse(text, f"engine {name}")
    return found


def engine_counters(pid: int) -> Counters:
    """What they count together; empty where there is none."""
    return added(engines_of(pid).values())


def added(counters: Iterable[Counters]) -> Counters:
    """The sums of series that are in several."""
    found: Counters = {}
    for one in counters:
        for key, value in one.items():
            found[key] = found.get(key, 0.0) + value
    return found
