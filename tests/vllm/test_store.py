"""Real vLLM servers with a store: what one has computed, the next one finds, and its KV events tell; and what
becomes of it when the store dies, stops, or comes back."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from tests.python.store_rig import Served
from tests.vllm.adapter import write_adapter
from tests.vllm.conftest import SMALL_STEPS, Reference, expected
from tests.vllm.following import Follower
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import (
    COMPUTED,
    PREEMPTIONS,
    ROOT,
    START_LIMIT,
    Pair,
    Several,
    prompt_of,
    start_engine,
    used,
    wait_for,
    wait_used,
)

TOKENS = 16
BLOCKS = 7
LENGTH = BLOCKS * BLOCK_TOKENS + 50
HIT = BLOCKS * BLOCK_TOKENS
DEADLINE = 3.0
SLACK = 20.0  # seconds for a busy machine
LOADED = "vllm:kvik_store_blocks_loaded_{}_total"
SAVED = "vllm:kvik_store_blocks_saved_remote_total"
CHOICES = "vllm:kvik_store_choices_{}_total"
ADAPTERS = ("one", "two")
KVIKS = ("CPU", "STORAGE")  # media of the store's blocks
pytestmark = pytest.mark.timeout(2 * START_LIMIT)


class Stored:
    """A vLLM server with a store that is served; either can be restarted. `beside`: its connector is one of
    two, vLLM has its own prefix cache, and computing counts as faster than any store. Else it has memory of
    its own, two adapters, and few KV blocks."""

    def __init__(self, parent: ForkParent, model: Path, folder: Path, beside: bool = False) -> None:
        self.store = Served("--memory", "256MiB")
        self.events = Follower()
        self.adapters = [folder / name for name in ADAPTERS]
        store: dict[str, object] = {"address": self.store.address, "deadline": DEADLINE}
        arguments = [*SMALL_STEPS, *self.events.arguments]
        if beside:
            store["prefill_rate"] = 1e12
        else:
            store |= {"host_cache": "64MiB", "prefill_rate": "off"}
            # One request of the longest that the model takes has to fit: 32 blocks, and one that vLLM keeps.
            arguments += ["--async-scheduling", "--num-gpu-blocks-override", "34", "--enable-lora"]
            arguments.append("--lora-modules")
            for seed, (name, adapter) in enumerate(zip(ADAPTERS, self.adapters, strict=True)):
                arguments.append(f"{name}={write_adapter(adapter, seed)}")
        kind = Several if beside else Connector
        self._spec = EngineSpec(
            "stored-beside" if beside else "stored",
            kind("kv_both", extra={"store": store}),
            prefix_caching=beside,
            arguments=arguments,
            env={"PYTHONPATH": str(ROOT)},
        )
        self._start = partial(start_engine, parent, model, self._spec)
        self._folder = folder
        self._fleet = Fleet()
        self.engine = self._begin()

    def _begin(self) -> HttpServer:
        return self._fleet.add(self._start(free_ports(1)[0], self._folder))

    def ready(self) -> "Stored":
        """Once the engine is up."""
        self.engine.wait_ready(time.monotonic() + START_LIMIT)
        return self

    def restart(self) -> None:
        """A new engine, which has nothing in its own memory; the adapters have changed their names."""
        self._fleet.stop(self.engine)
        one, two = self.adapters
        aside = one.with_name("aside")
        for old, new in ((one, aside), (two, one), (aside, two)):
            old.rename(new)
        self.engine = self._begin()
        self.ready()

    def ask(self, prompt: list[int], **more: Any) -> tuple[list[int], dict[str, float]]:
        """The tokens of an answer, and by how much each metric has grown. more: of the request."""
        before = client.metrics(self.engine.url)
        answer = client.complete(self.engine.url, prompt, TOKENS, **more).tokens
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

    def reset(self, query: str = "") -> None:
        """Reset vLLM's prefix cache, and what the query says."""
        wait_used(self.engine, 0.0, SLACK)
        connection = HTTPConnection(urlsplit(self.engine.url).netloc, timeout=SLACK)
        with contextlib.closing(connection):
            connection.request("POST", f"/reset_prefix_cache{query}")
            assert json.loads(connection.getresponse().read()) == {"success": True}, self.engine.tail()

    def tells(self, prompt: list[int], blocks: int, *media: str) -> None:
        """Wait until events tell of so many blocks of a prompt in each of these media."""
        wanted = prompt[: blocks * BLOCK_TOKENS]
        known = [self.events.media[medium] for medium in media]
        self.events.until(lambda: all(len(one.prefix(wanted)) == blocks for one in known), SLACK)

    def stop(self) -> None:
        """Stop both."""
        self._fleet.stop()
        self.store.__exit__()
        self.events.__exit__(None, None, None)


