"""How much of an offer a decode server can take, whose groups of layers have windows or none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvik.handover.protocol import Handover, KvShape, RefusedError


def usable(shapes: Sequence[KvShape], offered: int, whole_prompt: bool) -> int:
    """How many tokens of an offer can be taken: all of them for the same prompt, else those of whole KV
    blocks of all groups. `shapes` are this server's, of each group.

    vLLM drops the KV blocks in front of a window as soon as all tokens are there, and then computes the last
    one again, whose window begins one token earlier: where that token is the last of a block that has just
    been dropped, only whole blocks are taken, of all tokens but the last.
    """
    step = math.lcm(*(shape.block_tokens for shape in shapes))
    if not whole_prompt:
        return offered // step * step
    cut = any(
        shape.window and offered >= shape.window and (offered - shape.window + 1) % shape.block_tokens == 0
        for shape in shapes
    )
    return (offered - 1) // step * step if cut else offered


def beyond_reach(shapes: Sequence[KvShape], offer: Handover, tokens: int) -> RefusedError | None:
    """Why the offer does not have what the windows of so many tokens need, if it has not."""
    for own, theirs, first in zip(shapes, offer.shapes, offer.firsts, strict=True):
        dropped = max(0, tokens - own.window + 1) if own.window else 0
        needed, offered = dropped // own.block_tokens * own.block_tokens, first * theirs.block_tokens
        if needed < offered:
            return RefusedError(
                "window_missing",
                f"{tokens} tokens need KV from token {needed} on in layers with a window of {own.window},"
                f" prefill has kept it from token {offered} on",
            )
    return None
