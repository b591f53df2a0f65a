"""Tests import `kvik` from the source tree and their helpers from this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1] / "python"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fake_engine import FakeNative  # noqa: E402  (found by the path above)
from vllm_harness import VERSIONS, Server, stand_in  # noqa: E402


@pytest.fixture(scope="module", params=VERSIONS)
def kvik_vllm(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with stand_in(request.param) as module:
        yield module


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


@pytest.fixture
def pair(kvik_vllm: ModuleType, native: FakeNative) -> tuple[Server, Server]:
    """A prefill and a decode server."""
    return Server(kvik_vllm, native, "kv_producer"), Server(kvik_vllm, native, "kv_consumer", blocks=24)