@pytest.fixture(scope="module")
def both(
    fork_parent: ForkParent, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stored, Stored]]:
    """The two kinds; they start side by side."""
    with contextlib.ExitStack() as stack:
        running = []
        for beside in (False, True):
            one = Stored(fork_parent, model, tmp_path_factory.mktemp("stored"), beside)
            stack.callback(one.stop)
            running.append(one)
        yield running[0], running[1]


@pytest.fixture
def stored(both: tuple[Stored, Stored]) -> Stored:
    return both[0].ready()


@pytest.fixture
def beside(both: tuple[Stored, Stored]) -> Stored:
    return both[1].ready()


def from_store(grown: dict[str, float]) -> tuple[float, float, float]:
    """Blocks from the process' own memory and from the server, and prompt tokens that were computed."""
    return grown[LOADED.format("host")], grown[LOADED.format("remote")], grown[COMPUTED]


def test_kv_outlives_the_engine(stored: Stored, reference: Reference) -> None:
    """Computed once; found by an engine that was started again, which computes what no whole block holds. An
    adapter's KV is found by its weights: not under the name that it had, but under the one that it has."""
    prompt = prompt_of(LENGTH, seed=80)
    reference.soon(prompt, TOKENS)
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, 0, LENGTH)
    adapted, grown = stored.ask(prompt, model="one")
    assert adapted != answer, "the adapter changes nothing"
    assert from_store(grown) == (0, 0, LENGTH)
    stored.saved(2 * BLOCKS)
    stored.tells(prompt, BLOCKS, *KVIKS)
    stored.restart()
    stored.events.media["STORAGE"].blocks.clear()
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, BLOCKS, LENGTH - HIT)
    stored.tells(prompt, BLOCKS, "STORAGE")  # since it was found there
    other, grown = stored.ask(prompt, model="one")
    assert from_store(grown) == (0, 0, LENGTH)
    assert other not in (answer, adapted)
    again, grown = stored.ask(prompt, model="two")
    assert (again, from_store(grown)) == (adapted, (0, BLOCKS, LENGTH - HIT))


