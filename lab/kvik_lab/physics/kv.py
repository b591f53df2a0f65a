"""How many bytes of KV a request has: by model, tokens, block size, tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvik.shapes import PRESETS, ConfigSource, ModelShape, ShapeError, layer_windows
from kvik_lab.errors import LabError


@dataclass(frozen=True)
class ModelKv:
    """A model's KV: the shape that all its layers have, and how many tokens each layer keeps.

    windows: one entry a layer; None keeps the whole context.
    """

    shape: ModelShape
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.shape.layers:
            raise LabError(
                f"{self.shape.name}: {len(self.windows)} windows for {self.shape.layers} layers; "
                "give one a layer"
            )

    @classmethod
    def from_config(cls, source: ConfigSource, *, dtype: str | None = None) -> ModelKv:
        """Read a Hugging Face `config.json`: its content, its file or its folder. Windows are kept."""
        try:
            shape = ModelShape.from_config(source, dtype=dtype, whole_context=True)
            return cls(shape, layer_windows(source))
        except ShapeError as error:
            raise LabError(str(error)) from error

    @classmethod
    def resolve(cls, text: str, *, dtype: str | None = None) -> ModelKv:
        """Read what an option says: a preset, a path, or `layers=4,kv_heads=2,head_size=64`."""
        if text not in PRESETS and Path(text).exists():
            return cls.from_config(text, dtype=dtype)
        try:
            shape = ModelShape.resolve(text, dtype=dtype)
        except ShapeError as error:
            raise LabError(str(error)) from error
        return cls(shape, (None,) * shape.layers)

    def bytes_per_token(self) -> int:
        """Bytes that one more token adds in all layers of all ranks, while no window is full."""
        return self.shape.kv_bytes_per_token()


def blocks_kept(tokens: int, block_tokens: int, window: int | None = None) -> int:
    """Blocks of a layer that the token after the first `tokens` tokens can still see.

    With a window w that token sees the w - 1 before it: blocks that lie whole before those are free. Source:
    vLLM's SlidingWindowManager (`get_num_skipped_tokens`, `remove_skipped_blocks`).
    """
    if tokens < 0 or block_tokens < 1 or (window is not None and window < 1):
        raise LabError("tokens are a number from 0, tokens a block and a window from 1")
    passed = 0 if window is None else max(0, tokens - window + 1)
    return max(0, -(-tokens // block_tokens) - passed // block_tokens)


def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """Which layers each of `pp` pipeline stages has.

    As vLLM divides them (`get_pp_indices`): evenly, and what is left over goes one each to the stages before
    the last, from its neighbour backwards.
    """
    if not 1 <= pp <= layers:
        raise LabError(f"{layers} layers cannot be split over {pp} pipeline stages; 1 to {layers} can")
    counts = [layers // pp] * pp
    for index in range(layers % pp):
        counts[pp - 2 - index] += 1
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


@dataclass(frozen=True)
class KvSize:
    """The KV of one request. Sizes in bytes; `blocks` counts one-layer blocks of one rank, all its layers.

    total: what a handover has to move: each KV head once, however many ranks keep a copy of it.
    by_rank: by pipeline stage, what each tensor-parallel rank of it holds.
    """

    total: int
    by_rank: tuple[int, ...]
    blocks: int


def kv_size(model: ModelKv, tokens: int, block_tokens: int = 16, tp: int = 1, pp: int = 1) -> KvSize:
    """The KV of a request of `tokens` tokens, in whole blocks of `block_tokens` tokens.

    Raises `LabError` for a model that cannot be split so.
    """
    try:
        rank = model.shape.of_rank(block_tokens, tp)
        whole = model.shape.of_rank(block_tokens)
    except ShapeError as error:
        raise LabError(str(error)) from error
    kept = [blocks_kept(tokens, block_tokens, window) for window in model.windows]
    stages = stage_layers(model.shape.layers, pp)
    return KvSize(
        total=sum(kept) * whole.block_bytes,
        by_rank=tuple(sum(kept[layer] for layer in stage) * rank.block_bytes for stage in stages),
        blocks=max(sum(kept[layer] for layer in stage) for stage in stages),
    )
