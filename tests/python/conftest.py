"""What tests share: the adapter against each vLLM, a pair of servers, and a driver for GPUs."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.gpu import PATIENCE, environment
from tests.python.vllm_harness import VERSIONS, Server, stand_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of GPUs start processes that may take as long as a test may; each emulator is waited for by
    itself."""
    for item in items:
        if item.path.name.startswith("test_gpu") and Path(__file__).parent == item.path.parent:
            item.add_marker(pytest.mark.timeout(PATIENCE + 60))
        elif item.path.parent == Path(__file__).parent / "emulator":
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module", params=VERSIONS)
def kvik_vllm(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with stand_in(request.param) as module:
        yield module


@pytest.fixture(scope="session")
def gpu_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of processes that use a GPU."""
    return environment(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


@pytest.fixture
def pair(kvik_vllm: ModuleType, native: FakeNative) -> tuple[Server, Server]:
    """A prefill and a decode server."""
    return Server(kvik_vllm, native, "kv_producer"), Server(kvik_vllm, native, "kv_consumer", blocks=24)
