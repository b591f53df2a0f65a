"""Counters of kvik's engines, which answer on this node without a port."""

from __future__ import annotations

from kvik.roles.processes import descendants
from kvik.stat import engines
from kvik_lab.observe.prometheus import parse
from kvik_lab.records import Counters


def engine_counters(pid: int) -> Counters:
    """What the engines of a process and of all below it count, added up; empty where it has none.

    They are seen in this network namespace only. An engine that does not answer is left out: a gate that
    needs it says so.
    """
    family = descendants(pid)
    found: Counters = {}
    for name in engines.names():
        try:
            about, text = engines.snapshot(name)
        except engines.StatError:
            continue
        if about.pid in family:
            for key, value in parse(text, f"engine {name}").items():
                found[key] = found.get(key, 0.0) + value
    return found
