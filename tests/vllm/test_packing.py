"""What the adapter relies on in a KV block of vLLM's CPU attention, looked at in the bytes that it writes."""

import pytest

HEADS, TOKENS, HEAD_SIZE = 4, 64, 32


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("token", [0, 37, TOKENS - 1])
def test_a_token_lies_within_its_heads_but_is_not_one_run(dtype_name: str, token: int) -> None:
    """So a block may be taken apart by heads, and not by tokens."""
    # These take many seconds, which the other tests of this folder need not wait for.
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvik.vllm.packing import packing_of
    from vllm import _custom_ops as ops

    dtype = getattr(torch, dtype_name)
    kernel = _get_attn_isa(dtype, TOKENS, HEAD_SIZE)
    caches = torch.zeros(2, HEADS, TOKENS, 2 * HEAD_SIZE, dtype=dtype)
    assert packing_of(caches, ()) == f"cpu {kernel}"
    halves = caches.view(2, HEADS, 2 * TOKENS, HEAD_SIZE).chunk(2, dim=2)
    numbers = torch.arange(1, HEADS + 1, dtype=dtype)[None, :, None].expand(1, HEADS, HEAD_SIZE).contiguous()
    ops.cpu_attn_reshape_and_cache(numbers, numbers, *halves, torch.tensor([TOKENS + token]), kernel)
    assert not caches[0].any()
    for head in range(HEADS):
        written = caches[1, head].flatten()
        assert set(written.unique().tolist()) == {0.0, head + 1.0}
        places = written.nonzero().flatten().tolist()
        assert len(places) == 2 * HEAD_SIZE  # K and V of this head, and of no other
        assert places[-1] - places[0] >= len(places), "the token is one run: tokens could be told apart"