def test_events_tell_what_a_later_request_finds(stored: Stored, reference: Reference) -> None:
    prompt = prompt_of(LENGTH, seed=89)
    longer = [*prompt[:-1], *prompt_of(BLOCK_TOKENS, seed=90)]
    reference.soon(longer, TOKENS)
    stored.ask(prompt)
    stored.saved(0)
    stored.tells(prompt, BLOCKS, *KVIKS)
    known = [stored.events.media[medium].prefix(prompt) for medium in KVIKS]
    assert known[0] == known[1]
    finds = len(stored.events.media["CPU"].prefix(longer)) * BLOCK_TOKENS
    answer, grown = stored.ask(longer)
    assert answer == reference(longer, TOKENS)
    assert from_store(grown) == (BLOCKS, 0, len(longer) - finds)
    stored.saved(0)
    stored.tells(longer, len(longer) // BLOCK_TOKENS, *KVIKS)


def test_preempted(stored: Stored, reference: Reference) -> None:
    """Requests that lose their KV blocks get those back that the store has."""
    prompts = [prompt_of(600 + i, seed=73) for i in range(5)]
    with ThreadPoolExecutor(len(prompts)) as pool, expected(reference, prompts, 300) as right:
        for prompt in prompts:
            stored.ask(prompt)
            stored.saved(0)
        before = client.metrics(stored.engine.url)
        asked = [pool.submit(client.complete, stored.engine.url, prompt, 300) for prompt in prompts]
        assert [one.result().tokens for one in asked] == [one.result() for one in right]
    wait_used(stored.engine, 0.0, SLACK)
    after = client.metrics(stored.engine.url)
    grown = {name: amount - before.get(name, 0.0) for name, amount in after.items()}
    assert grown[PREEMPTIONS] > 0, "nothing was preempted"
    once = sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
    assert grown[LOADED.format("host")] > once, "what was preempted was not loaded again"
    assert grown["vllm:kvik_store_blocks_missing_total"] == 0


def test_the_own_memory_comes_first(stored: Stored, reference: Reference) -> None:
    """What this process has kept is not read from the server."""
    prompt = prompt_of(LENGTH, seed=81)
    reference.soon(prompt, TOKENS)
    stored.ask(prompt)
    stored.saved(0)
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (BLOCKS, 0, LENGTH - HIT)


def test_a_salt_sets_tenants_apart(stored: Stored, reference: Reference) -> None:
    prompt = prompt_of(LENGTH, seed=82)
    reference.soon(prompt, TOKENS)
    stored.ask(prompt, cache_salt="one")
    stored.saved(0)
    answer, grown = stored.ask(prompt, cache_salt="two")
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, 0, LENGTH)
    answer, grown = stored.ask(prompt, cache_salt="one")
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (BLOCKS, 0, LENGTH - HIT)


def test_a_store_that_stops_dies_and_comes_back(stored: Stored, reference: Reference) -> None:
    """Every request is answered with the right tokens, and hits resume by themselves."""
    lost = [prompt_of(LENGTH, seed) for seed in range(83, 87)]
    for prompt in lost:
        reference.soon(prompt, TOKENS)
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


def test_a_reset_is_told(stored: Stored, reference: Reference) -> None:
    """Nothing of before is found, and everything that was told is told as removed."""
    prompt = prompt_of(LENGTH, seed=91)
    reference.soon(prompt, TOKENS)
    stored.ask(prompt)
    stored.saved(0)
    stored.tells(prompt, BLOCKS, *KVIKS)
    events = stored.events
    told = {(medium, name) for medium in KVIKS for name in events.media[medium].blocks}
    stored.reset("?reset_external=true")
    answer, grown = stored.ask(prompt)
    assert answer == reference(prompt, TOKENS)
    assert from_store(grown) == (0, 0, LENGTH)
    stored.saved(0)
    events.until(lambda: told <= set(events.removed), SLACK)
    events.until(lambda: {len(events.media[medium].blocks) for medium in KVIKS} == {BLOCKS}, SLACK)


@pytest.mark.parametrize("pair", ["stored"], indirect=True)
def test_handover_and_store_in_one_connector(pair: Pair, reference: Reference) -> None:
    """A handover comes first; decode keeps what it was handed, and finds it without prefill."""
    prompt = prompt_of(LENGTH, seed=88)
    reference.soon(prompt, TOKENS)
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


def test_beside_another_connector(beside: Stored, reference: Reference) -> None:
    """The store as one of two connectors. Events have vLLM's own hashes. What was never fetched is fetched;
    then it is computed, which counts as faster."""
    beside.ask(prompt_of(40, seed=92))  # it hears of kvik's ranks with its first step
    prompt = prompt_of(LENGTH, seed=93)
    reference.soon(prompt, TOKENS)
    answer, grown = beside.ask(prompt)
    assert (answer, grown[COMPUTED]) == (reference(prompt, TOKENS), LENGTH)
    beside.saved(BLOCKS)
    beside.tells(prompt, BLOCKS, "GPU", "STORAGE")
    media = beside.events.media
    assert media["GPU"].prefix(prompt)[:BLOCKS] == media["STORAGE"].prefix(prompt)
    for computed, reason in ((LENGTH - HIT, "unknown"), (LENGTH, "slower")):
        beside.reset()
        answer, grown = beside.ask(prompt)
        assert answer == reference(prompt, TOKENS)
        assert (grown[COMPUTED], grown[CHOICES.format(reason)]) == (computed, 1)
