"""What a deployment is asked: lengths of prompts with their shares, output tokens, requests a second."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LARGEST_TRACE = 1 << 30


@dataclass(frozen=True)
class Workload:
    """lengths: prompts' tokens, ascending; shares: of the requests, summing to 1. shown: lengths that stand
    for the distribution in a table. output_tokens: mean of a request. per_second: requests, None unknown.
    """

    lengths: Floats
    shares: Floats
    shown: tuple[int, ...]
    output_tokens: float
    per_second: float | None


def parse_prompts(text: str, output_tokens: float, per_second: float | None) -> Workload:
    """Read `1000,4000:0.3,16000`: lengths; those without a share divide what is left evenly."""
    given: dict[int, float | None] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        length_text, _, share_text = part.partition(":")
        try:
            length, share = int(length_text), float(share_text) if share_text else None
        except ValueError as error:
            raise LabError(
                f"{part!r} is no prompt length; write TOKENS or TOKENS:SHARE, as 4000:0.3"
            ) from error
        if length < 1 or length in given or (share is not None and not 0 < share <= 1):
            raise LabError(f"{part!r}: a length is from 1 and given once, its share above 0 and up to 1")
        given[length] = share
    if not given:
        raise LabError("no prompt lengths; write for example 1000,4000:0.3,16000")
    taken = sum(share for share in given.values() if share is not None)
    open_ones = sum(share is None for share in given.values())
    if taken > 1 + 1e-9 or (open_ones and taken >= 1) or (not open_ones and abs(taken - 1) > 1e-6):
        raise LabError(f"the shares in {text!r} come to {taken:g}; all together they are 1")
    rest = (1 - taken) / open_ones if open_ones else 0.0
    ordered = sorted(given)
    shares = np.array(
        [rest if given[length] is None else given[length] for length in ordered], dtype=np.float64
    )
    return Workload(
        np.array(ordered, dtype=np.float64), shares, tuple(ordered), output_tokens, _checked(per_second)
    )


def read_trace(path: str | Path, per_second: float | None) -> Workload:
    """Read requests as JSON lines with `input_length`, `output_length` and `timestamp` in milliseconds.

    This is the format of Mooncake's published traces. per_second: instead of the trace's own rate.
    """
    file = Path(path)
    prompts, outputs, stamps = [], [], []
    try:
        if file.stat().st_size > LARGEST_TRACE:
            raise LabError(f"{file}: larger than {LARGEST_TRACE} bytes; cut the trace")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{file}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(int(row["input_length"]))
            outputs.append(float(row["output_length"]))
            stamps.append(float(row.get("timestamp", 0)))
        except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LabError(
                f"{file}, line {number}: not a request with input_length and output_length ({error})"
            ) from error
    if not prompts or min(prompts) < 1 or not all(0 <= tokens < math.inf for tokens in outputs):
        raise LabError(
            f"{file}: a trace has requests, each with a prompt of at least one token and an output from 0"
        )
    lengths, count = np.unique(np.array(prompts, dtype=np.float64), return_counts=True)
    shown = np.unique(np.quantile(prompts, QUANTILES, method="nearest").astype(int))
    span = (max(stamps) - min(stamps)) / 1000
    rate = len(prompts) / span if per_second is None and span > 0 else per_second
    return Workload(
        lengths, count / len(prompts), tuple(int(v) for v in shown), float(np.mean(outputs)), _checked(rate)
    )


def _checked(per_second: float | None) -> float | None:
    if per_second is not None and not (math.isfinite(per_second) and per_second > 0):
        raise LabError(f"requests a second are a number above 0, not {per_second!r}")
    return per_second
