"""Models of the time of a transfer. Every parameter is a time or a time a unit, and not negative.

B: bytes, n: blocks, c: transfers at a time. Inverse rates (`seconds_per_byte`) are fitted, because the time
is linear in them and "no limit seen" is then the number 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats, Samples, Summary


@dataclass(frozen=True)
class Inputs:
    """What times are predicted from; one entry each. Absent columns are one block, one transfer at a time."""

    size: Floats
    blocks: Floats
    concurrency: Floats


@dataclass(frozen=True)
class Model:
    """A model: its parameters' names with units, and the seconds that it predicts.

    needs: what must vary in the data, or it is no different from a simpler one. formula, source: for people.
    """

    name: str
    parameters: tuple[str, ...]
    predict: Callable[[Floats, Inputs], Floats]
    needs: tuple[str, ...]
    formula: str
    source: str


def _hockney(p: Floats, x: Inputs) -> Floats:
    return np.asarray(p[0] + p[1] * x.size)


def _linear(p: Floats, x: Inputs) -> Floats:
    return np.asarray(p[0] + p[1] * x.blocks)


def _batched(p: Floats, x: Inputs) -> Floats:
    return np.asarray(p[0] + np.maximum(x.blocks * p[1], x.size * p[2]))


def _op_rate(p: Floats, x: Inputs) -> Floats:
    return np.asarray(np.maximum(x.blocks * p[0], x.size * p[1]))


def _shared(p: Floats, x: Inputs) -> Floats:
    return np.asarray(p[0] + p[1] * x.size * (1 + p[2] * (x.concurrency - 1)))


def batched_queue(depth: float) -> Model:
    """The batched model with a penalty for each block beyond a queue of `depth` entries."""
    if not depth >= 1:
        raise LabError(f"a queue depth is a number from 1, not {depth!r}")

    def predict(p: Floats, x: Inputs) -> Floats:
        return np.asarray(_batched(p, x) + np.maximum(0, x.blocks - depth) * p[3])

    return Model(
        "batched-queue",
        ("startup_seconds", "seconds_per_block", "seconds_per_byte", "penalty_seconds_per_block"),
        predict,
        ("blocks",),
        f"t = a + max(n * c, B * g) + max(0, n - {depth:g}) * d",
        "the batched model, and a penalty for what does not fit the send queue",
    )


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            Model(
                "hockney",
                ("startup_seconds", "seconds_per_byte"),
                _hockney,
                (),
                "t = a + B * g",
                "Hockney, Parallel Computing 20:389, 1994",
            ),
            Model(
                "linear",
                ("startup_seconds", "seconds_per_block"),
                _linear,
                ("blocks",),
                "t = a + n * s",
                "a fixed time and one a unit (blocks, or tokens)",
            ),
            Model(
                "batched",
                ("startup_seconds", "seconds_per_block", "seconds_per_byte"),
                _batched,
                ("block_size",),
                "t = a + max(n * c, B * g)",
                "a startup, and the roofline of Williams et al., CACM 52:65, 2009",
            ),
            Model(
                "op-rate",
                ("seconds_per_block", "seconds_per_byte"),
                _op_rate,
                ("block_size",),
                "rate = min(R * block size, BW)",
                "the roofline of Williams et al., CACM 52:65, 2009, of operations and bytes",
            ),
            Model(
                "shared",
                ("startup_seconds", "seconds_per_byte", "contention"),
                _shared,
                ("concurrency",),
                "t = a + B * g * (1 + y * (c - 1))",
                "Hockney with a rate that transfers at a time share",
            ),
        )
    }
)


def inputs(data: Samples | Summary) -> Inputs:
    """The columns that models read."""
    ones = np.ones_like(data.size)
    if isinstance(data, Summary):
        return Inputs(data.size, ones, ones)
    blocks = data.size if data.unit == "tokens" and data.blocks is None else data.blocks
    return Inputs(
        data.size,
        ones if blocks is None else blocks,
        ones if data.concurrency is None else data.concurrency,
    )


def applicable(data: Samples | Summary, queue: float | None = None) -> tuple[Model, ...]:
    """The models that the data can tell from a simpler one: their columns are there, and vary."""
    if data.unit == "tokens":
        return (MODELS["linear"],)
    have = inputs(data)
    with_blocks = isinstance(data, Samples) and data.blocks is not None
    varies = {
        "blocks": with_blocks and np.unique(have.blocks).size > 1,
        "block_size": with_blocks and np.unique(have.size / have.blocks).size > 1,
        "concurrency": np.unique(have.concurrency).size > 1,
    }
    found = [model for model in MODELS.values() if all(varies[key] for key in model.needs)]
    if queue is not None and varies["blocks"]:
        found.append(batched_queue(queue))
    return tuple(found)
