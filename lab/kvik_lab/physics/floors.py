"""Times that no implementation goes below: a time under one of these means that the work was not done."""

from __future__ import annotations

from dataclasses import dataclass

from kvik_lab.errors import LabError
from kvik_lab.physics.kv import ModelKv, kv_size
from kvik_lab.physics.units import Rate


@dataclass(frozen=True)
class Floor:
    """A least time in seconds, and the arithmetic that it is."""

    seconds: float
    because: str


def transfer_floor(size: float, line: Rate) -> Floor:
    """The time that `size` bytes need at a link's line rate."""
    if size < 0:
        raise LabError(f"bytes are a number from 0, not {size!r}")
    return Floor(
        size / line.bytes_per_second, f"{size:,.0f} bytes / {line.bytes_per_second:,.0f} bytes a second"
    )


def prefill_flops(model: ModelKv, tokens: int) -> float:
    """Floating-point operations of the prefill of `tokens` tokens that nothing is cached of.

    2 * active parameters * tokens (Kaplan et al., arXiv 2001.08361, section 2.1), of which the output matrix
    is needed for the last token only; and in each layer the products of attention, Q with K and the weights
    with V: 2 operations for each element of a head's query and value, over every pair of a token and one that
    it sees (Dao et al., arXiv 2205.14135, counts 4 * n^2 * d without a causal mask; with one it is half of
    that). A latent's attention is left out, because its heads' sizes are not known here: a floor stays one.
    """
    if tokens < 1:
        raise LabError(f"tokens are a number from 1, not {tokens!r}")
    shape = model.shape
    if shape.flops_per_token is None:
        raise LabError(
            f"{shape.name}: how many parameters it has is not known, so its operations are not either; give "
            "parameters (layers=...,parameters=...) or a time that was measured"
        )
    pairs = sum(_pairs(tokens, window) for window in model.windows)
    attention = 0.0
    if shape.attention == "gqa" and shape.query_heads is not None:
        attention = 2.0 * shape.query_heads * shape.content * pairs
    output = 2.0 * shape.output_parameters
    return (shape.flops_per_token - output) * tokens + output + attention


def _pairs(tokens: int, window: int | None) -> float:
    """Pairs of a token and one that it sees, itself included."""
    seen = tokens if window is None else min(window, tokens)
    return seen * (seen + 1) / 2 + (tokens - seen) * seen


def prefill_floor(model: ModelKv, tokens: int, flops_per_second: float, accelerators: int = 1) -> Floor:
    """The time of an uncached prefill with every accelerator at its highest rate."""
    if not flops_per_second > 0 or accelerators < 1:
        raise LabError("operations a second are a number above 0, accelerators a number from 1")
    work = prefill_flops(model, tokens)
    return Floor(
        work / (flops_per_second * accelerators),
        f"{work:.4g} operations / ({accelerators} * {flops_per_second:.4g} a second)",
    )


def decode_floor(
    model: ModelKv,
    context_tokens: int,
    memory: Rate,
    *,
    batch: int = 1,
    weight_bytes: float | None = None,
    accelerators: int = 1,
) -> Floor:
    """The time of one decode step: the active weights once, and the KV of each request once, from memory.

    weight_bytes: what the weights take, if not 2 bytes a parameter. A batch that routes its tokens to
    different experts reads more than this.
    """
    if batch < 1 or accelerators < 1:
        raise LabError("a batch and accelerators are numbers from 1")
    if weight_bytes is None:
        active = model.shape.active_parameters
        if active is None:
            raise LabError(f"{model.shape.name}: how many parameters it has is not known; give weight_bytes")
        weight_bytes = 2.0 * active
    kv = batch * kv_size(model, context_tokens, 1).total
    rate = memory.bytes_per_second * accelerators
    return Floor((weight_bytes + kv) / rate, f"({weight_bytes:,.0f} + {kv:,} bytes) / {rate:,.0f} a second")
