"""Counters of kvik's engines, which answer on this node without a port."""

from __future__ import annotations

from pathlib import Path

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


def descendants(pid: int) -> set[int]:
    """A process, and all that it and those below it have started and not left to others."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may have anything in it; the parent is the second field behind it.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, rest = set[int](), [pid]
    while rest:
        one = rest.pop()
        if one not in found:
            found.add(one)
            rest += children.get(one, ())
    return found
