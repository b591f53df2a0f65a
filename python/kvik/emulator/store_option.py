"""``--store``: which store a server has, and what its ranks' blocks are called there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvik.config.kinds import Size
from kvik.errors import InvalidArgument
from kvik.shapes import ModelShape
from kvik.store import Namespace

DEADLINE_S = 1.0
_EMBEDDED = "embedded:"
_LEAST_MEMORY = 1 << 20


@dataclass(frozen=True)
class StoreOption:
    """A store at `address`, or, where that is empty, one in each rank's process of `memory` bytes.

    deadline: seconds that a request waits for its blocks at most.
    """

    address: str
    memory: int
    deadline: float


@dataclass(frozen=True)
class StorePlan:
    """The store, and what a rank's KV depends on besides tokens and shape."""

    option: StoreOption
    model: str
    revision: str

    def namespace(self, shape: ModelShape, page_tokens: int, tp: int, rank: int) -> Namespace:
        """That of one rank. Ranks that hold the same heads share it."""
        heads = shape.of_rank(page_tokens, tp, rank).heads
        return Namespace(
            model=self.model,
            revision=self.revision,
            kv_dtype=shape.dtype,
            layers=(0, shape.layers),
            model_layers=shape.layers,
            heads=(heads[0], heads[-1] + 1),
            model_heads=shape.kv_heads,
            block_tokens=page_tokens,
            layout="layer, head, token, content",
        )


def parse_store(text: str) -> StoreOption:
    """`HOST:PORT` or `embedded:SIZE`, with `,deadline=SECONDS` behind it or not.

    `InvalidArgument` says what is wrong.
    """
    target, comma, rest = (part.strip() for part in text.partition(","))
    key, _, value = (part.strip() for part in rest.partition("="))
    if comma and key != "deadline":
        raise InvalidArgument(f"--store {text!r}: {key!r} is unknown; there is deadline=SECONDS")
    deadline = _seconds(text, value) if comma else DEADLINE_S
    if target.startswith(_EMBEDDED):
        return StoreOption("", _memory(text, target.removeprefix(_EMBEDDED)), deadline)
    if not target.rpartition(":")[0]:
        raise InvalidArgument(
            f"--store {text!r}: it takes HOST:PORT of a `kvik store serve`, or embedded:SIZE such as "
            "embedded:2GiB"
        )
    return StoreOption(target, 0, deadline)


def _memory(text: str, size: str) -> int:
    kind = Size(_LEAST_MEMORY)
    try:
        return kind.from_text(size)
    except ValueError as error:
        raise InvalidArgument(f"--store {text!r}: {size!r} is not {kind.accepts}") from error


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise InvalidArgument(f"--store {text!r}: deadline={value!r} is no number of seconds up to 3600")
    return seconds
