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
        return digest.request_chain(native, b"n", request("r", prompt, **more), count, 4)[-32:].hex()

    assert of(8) == of(8, tokens[:8]) != of(9) != of(10)
    assert of(8) != of(8, [1, *tokens[1:]])
    image = SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=8, length=1))
    assert of(8, mm_features=[image]) == of(8)  # begins behind the prefix
    assert of(9, mm_features=[image]) != of(9)


def test_a_digest_is_of_one_block_size(native: Native) -> None:
    """So decode has to use the prefill side's."""
    tokens = np.arange(10, dtype=np.uint32)
    chains = {native.content_chain(b"n", b"", tokens, size)[-32:] for size in (4, 8)}
    assert len(chains) == 2


def test_a_namespace_does_not_tell_how_the_kv_is_divided(native: Native) -> None:
    def of(shape: KvShape) -> str:
        return digest.namespace_digest(native, digest.namespace_bytes({"model": "tiny"}, [shape]))

    same = {of(shape_of(tp, 4, tokens)) for tp in (1, 2, 4, 8) for tokens in (16, 32)}
    assert len(same) == 1
    others = (
        shape_of(1, 8), shape_of(1, 4, layers=3), shape_of(1, 4, content=4), shape_of(1, 1, kind="mla"),
        shape_of(1, 1),
    )  # fmt: skip
    assert len({*same, *map(of, others)}) == 6


def test_an_image_enters_the_chain_where_it_begins(native: Native) -> None:
    def links(*images: tuple[str, int, int]) -> list[bytes]:
        features = [
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
            for name, offset, length in images
        ]
        asked = request("r", list(range(16)), mm_features=features)
        return digest.links(digest.request_chain(native, b"n", asked, 16, 4))

    plain, image = links(), links(("i", 6, 5))
    assert len(plain) == len(image) == 4
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]
    others = [links(("j", 6, 5)), links(("i", 7, 5)), links(("i", 6, 4)), links(("i", 6, 5), ("k", 13, 2))]
    assert len({chain[-1] for chain in (plain, image, *others)}) == 6
    assert others[-1][:3] == image[:3]
    assert links(("k", 13, 2), ("i", 6, 5)) == others[-1]


def test_a_part_tells_what_is_held_and_how_it_lies() -> None:
    def of(model: KvShape, division: KvShape, rank: int) -> bytes:
        return digest.part_bytes(model, division, rank)

    shape = shape_of(2, 4)
    parts = {of(shape, shape, rank) for rank in (0, 1)}
    assert len(parts) == 2
    for other in (
        shape_of(4, 4), shape_of(1, 4), shape_of(2, 4, 8), shape_of(2, 4, order="NHC"),
    ):  # fmt: skip
        parts |= {of(shape, other, rank) for rank in range(other.tp)}
    assert len(parts) == 2 + 4 + 1 + 2 + 2
    for model in (
        shape_of(2, 4, layers=3),
        shape_of(2, 4, content=5),
        shape_of(2, 8),
        shape_of(1, 1, kind="mla"),
    ):
        assert of(model, model, 0) not in parts


def test_ranks_that_hold_copies_have_one_part() -> None:
    copies = shape_of(8, 4)
    assert [digest.part_bytes(copies, copies, rank) for rank in (0, 2)] == [
        digest.part_bytes(copies, copies, rank) for rank in (1, 3)
    ]
    assert digest.part_bytes(copies, copies, 0) != digest.part_bytes(copies, copies, 2)
    latent = shape_of(4, 1, kind="mla")
    assert len({digest.part_bytes(latent, latent, rank) for rank in range(4)}) == 1
