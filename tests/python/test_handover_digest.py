"""What two servers must agree on before KV moves: the namespace and the content digest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvik
from kvik.handover import digest
from kvik.handover.native import Native
from kvik.handover.protocol import KvShape
from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import request, shape_of


@pytest.fixture(params=["real", "stand-in"])
def native(request: pytest.FixtureRequest) -> Native:
    return cast(Native, kvik if request.param == "real" else FakeNative())


def test_digest_is_chained(native: Native) -> None:
    tokens = list(range(10))

    def of(count: int, prompt: list[int] = tokens, **more: Any) -> str:
        return digest.request_digest(native, b"n", request("r", prompt, **more), count, 4)

    assert of(8) == of(8, tokens[:8]) != of(9) != of(10)
    assert of(8) != of(8, [1, *tokens[1:]])
    image = SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=8, length=1))
    assert of(8, mm_features=[image]) == of(8)  # begins behind the prefix
    assert of(9, mm_features=[image]) != of(9)


def test_a_digest_is_of_one_block_size(native: Native) -> None:
    """So decode has to use the prefill side's."""
    chains = {native.content_chain(b"n", b"", np.arange(10, dtype=np.uint32), size)[-1] for size in (4, 8)}
    assert len(chains) == 2


def test_a_namespace_does_not_tell_how_the_kv_is_divided(native: Native) -> None:
    def of(shape: KvShape) -> str:
        return digest.namespace_digest(native, digest.namespace_bytes({"model": "tiny"}, shape))

    same = {of(shape_of(tp, 4, tokens)) for tp in (1, 2, 4, 8) for tokens in (16, 32)}
    assert len(same) == 1
    others = (
        shape_of(1, 8), shape_of(1, 4, layers=3), shape_of(1, 4, content=4), shape_of(1, 1, kind="mla"),
        shape_of(1, 1),
    )  # fmt: skip
    assert len({*same, *map(of, others)}) == 6
