"""Where vLLM's KV blocks lie, checked and turned into one kvik layout.

vLLM hands over one tensor a layer, each seen as [B, H, N, C]: KV blocks, KV heads, token slots, content (K
and V packed), or for MLA as [B, N, C]: one latent that all heads and ranks share. The physical order is in
the strides, and it has changed between releases, so nothing is assumed: what is not one contiguous run a
block, alike in every layer, and inside one storage is refused by name. What the strides do not tell is how
the kernel packs the inside of a head (`packing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvik.handover.memory import KvMemory
from kvik.handover.protocol import KvShape
from kvik.vllm.packing import packing_of

DIMENSIONS = "HNC"


class LayoutError(ValueError):
    """KV tensors that this version cannot hand over; the text names what was found."""


@dataclass(frozen=True)
class ModelKv:
    """What vLLM's configuration says of the KV of one group of a model's layers: `kind` "gqa" or "mla", its
    KV heads (1 for MLA), among how many ranks they are divided, the tokens of the KV blocks that its
    scheduler counts, and how many tokens a token sees (0: all before it)."""

    kind: str
    kv_heads: int
    tp: int
    block_tokens: int
    window: int = 0

    @property
    def heads_a_rank(self) -> int:
        return max(1, self.kv_heads // self.tp)


def inspect(kv_caches: Mapping[str, Any], model: ModelKv) -> KvMemory:
    """Check the tensors of one group's layers, as `register_kv_caches` gives them, and describe them;
    `LayoutError` names what does not fit.

    Layers that share one tensor (cross-layer KV sharing) count once. Layers are taken in the order of the
    numbers in their names, which is the same on every server of a model.
    """
    if not kv_caches:
        raise LayoutError("vLLM registered no KV tensors: a model without KV cache has nothing to hand over")
    names = sorted(kv_caches, key=_natural)
    first_name, first = names[0], kv_caches[names[0]]
    sizes = _sizes(first_name, first, model.kind)
    order = _check_first(first_name, first)
    if sizes["H"] != model.heads_a_rank:
        raise LayoutError(
            f"KV tensor of {first_name!r} has {sizes['H']} KV heads; {model.kv_heads} of the model among "
            f"{model.tp} ranks are {model.heads_a_rank}"
        )
    if sizes["N"] != model.block_tokens:
        raise LayoutError(
            f"KV tensor of {first_name!r} has blocks of {sizes['N']} slots, vLLM's scheduler counts blocks "
            f"of {model.block_tokens} tokens: kvik hands over KV with one slot a token in blocks of one size"
        )
    storage = first.untyped_storage()
    offsets: dict[int, str] = {}
    for name in names:
        tensor = kv_caches[name]
        _check_alike(name, tensor, first_name, first)
        if tensor.untyped_storage().data_ptr() != storage.data_ptr():
            raise LayoutError(
                f"KV tensors of {first_name!r} and {name!r} lie in different storages; one is served"
            )
        offset = tensor.data_ptr() - storage.data_ptr()
        offsets.setdefault(offset, name)
    item = first.element_size()
    shape = KvShape(
        kind=model.kind,
        layers=len(offsets),
        kv_heads=model.kv_heads,
        content=sizes["C"],
        dtype=str(first.dtype).removeprefix("torch."),
        tp=model.tp,
        stages=(len(offsets),),
        heads=sizes["H"],
        block_tokens=sizes["N"],
        order=order if model.kind == "mla" else _packed(order, packing_of(first)),
        block_bytes=sizes["H"] * sizes["N"] * sizes["C"] * item,
        window=model.window,
    )
    return KvMemory(
        address=storage.data_ptr(),
        nbytes=storage.nbytes(),
        num_blocks=first.shape[0],
        block_stride=first.stride(0) * item,
        layers=tuple(offsets.values()),
        layer_offsets=list(offsets),
        shape=shape,
        owner=kv_caches,
    )


def _check_first(name: str, tensor: Any) -> str:
    """Check one tensor by itself; return the order of its inner dimensions from outer to inner."""
    if tensor.device.type != "cpu":
        raise LayoutError(
            f"KV tensor of {name!r} is on {tensor.device}: this version hands over host memory; "
            "device memory comes later"
        )
    letters = _letters(tensor)
    inner = [(tensor.stride(1 + i), tensor.shape[1 + i], letter) for i, letter in enumerate(letters)]
    expected = 1
    for stride, size, _ in sorted(inner, key=lambda dim: dim[:2]):
        if size > 1 and stride != expected:
            raise LayoutError(
                f"one KV block of {name!r} is not one contiguous run: "
                f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            )
        expected *= size
    if tensor.stride(0) < expected:
        raise LayoutError(
            f"KV blocks of {name!r} overlap: shape {tuple(tensor.shape)}, stride {tensor.stride()}"
        )
    # A dimension of size 1 may have any stride: it says nothing about the order and keeps its usual place.
    known = iter(sorted((dim for dim in inner if dim[1] > 1), key=lambda dim: -dim[0]))
    order = "".join(next(known)[2] if size > 1 else letter for _, size, letter in inner)
    return order if "H" in order else f"H{order}"


def _letters(tensor: Any) -> str:
    """The dimensions behind the blocks."""
    return DIMENSIONS if tensor.dim() == 4 else DIMENSIONS.removeprefix("H")


def _sizes(name: str, tensor: Any, kind: str) -> dict[str, int]:
    """Heads, tokens and content of a block by their letters; MLA's latent is one head."""
    if tensor.dim() not in ((3, 4) if kind == "mla" else (4,)):
        raise LayoutError(
            f"KV tensor of {name!r} ({kind}) has shape {tuple(tensor.shape)}; expected "
            "[blocks, heads, slots, content], or [blocks, slots, content] for MLA"
        )
    return {"H": 1} | dict(zip(_letters(tensor), tensor.shape[1:], strict=True))


def _packed(order: str, packing: str) -> str:
    """The order of a block whose heads only one kernel understands: `H[cpu vec]`, heads outermost."""
    return f"H[{packing}]" if order.startswith("H") else f"[{order} {packing}]"


def _check_alike(name: str, tensor: Any, first_name: str, first: Any) -> None:
    found, wanted = ((tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for t in (tensor, first))
    if found != wanted:
        raise LayoutError(
            f"KV tensors differ between layers (shape, stride, dtype, device): {name!r} is {found}, "
            f"{first_name!r} is {wanted}"
        )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
