"""Findings about a store, and how numbers are said in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvik.store.show import printable, size

__all__ = ["Finding", "joined", "percent", "printable", "share", "size"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``code`` is stable, for scripts."""

    code: str
    server: str
    """Its name, or "all servers"."""
    fact: str
    cost: str
    advice: str
    share: float
    """Of the store's blocks, or of the server's work, that is concerned; findings are in its order."""
    fails: bool
    """Whether something does not work at all."""


def share(part: float, whole: float) -> float:
    """Of 1; 0 of nothing."""
    return part / whole if whole else 0.0


def percent(of_one: float) -> str:
    """A share for people."""
    return f"{100 * of_one:.2g} %" if 0 < of_one < 0.1 else f"{100 * of_one:.1f} %"


def joined(words: Iterable[str]) -> str:
    """Words behind one another."""
    return ", ".join(words)
