"""How vLLM's attention keeps the inside of a KV block, where its strides do not tell.

On a CPU heads are outermost, and each head is as the kernel wants it. A block is seen as [heads][tokens]
[K and V], but its bytes are not in that order. Looked at in 0.32 with the kernel "vec" (one token written by
`cpu_attn_reshape_and_cache`, then found in the bytes): each head has its K first, turned round to
[head size][tokens], and then its V, [tokens][head size]; other kernels tile K in other ways. So such a block
can be taken apart by heads and not by tokens, and two servers whose CPUs get different kernels cannot read
each other's blocks though the shapes agree.
"""

from __future__ import annotations

import platform
from typing import Any

# Read in 0.32: each views a block's tensor as it is strided, and splits the content of a token and head into
# its K and its V (`kv_cache.transpose(1, 2).split(head_size, dim=-1)`).
PLAIN = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})


def packing_of(tensor: Any, backends: tuple[str, ...]) -> str:
    """The name of what is inside one head of a KV block [blocks, heads, tokens, K and V].

    "" where the tensor's strides say it all, as for most attention backends on GPUs. Two servers with another
    backend hand over to each other where both have the same.
    """
    if tensor.device.type == "cpu":
        return f"cpu {_kernel(tensor.dtype, tensor.shape[2], tensor.shape[3] // 2)}"
    return "" if PLAIN.issuperset(backends) else "+".join(backends)


def is_rocm() -> bool:
    """Whether torch's devices "cuda" are AMD's."""
    import torch

    return getattr(torch.version, "hip", None) is not None


def _kernel(dtype: Any, block_tokens: int, head_size: int) -> str:
    """vLLM's own choice; where a release does not tell it, what it chooses by: this machine's features."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(dtype, block_tokens, head_size))
    except (ImportError, AttributeError, TypeError):
        import torch

        features = ("_is_amx_tile_supported", "_is_avx512_supported")
        has = [name for name in features if getattr(getattr(torch, "cpu", None), name, bool)()]
        return "/".join([platform.machine(), *(name.split("_")[2] for name in has)])
