"""Where vLLM's KV blocks lie, checked and turned into one kvik layout.

vLLM hands over one tensor a layer, each seen as [B, H, N, C]: KV blocks, KV heads, token slots, content (K
and V packed), or for MLA as [B, N, C]: one latent that all heads and ranks share. The physical order is in
the strides; it differs between attention backends and has changed between releases, so nothing is assumed:
what is not one contiguous run a block, or a head of a block, alike in every layer, and inside one storage is
refused by name. What the strides do not tell is how the kernel packs the inside of a head (`packing.py`).
Nothing here touches the memory, which may lie on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvik.handover.memory import KvMemory
from kvik.handover.native import gpu_of
from kvik.handover.protocol import KvShape
from kvik.vllm.packing import is_rocm, packing_of

DIMENSIONS = "HNC"


class LayoutError(ValueError):
    """KV tensors that this version cannot hand over; the text names what was found."""


@dataclass(frozen=True)
class ModelKv:
    """What vLLM's configuration says of the KV of one group of a model's layers: `kind` "gqa" or "mla", its
    KV heads (1 for MLA), among how many ranks they are divided, the tokens of the KV blocks that its
    scheduler counts, how many tokens a token sees (0: all before it), and the names that vLLM has for the
    attention backends of its layers."""

    kind: str
    kv_heads: int
    tp: int
    block_tokens: int
    window: int = 0
    backends: tuple[str, ...] = ()

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
    order, head_stride = _check_first(first_name, first)
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
    if first.device.type != "cpu" and not model.backends:
        raise LayoutError(
            f"vLLM does not say which attention backend {first_name!r} has, and so not how its KV blocks "
            "are packed"
        )
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
        order=order if model.kind == "mla" else _packed(order, packing_of(first, model.backends)),
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
        head_stride=head_stride * item,
        shape=shape,
        owner=kv_caches,
        gpu=None if first.device.type == "cpu" else gpu_of(storage.data_ptr()),
    )


def _check_first(name: str, tensor: Any) -> tuple[str, int]:
    """Check one tensor by itself; return the order of its inner dimensions from outer to inner, and how many
    elements lie from one head of a block to the next, where heads are outermost."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise LayoutError(
            f"KV tensor of {name!r} is on {tensor.device}: kvik hands over memory of the host and of CUDA "
            "devices"
        )
    if tensor.device.type == "cuda" and is_rocm():
        raise LayoutError(
            f"KV tensor of {name!r} is on {tensor.device} of a ROCm build: kvik hands over memory of the "
            "host and of CUDA devices"
        )
    dims = _inner(tensor)
    # Heads may lie apart from each other, and a single one has no place among the dimensions.
    orders = {"HNC": "NC", "NHC": "NHC"}
    order = next((order for order, run in orders.items() if _is_dense(run, dims)), None)
    if order is None:
        raise LayoutError(
            f"neither one KV block of {name!r} nor each head of one is one contiguous run: "
            f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
        )
    run = math.prod(dims[letter][1] for letter in orders[order])
    heads = [dims["H"]] if order == "HNC" else []
    _check_apart(name, tensor, heads, run)
    return order, dims["H"][0] if dims["H"][1] > 1 else run


def _inner(tensor: Any) -> dict[str, tuple[int, int]]:
    """Stride and size of the dimensions behind the blocks, by their letters."""
    dims = zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
    return {"H": (0, 1)} | dict(zip(_letters(tensor), dims, strict=True))


def _is_dense(order: str, dims: Mapping[str, tuple[int, int]]) -> bool:
    """Whether these dimensions, from outer to inner, are one contiguous run. One of size 1 may have any
    stride."""
    expected = 1
    for letter in reversed(order):
        stride, size = dims[letter]
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_apart(name: str, tensor: Any, heads: list[tuple[int, int]], run: int) -> None:
    """Check that runs of so many elements, one a block or one a head of a block, do not overlap."""
    extent = run
    for stride, size in sorted([(tensor.stride(0), tensor.shape[0]), *heads]):
        if size > 1 and stride < extent:
            raise LayoutError(
                f"KV blocks of {name!r} overlap: shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            )
        extent = max(extent, stride * (size - 1) + extent)


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
    """The order of a block; of one whose heads only one kernel understands: `H[cpu vec]`, heads outermost."""
    if not packing:
        return order
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
