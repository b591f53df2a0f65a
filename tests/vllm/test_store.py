"""Real vLLM servers with a store: what one has computed, the next one finds; and what becomes of it when the
store dies, stops, or comes back."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from tests.python.store_rig import Served
from tests.vllm.conftest import SMALL_STEPS, Reference
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import COMPUTED, START_LIMIT, Pair, prompt_of, start_engine, used, wait_for, wait_used

TOKENS = 16
BLOCKS = 7
LENGTH = BLOCKS * BLOCK_TOKENS + 50
HIT = BLOCKS * BLOCK_TOKENS
DEADLINE = 3.0
SLACK = 20.0  # seconds for a busy machine
LOADED = "vllm:kvik_store_blocks_loaded_{}_total"
SAVED = "vllm:kvik_store_blocks_saved_remote_total"
pytestmark = pytest.mark.timeout(2 * START_LIMIT)


class Stored:
    """One vLLM server with a store that is served, and memory of its own; either can be restarted."""

    def __init__(self, parent: ForkParent, model: Path, folder: Path) -> None:
        self.store = Served("--memory", "256MiB")
        store = {"address": self.store.address, "host_cache": "64MiB", "deadline": DEADLINE}
        self._spec = EngineSpec(
            "stored",
            Connector("kv_both", extra={"store": store}),
            prefix_caching=False,
            arguments=[*SMALL_STEPS, "--async-scheduling"],
        )
        self._start = partial(start_engine, parent, model, self._spec)
        self._folder = folder
        self._fleet = Fleet()
        self.engine = self._begin()

    def _begin(self) -> HttpServer:
        engine = self._fleet.add(self._start(free_ports(1)[0], self._folder))
        engine.wait_ready(time.monotonic() + START_LIMIT)
        return engine

    def restart(self) -> None:
        """A new engine, which has nothing in its own memory."""
        self._fleet.stop(self.engine)
        self.engine = self._begin()

    def ask(self, prompt: list[int], salt: str = "") -> tuple[list[int], dict[str, float]]:
        """The tokens of an answer, and by how much each metric has grown."""
        before = client.metrics(self.engine.url)
        answer = (
            client.complete(self.engine.url, prompt, TOKENS, cache_salt=salt)
            if salt
            else client.complete(self.engine.url, prompt, TOKENS)
        ).tokens
        after = client.metrics(self.engine.url)
        return answer, {name: amount - before.get(name, 0.0) for name, amount in after.items()}

    def saved(self, blocks: int) -> None:
        """Wait until all saves have ended, and this engine has put so many blocks into the server."""
        wait_used(self.engine, 0.0, SLACK)
        self._wait(SAVED, blocks)

    def _wait(self, name: str, amount: float) -> None:
        def look() -> float:
            used(self.engine)  # counts come with steps
            return client.metrics(self.engine.url).get(name, 0.0)

        assert wait_for(look, lambda value: value >= amount, SLACK) >= amount, self.engine.tail()

    def stop(self) -> None:
        """Stop both."""
        self._fleet.stop()
        self.store.__exit__()


@pytest.fixture(scope="module")
def stored(
    fork_parent: ForkParent, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stored]:
    running = Stored(fork_parent, model, tmp_path_factory.mktemp("stored"))
    yield running
    running.stop()


def from_store(grown: dict[str, float]) -> tuple[float, float, float]:
    """Blocks from the process' own memory and from the server, and prompt tokens that were computed."""
    return grown[LOADED.format("host")], grown[LOADED.format("remote")], grown[COMPUTED]


def test_kv_outlives_the_engine(stored: Stored, reference: Reference) -> None:
    """Computed once; found by an engine that was started again, which computes what no whole block holds."""
    prompt = prompt_of(LENGTH, seed=80)
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, 0, LENGTH)
    stored.saved(BLOCKS)
    stored.restart()
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, BLOCKS, LENGTH - HIT)


def test_the_own_memory_comes_first(stored: Stored, reference: Reference) -> None:
    """What this process has kept is not read from the server."""
    prompt = prompt_of(LENGTH, seed=81)
    stored.ask(prompt)
    stored.saved(0)
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (BLOCKS, 0, LENGTH - HIT)


def test_a_salt_sets_tenants_apart(stored: Stored, reference: Reference) -> None:
    prompt = prompt_of(LENGTH, seed=82)
    stored.ask(prompt, salt="one")
    stored.saved(0)
    answer, grown = stored.ask(prompt, salt="two")
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, 0, LENGTH)
    answer, grown = stored.ask(prompt, salt="one")
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (BLOCKS, 0, LENGTH - HIT)


def test_a_store_that_stops_dies_and_comes_back(stored: Stored, reference: Reference) -> None:
    """Every request is answered with the right tokens, and hits resume by themselves."""
    lost = [prompt_of(LENGTH, seed) for seed in range(83, 87)]
    took = []
    with stored.store.stopped():
        for prompt in lost[:2]:
            began = time.monotonic()
            answer, grown = stored.ask(prompt)
            took.append(time.monotonic() - began)
            assert answer == reference(prompt, TOKENS)
            assert from_store(grown) == (0, 0, LENGTH)
    print(f"seconds with a store that has stopped: {[round(seconds, 2) for seconds in took]}")
    stored.store.kill()
    for prompt in lost[2:]:
        answer, grown = stored.ask(prompt)
        assert answer == reference(prompt, TOKENS)
        assert from_store(grown) == (0, 0, LENGTH)
    stored.store.again()
    numbers = iter(range(1000, 2000))
    before = client.metrics(stored.engine.url).get(SAVED, 0.0)

    def kept() -> float:
        """Ask for something new, until the server that came back has it."""
        stored.ask(prompt_of(LENGTH, seed=next(numbers)))
        return client.metrics(stored.engine.url).get(SAVED, 0.0)

    assert wait_for(kept, lambda value: value > before, SLACK) > before, stored.engine.tail()


@pytest.mark.parametrize("pair", ["stored"], indirect=True)
def test_handover_and_store_in_one_connector(pair: Pair, reference: Reference) -> None:
    """A handover comes first; decode keeps what it was handed, and finds it without prefill."""
    prompt = prompt_of(LENGTH, seed=88)
    pair.reports.new()
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    assert [load.outcome for load in pair.reports.wait(1)] == ["loaded"]
    for engine in pair.engines():
        wait_used(engine, 0.0, SLACK)
        before = client.metrics(engine.url)
        assert client.complete(engine.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
        after = client.metrics(engine.url)
        grown = {name: amount - before.get(name, 0.0) for name, amount in after.items()}
        assert from_store(grown) == (BLOCKS, 0, LENGTH - HIT), engine.tail()
