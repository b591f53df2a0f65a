"""What a model's KV looks like: the numbers, and the arithmetic on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import kvik
from kvik.shapes.config import described
from kvik.shapes.dtypes import ELEMENT_BYTES, canonical_dtype
from kvik.shapes.errors import ShapeError
from kvik.shapes.naming import named_fields, no_model
from kvik.shapes.presets import PRESETS, preset_config
from kvik.shapes.source import there

Attention: TypeAlias = Literal["gqa", "mla"]
ConfigSource: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
LARGEST = 2**53  # of any number of a model, so that products of a few are numbers that can be shown


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How the KV of one tensor-parallel rank lies, page by page.

    One page of one layer is one contiguous run [heads][page_tokens][content]; a head is a slice of it. Sizes
    are in bytes.
    """

    tp: int
    rank: int
    layers: int
    heads: range  # which of the model's KV heads
    page_tokens: int
    content: int  # elements a token and head
    element_bytes: int

    @property
    def head_bytes(self) -> int:
        """One head of one page of one layer: page_tokens * content elements."""
        return self.page_tokens * self.content * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """One page of one layer, all heads of this rank: what vLLM calls `page_size_bytes`."""
        return len(self.heads) * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """One page of all layers."""
        return self.layers * self.block_bytes

    def layer_stride(self, pages: int) -> int:
        """From one layer to the next, in a region of `pages` pages with the layers one after the other."""
        return pages * self.block_bytes

    def layout(self, pages: int) -> kvik.Layout:
        """The kvik layout of a region of `pages` pages, layer after layer, with a slice a head.

        That order, [layers][pages][heads][tokens][content], is vLLM's `LBHNC`.
        """
        return kvik.Layout(pages, self.head_bytes, layers=self.layers, slices=len(self.heads))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as far as its KV goes: one group of layers that are alike and keep the whole context.

    name: for people and logs.
    layers: layers that keep KV.
    kv_heads: KV heads of the whole model, before they are split over ranks.
    head_size: elements of K a token and head. For "mla", the width of the latent, its rotary part included.
    value_size: elements of V a token and head; by default as many as K, and none for "mla".
    attention: "gqa" keeps K and V a KV head (multi-head and multi-query attention are its ends); "mla" keeps
        one latent for all heads, and every rank keeps all of it.
    dtype: element type of the KV: "float32", "bfloat16", "float16" or "fp8" (or another usual name of one).
    query_heads: attention heads, which tensor parallelism must divide; None: not checked.
    vocab_size: tokens that there are.
    max_context: tokens that a request may have.
    parameters, active_parameters: how many the model has, and how many one token is multiplied with (fewer
        for a mixture of experts; all by default). None: not known.
    output_parameters: of the active ones, those of the output matrix, which a prefill needs for its last
        token only; 0 where they are not known apart.

    Raises `ShapeError` for numbers that no model can have.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    value_size: int | None = None
    attention: Attention = "gqa"
    dtype: str = "bfloat16"
    query_heads: int | None = None
    vocab_size: int = 32_000
    max_context: int = 32_768
    parameters: int | None = None
    active_parameters: int | None = None
    output_parameters: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ("gqa", "mla"):
            raise ShapeError(f"{self.name}: attention is {self.attention!r}; it is 'gqa' or 'mla'")
        for key in ("layers", "kv_heads", "head_size", "vocab_size", "max_context"):
            self._check_count(key, 1)
        for key in ("query_heads", "parameters", "active_parameters"):
            if getattr(self, key) is not None:
                self._check_count(key, 1)
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        if self.value_size is None:
            object.__setattr__(self, "value_size", 0 if self.attention == "mla" else self.head_size)
        self._check_count("value_size", 0)
        self._check_count("output_parameters", 0)
        if self.active_parameters is None:
            object.__setattr__(self, "active_parameters", self.parameters)
        if self.attention == "mla" and self.kv_heads != 1:
            raise ShapeError(
                f"{self.name}: kv_heads is {self.kv_heads}; with attention 'mla' it is 1, the one latent"
            )
        if self.query_heads is not None and self.query_heads % self.kv_heads:
            raise ShapeError(
                f"{self.name}: {self.query_heads} attention heads cannot share {self.kv_heads} KV heads "
                "evenly"
            )

    def _check_count(self, key: str, least: int) -> None:
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            said = "larger than 2^53" if isinstance(value, int) and value > LARGEST else repr(value)
            raise ShapeError(f"{self.name}: {key} is {said}; it is a whole number from {least}")

    @classmethod
    def from_config(
        cls,
        source: ConfigSource,
        *,
        name: str | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        whole_context: bool = False,
    ) -> ModelShape:
        """Describe the model of a Hugging Face `config.json`: its content, the file, or its folder.

        name: instead of the folder's name. dtype: element type of the KV instead of the weights' type.
        max_context: instead of the configuration's. whole_context: describe layers with a sliding window or
        chunks as if they kept everything, as vLLM keeps them beside whole ones with
        `--disable-hybrid-kv-cache-manager`; without it they are refused, because their KV is a group of its
        own.

        Raises `ShapeError`, which names the key and the file.
        """
        origin, given = described(
            source, name=name, dtype=dtype, max_context=max_context, whole_context=whole_context
        )
        try:
            return cls(**given)
        except ShapeError as error:
            raise ShapeError(f"{origin}: {error}") from error

    @classmethod
    def preset(cls, name: str, *, dtype: str | None = None) -> ModelShape:
        """Describe a well-known model; `presets()` lists them. `ShapeError` for a name that is none."""
        return cls.from_config(preset_config(name), name=name, dtype=dtype)

    @classmethod
    def resolve(cls, text: str, *, dtype: str | None = None) -> ModelShape:
        """Describe what an option says: a preset's name, a path, or `layers=4,kv_heads=2,head_size=64,...`.

        The third form takes the fields of this class. Raises `ShapeError`.
        """
        if text in PRESETS:
            return cls.preset(text, dtype=dtype)
        exists = there(text)
        if "=" in text and not exists:
            shape = cls(**named_fields(text, [field.name for field in fields(cls)]))
            return replace(shape, dtype=dtype) if dtype else shape
        if exists:
            return cls.from_config(text, dtype=dtype)
        raise no_model(text)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of KV."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def content(self) -> int:
        """Elements a token and head in one layer: K and V packed, or the latent."""
        return self.head_size + (self.value_size or 0)

    @property
    def flops_per_token(self) -> int | None:
        """Floating-point operations of one token's forward pass without attention over the context.

        2 * active parameters: one multiplication and one addition each. Source: Kaplan et al., "Scaling Laws
        for Neural Language Models" (arXiv 2001.08361), section 2.1. None where parameters are not known.
        """
        return None if self.active_parameters is None else 2 * self.active_parameters

    def check_tp(self, tp: int) -> None:
        """Raise `ShapeError` unless the model can be split over `tp` ranks.

        The rules are vLLM's: tp divides the attention heads; for "gqa", it divides the KV heads, or is a
        multiple of them and each head is kept by several ranks.
        """
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise ShapeError(f"{self.name}: tensor-parallel size is {tp!r}; it is a whole number from 1")
        if self.query_heads is not None and self.query_heads % tp:
            raise ShapeError(
                f"{self.name}: {self.query_heads} attention heads cannot be split over {tp} ranks; "
                f"a tensor-parallel size that divides {self.query_heads} can"
            )
        if self.attention == "gqa" and self.kv_heads % tp and tp % self.kv_heads:
            raise ShapeError(
                f"{self.name}: {self.kv_heads} KV heads can be neither split over {tp} ranks nor copied to "
                f"them evenly; a tensor-parallel size that divides {self.kv_heads}, or a multiple of it, can"
            )

    def heads_of_rank(self, tp: int, rank: int) -> range:
        """Which of the model's KV heads rank `rank` of `tp` keeps.

        tp up to kv_heads: `kv_heads // tp` in a row each. Above: one, kept alike by `tp // kv_heads` ranks in
        a row. "mla": the one latent, on every rank.
        """
        self.check_tp(tp)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < tp:
            raise ShapeError(f"{self.name}: rank is {rank!r}; with {tp} ranks it is 0 to {tp - 1}")
        if self.attention == "mla":
            return range(1)
        if tp <= self.kv_heads:
            each = self.kv_heads // tp
            return range(rank * each, (rank + 1) * each)
        head = rank // (tp // self.kv_heads)
        return range(head, head + 1)

    def of_rank(self, page_tokens: int, tp: int = 1, rank: int = 0) -> RankLayout:
        """How one rank's KV lies in pages of `page_tokens` tokens."""
        if isinstance(page_tokens, bool) or not isinstance(page_tokens, int) or page_tokens < 1:
            raise ShapeError(f"{self.name}: page_tokens is {page_tokens!r}; it is a whole number from 1")
        return RankLayout(
            tp=tp,
            rank=rank,
            layers=self.layers,
            heads=self.heads_of_rank(tp, rank),
            page_tokens=page_tokens,
            content=self.content,
            element_bytes=self.element_bytes,
        )

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes of KV that one rank of `tp` keeps for one token: layers * heads * content * element bytes."""
        return self.of_rank(1, tp).page_bytes

    def page_bytes(self, page_tokens: int, tp: int = 1) -> int:
        """Bytes of one page of all layers, on one rank of `tp`."""
        return self.of_rank(page_tokens, tp).page_bytes
