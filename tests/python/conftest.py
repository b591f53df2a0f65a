"""What the tests of the vLLM adapter share: the adapter against each vLLM, and a pair of servers."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import VERSIONS, Server, stand_in


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
