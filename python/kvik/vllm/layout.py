"""Where vLLM's KV blocks lie, checked and turned into one kvik layout.

vLLM hands over one tensor a layer, each seen as [B, H, N, C]: KV blocks, KV heads, token slots, content (K
and V packed). The physical order is in the strides, and it has changed between releases, so nothing is
assumed: what is not one contiguous run a block, alike in every layer, and inside one storage is refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvik.handover.memory import KvMemory
from kvik.handover.protocol import KvShape

DIMENSIONS = "HNC"


class LayoutError(ValueError):
    """KV tensors that this version cannot hand over; the text names what was found."""


def inspect(kv_caches: Mapping[str, Any], tp: int) -> KvMemory:
    """Check the tensors of `register_kv_caches` and describe them; `LayoutError` names what does not fit.

    Layers that share one tensor (cross-layer KV sharing) count once. Layers are taken in the order of the
    numbers in their names, which is the same on every server of a model.
    """
    if not kv_caches:
        raise LayoutError("vLLM registered no KV tensors: a model without KV cache has nothing to hand over")
    names = sorted(kv_caches, key=_natural)
    first_name, first = names[0], kv_caches[names[0]]
    order = _check_first(first_name, first)
    storage = first.untyped_storage()
    offsets: list[int] = []
    for name in names:
        tensor = kv_caches[name]
        _check_alike(name, tensor, first_name, first)
        if tensor.untyped_storage().data_ptr() != storage.data_ptr():
            raise LayoutError(
                f"KV tensors of {first_name!r} and {name!r} lie in different storages; one is served"
            )
        offset = tensor.data_ptr() - storage.data_ptr()
        if offset not in offsets:
            offsets.append(offset)
    blocks, heads, slots, content = first.shape
    item = first.element_size()
    shape = KvShape(
        tp=tp,
        pp=1,
        layers=len(offsets),
        heads=heads,
        block_tokens=slots,
        content=content,
        dtype=str(first.dtype).removeprefix("torch."),
        order=order,
        block_bytes=heads * slots * content * item,
    )
    return KvMemory(
        address=storage.data_ptr(),
        nbytes=storage.nbytes(),
        num_blocks=blocks,
        block_stride=first.stride(0) * item,
        layer_offsets=offsets,
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
    if tensor.dim() != 4:
        raise LayoutError(
            f"KV tensor of {name!r} has shape {tuple(tensor.shape)}; expected [blocks, heads, slots, content]"
        )
    inner = [(tensor.stride(1 + i), tensor.shape[1 + i], DIMENSIONS[i]) for i in range(3)]
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
    return "".join(next(known)[2] if size > 1 else letter for _, size, letter in inner)


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
