"""The models whose blocks are moved: five of the article on a remote KV-cache that this bench follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import click

import kvik
from kvik.shapes import ModelShape

TOKENS = 16
"""Tokens of a block."""

MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape(name="qwen2.5-3b", layers=36, kv_heads=2, head_size=128),
            ModelShape(name="qwen2.5-7b", layers=28, kv_heads=4, head_size=128),
            ModelShape(name="glm-4-9b", layers=40, kv_heads=4, head_size=128),
            ModelShape(name="llama-3.1-8b", layers=32, kv_heads=8, head_size=128),
            ModelShape(name="qwen2.5-32b", layers=64, kv_heads=8, head_size=128),
        )
    }
)


@dataclass(frozen=True)
class BlockShape:
    """Of one block: ``layers`` layers of two runs, K and V, of ``run`` bytes."""

    model: str
    layers: int
    run: int

    @classmethod
    def of(cls, shape: ModelShape) -> BlockShape:
        """Of a model's block of `TOKENS` tokens."""
        return cls(shape.name, shape.layers, TOKENS * shape.kv_heads * shape.head_size * shape.element_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * 2 * self.run

    def layout(self, pages: int, *, by_layer: bool) -> kvik.Layout:
        """Of so many pages: each whole, one after the other, or layer after layer, as engines have them."""
        row = 2 * self.run
        page, layer = (row, pages * row) if by_layer else (self.bytes, row)
        return kvik.Layout(
            pages,
            self.run,
            page_stride=page,
            layers=self.layers,
            layer_stride=layer,
            slices=2,
            slice_stride=self.run,
        )

    def namespace(self) -> kvik.Namespace:
        """Whose blocks they are."""
        return kvik.Namespace(
            model=f"bench {self.model}",
            kv_dtype="bfloat16",
            layers=(0, self.layers),
            model_layers=self.layers,
            heads=(0, 1),
            model_heads=1,
            block_tokens=TOKENS,
        )


def chosen(names: str) -> list[BlockShape]:
    """The models of a list of names with commas between; ``click.BadParameter`` for one that is not known."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in MODELS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(MODELS)}", param_hint="--models")
    return [BlockShape.of(MODELS[name]) for name in wanted]
