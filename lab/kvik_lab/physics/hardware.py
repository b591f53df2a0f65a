"""What accelerators can do at most, by their makers' data sheets.

Dense figures: a data sheet that prints the rate with 2:4 sparsity prints twice the dense one. Floors are made
from these; a figure measured on the machine at hand is better, and every function takes one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvik_lab.errors import LabError
from kvik_lab.physics.units import Rate


@dataclass(frozen=True)
class Accelerator:
    """One accelerator.

    dense_flops: 16-bit tensor operations a second, dense. memory: rate of its own memory. memory_bytes: how
    much of it. source: where the figures are printed.
    """

    name: str
    dense_flops: float
    memory: Rate
    memory_bytes: float
    source: str


def _sheet(name: str, tflops: float, gb_per_second: float, gb: float, source: str) -> Accelerator:
    return Accelerator(name, tflops * 1e12, Rate(gb_per_second * 1e9), gb * 1e9, source)


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        item.name: item
        for item in (
            _sheet("a10g", 70.0, 600, 24, "NVIDIA A10G data sheet (BF16 tensor core, dense)"),
            _sheet("a100-80gb", 312.0, 2039, 80, "NVIDIA A100 80GB SXM data sheet (BF16, dense)"),
            _sheet("l40s", 362.05, 864, 48, "NVIDIA L40S data sheet (BF16, dense)"),
            _sheet("h100", 989.5, 3350, 80, "NVIDIA H100 SXM data sheet (BF16: 1,979 with sparsity)"),
            _sheet("h200", 989.5, 4800, 141, "NVIDIA H200 SXM data sheet (BF16: 1,979 with sparsity)"),
        )
    }
)


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name. `LabError` for one that is not in the table."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), ACCELERATORS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise LabError(
            f"no figures for accelerator {name!r}{hint}. There are: {', '.join(ACCELERATORS)}. Else give "
            "your own (operations and bytes a second)"
        )
    return found
