"""Simulated transfers whose truth is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvik_lab.physics.data import Samples

Floats = npt.NDArray[np.float64]
FULL = os.environ.get("KVIK_TEST_LAB_FULL") == "1"


@dataclass(frozen=True)
class Transport:
    """True mean seconds by bytes, and noise: relative, absolute (seconds), and relative by server start."""

    truth: Callable[[Floats], Floats]
    relative: float = 0.0
    absolute: float = 0.0
    start: float = 0.0

    def measure(
        self, rng: np.random.Generator, sizes: Floats, repeats: int, starts: int = 1, name: str = "link"
    ) -> Samples:
        """Every start measures every size, `repeats` times; starts are recorded where there are several."""
        at = np.tile(np.repeat(sizes, repeats), starts)
        which = np.repeat(np.arange(starts), sizes.size * repeats)
        level = 1 + self.start * rng.standard_normal(starts)
        mean = self.truth(at)
        spread = np.hypot(self.relative * mean, self.absolute)
        seconds = mean * level[which] + spread * rng.standard_normal(at.size)
        return Samples(name, "bytes", at, seconds, start=which.astype(str) if starts > 1 else None)


def line(startup: float, rate: float) -> Callable[[Floats], Floats]:
    """startup + bytes / rate."""
    return lambda size: np.asarray(startup + size / rate)
