"""Emulators with a store: what one has computed another one reads, and whatever the store does is only time.

Prefix caches are off where hits are counted, so that what is found again is found in the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import kvik
from kvik.demo import client
from kvik.emulator.options import FUNCTION
from kvik.emulator.pool import PagePool
from kvik.emulator.requests import Request, Sampling
from kvik.emulator.store_metrics import StoreFamilies
from kvik.emulator.store_option import StoreOption, StorePlan, parse_store
from kvik.emulator.store_side import StoreSide
from kvik.handover import digest
from kvik.roles.processes import HttpServer
from tests.busy import Watch
from tests.python.emulator import servers
from tests.python.emulator.servers import COMPUTED, TINY, Spec, metric, prompt_of, tokens_of, wait_for
from tests.python.store_rig import Served

TOKENS = 6
PAGE = 16
DEADLINE = 1.0
LONG = 20.0  # where the store answers, and every block is counted
# What a request may take besides, on a machine that does other things too.
SLACK = 2.5
PLAN = StorePlan(StoreOption("", 0, DEADLINE), f"kvik-emulator:{TINY.name}", f"{FUNCTION}:{TINY.name}")


def blocks(result: str) -> str:
    """The name of a metric of blocks."""
    return f'kvik_emulator_store_blocks_total{{result="{result}"}}'


def choices(reason: str) -> str:
    """The name of a metric of choices."""
    return f'kvik_emulator_store_choices_total{{reason="{reason}"}}'


def spec(name: str, store: str, *options: str, cached: bool = False, deadline: float = LONG) -> Spec:
    """A server with a store."""
    cache = () if cached else ("--no-prefix-cache",)
    return Spec(name, options=("--store", f"{store},deadline={deadline}", *cache, *options))


def wait_put(server: HttpServer, count: int) -> None:
    """Wait until so many blocks of all ranks were taken by the store, or were there."""
    last = wait_for(
        lambda: metric(server, blocks("put")) + metric(server, blocks("known")), lambda n: n >= count
    )
    assert last >= count, f"{last} of {count} blocks were put\n{server.tail()}"


def hits_of(server: HttpServer, prompt: Sequence[int], truth: list[int]) -> float:
    """Ask a server, which has to answer this; the blocks that it has hit since its start."""
    assert tokens_of(server, prompt, TOKENS) == truth
    return metric(server, blocks("hit"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server without a store: its answers are the truth."""
    with servers.servers(tmp_path_factory.mktemp("alone"), Spec("alone")) as (server,):
        yield server


@pytest.mark.parametrize("ranks", [1, 2])
def test_hits_after_a_restart_of_the_engine(tmp_path: Path, alone: HttpServer, ranks: int) -> None:
    """The next start of an engine, and one that is split otherwise, which shares no heads with it."""
    prompt = prompt_of(20 * PAGE + 3, seed=ranks)
    truth = tokens_of(alone, prompt, TOKENS)
    with Served("--memory", "64MiB") as served:
        for start in range(2):
            with servers.servers(tmp_path, spec(f"start{start}", served.address, "--tp", str(ranks))) as (
                one,
            ):
                before = metric(one, COMPUTED)
                assert tokens_of(one, prompt, TOKENS) == truth
                computed = metric(one, COMPUTED) - before
                hit = metric(one, blocks("hit"))
                assert (hit, computed) == ((20, 3) if start else (0, len(prompt)))
                wait_put(one, 20 * ranks if not start else 0)
                servers.wait_used(one, 0.0)
        with servers.servers(tmp_path, spec("split", served.address, "--tp", str(3 - ranks))) as (other,):
            assert tokens_of(other, prompt, TOKENS) == truth
            assert metric(other, blocks("hit")) == 0, "blocks of other heads are other blocks"


def test_only_what_is_missing_is_asked_for(tmp_path: Path, alone: HttpServer) -> None:
    """The engine's own cache first, then the store: also for a prompt that goes on where the store ends."""
    first = prompt_of(10 * PAGE, seed=5)
    second = first + prompt_of(6 * PAGE, seed=6)
    third = second + prompt_of(3 * PAGE + 1, seed=7)
    with Served("--memory", "64MiB") as served:
        with servers.servers(tmp_path, spec("writer", served.address)) as (writer,):
            assert tokens_of(writer, second, TOKENS) == tokens_of(alone, second, TOKENS)
            wait_put(writer, 16)
        with servers.servers(tmp_path, spec("reader", served.address, cached=True)) as (reader,):
            assert tokens_of(reader, first, TOKENS) == tokens_of(alone, first, TOKENS)
            # At least the last token is computed.
            assert metric(reader, blocks("asked")) == metric(reader, blocks("hit")) == 9
            assert tokens_of(reader, third, TOKENS) == tokens_of(alone, third, TOKENS)
            assert metric(reader, blocks("asked")) == 9 + 19 - 10
            assert metric(reader, blocks("hit")) == 9 + 16 - 10
            # An answer's whole blocks are put as well, when it has ended.
            wait_put(reader, 19)
            servers.wait_used(reader, 0.0)


def test_another_salt_is_a_miss(tmp_path: Path, alone: HttpServer) -> None:
    prompt = prompt_of(8 * PAGE + 1, seed=8)
    with Served() as served, servers.servers(tmp_path, spec("one", served.address)) as (one,):
        tokens_of(one, prompt, TOKENS)
        wait_put(one, 8)
        truth = tokens_of(alone, prompt, TOKENS, cache_salt="other")
        assert tokens_of(one, prompt, TOKENS, cache_salt="other") == truth
        assert metric(one, blocks("hit")) == 0
        assert tokens_of(one, prompt, TOKENS) == tokens_of(alone, prompt, TOKENS)
        assert metric(one, blocks("hit")) == 8


def test_a_store_within_each_rank(tmp_path: Path, alone: HttpServer) -> None:
    """A tier in host memory: what the pool has no room for is found there."""
    prompts = [prompt_of(30 * PAGE + 1, seed=20 + number) for number in range(3)]
    with servers.servers(tmp_path, spec("one", "embedded:64MiB", "--tp", "2")) as (one,):
        for turn in range(2):
            for prompt in prompts:
                assert tokens_of(one, prompt, TOKENS) == tokens_of(alone, prompt, TOKENS)
            wait_put(one, 2 * 3 * 30)
            assert metric(one, blocks("hit")) == turn * 3 * 30


def test_wrong_blocks_under_right_keys_give_other_answers(tmp_path: Path, alone: HttpServer) -> None:
    """The store gives what was put, and that is all it promises: who may put is trusted with the bytes."""
    prompt = prompt_of(4 * PAGE + 1, seed=9)
    truth = tokens_of(alone, prompt, TOKENS)
    with Served() as served, kvik.Engine() as engine:
        layout = TINY.of_rank(PAGE).layout(4)
        region = engine.allocate(layout.nbytes)
        np.frombuffer(memoryview(region), dtype=np.uint8)[:] = 0x5A
        store = kvik.Store.connect(engine, served.address, PLAN.namespace(TINY, PAGE, 1, 0), layout)
        keys = store.keys(prompt, digest.extra_keys(_request(prompt)))
        assert store.put(keys, region.pages(layout, range(4))).wait().stored == 4
        with servers.servers(tmp_path, spec("one", served.address)) as (one,):
            answer = tokens_of(one, prompt, TOKENS)
            assert metric(one, blocks("hit")) == 4
            assert answer != truth


def _request(prompt: Sequence[int]) -> Request:
    return Request("one", np.array(prompt, dtype=np.uint32), Sampling(TOKENS), TINY.name)


# A store that does not answer.


@dataclass
class Load:
    """Threads that ask a server without end, and compare what it answers."""

    server: HttpServer
    prompts: list[list[int]]
    truth: list[list[int]]
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(3)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(servers.LIMIT)
            assert not thread.is_alive()

    def _ask(self, number: int) -> None:
        at = number
        while not self._over.is_set():
            at = (at + 1) % len(self.prompts)
            watch = Watch()
            try:
                answer, wrong = tokens_of(self.server, self.prompts[at], TOKENS), ""
            except Exception as error:
                answer, wrong = [], repr(error)
            with self._lock:
                self.slowest = max(self.slowest, watch.seconds())
                self.answered += 1
                if answer != self.truth[at]:
                    self.wrong.append(wrong or f"{answer}, and not {self.truth[at]}")

    def goes_on(self, count: int) -> None:
        """Wait for so many more answers."""
        goal = self.answered + count
        assert wait_for(lambda: self.answered, lambda answered: answered >= goal) >= goal

    def hits(self) -> None:
        """Wait until a block is hit again."""
        before = metric(self.server, blocks("hit"))
        assert wait_for(lambda: metric(self.server, blocks("hit")), lambda hits: hits > before) > before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_store_that_is_lost_costs_one_deadline(
    tmp_path: Path, alone: HttpServer, how: str, ranks: int
) -> None:
    """Under load: every request is answered, and right; hits resume by themselves when it is back."""
    prompts = [prompt_of(12 * PAGE + 1, seed=40 + number) for number in range(6)]
    truth = [tokens_of(alone, prompt, TOKENS) for prompt in prompts]
    with (
        Served("--memory", "64MiB") as served,
        servers.servers(tmp_path, spec("one", served.address, "--tp", str(ranks), deadline=DEADLINE)) as (
            one,
        ),
        Load(one, prompts, truth) as load,
    ):
        load.hits()
        if how == "killed":
            served.kill()
            load.goes_on(30)
            served.again()
        else:
            with served.stopped():
                load.goes_on(30)
        load.hits()
    print(f"{how}: {load.answered} answers, the slowest after {load.slowest:.3f} s")
    assert not load.wrong, load.wrong[:3]
    assert load.slowest < DEADLINE + SLACK


def test_a_client_that_leaves_while_the_store_is_asked(tmp_path: Path, alone: HttpServer) -> None:
    """The pages stay until the load has ended, and then come back."""
    prompt = prompt_of(9 * PAGE + 1, seed=50)
    with (
        Served() as served,
        servers.servers(tmp_path, spec("one", served.address, deadline=DEADLINE)) as (one,),
    ):
        truth = tokens_of(alone, prompt, TOKENS)
        assert tokens_of(one, prompt, TOKENS) == truth
        wait_put(one, 9)
        with served.stopped():
            waits = "vllm:num_requests_waiting"
            servers.ask_and_leave(one, client.body(prompt, TOKENS), lambda: metric(one, waits) == 1)
            servers.wait_used(one, 0.0)
        assert metric(one, blocks("hit")) == 0
        # At once, unless it stood still for so long that it was taken for dead.
        assert wait_for(lambda: hits_of(one, prompt, truth), bool) == 9


def test_a_store_that_is_dead_at_the_start(tmp_path: Path, alone: HttpServer) -> None:
    prompt = prompt_of(9 * PAGE + 1, seed=60)
    truth = tokens_of(alone, prompt, TOKENS)
    with Served() as served:
        served.kill()
        with servers.servers(tmp_path, spec("one", served.address, deadline=DEADLINE)) as (one,):
            watch = Watch()
            for _ in range(3):
                assert tokens_of(one, prompt, TOKENS) == truth
            assert watch.seconds() < DEADLINE + SLACK
            failed = 'kvik_emulator_store_failures_total{cause="store_unavailable",operation="load"}'
            assert metric(one, failed) == 3
            served.again()
            assert wait_for(lambda: hits_of(one, prompt, truth), bool) == 9


# Fetch or recompute.


def test_what_is_computed_faster_is_not_fetched(tmp_path: Path, alone: HttpServer) -> None:
    """By a compute model that is faster than any wire: unknown, then slower, tried again ever less often."""
    prompt = prompt_of(16 * PAGE + 1, seed=70)
    truth = tokens_of(alone, prompt, TOKENS)
    with Served("--memory", "64MiB") as served:
        with servers.servers(tmp_path, spec("writer", served.address)) as (writer,):
            tokens_of(writer, prompt, TOKENS)
            wait_put(writer, 16)
        for compute, reason in (("prefill_token=1e-12", "slower"), ("prefill_token=0.004", "faster")):
            reader = spec(reason, served.address, "--compute", compute)
            with servers.servers(tmp_path, reader) as (one,):
                for _ in range(18):
                    assert tokens_of(one, prompt, TOKENS) == truth
                refreshed = 3 if reason == "slower" else 0
                assert metric(one, choices("unknown")) == 1
                assert metric(one, choices(reason)) == 17 - refreshed
                assert metric(one, choices("refresh")) == refreshed
                fetched = 1 + refreshed if reason == "slower" else 18
                assert metric(one, blocks("hit")) == 16 * fetched
                expected = 17 * (256e-12 if reason == "slower" else 1.024)
                found = metric(one, "kvik_emulator_store_recompute_seconds_total")
                assert found == pytest.approx(expected)
                assert metric(one, "kvik_emulator_store_estimated_seconds_total") > 0


# Parts.


def test_what_the_option_takes() -> None:
    assert parse_store("store.example:7500") == StoreOption("store.example:7500", 0, 1.0)
    assert parse_store("[::1]:7500,deadline=0.25") == StoreOption("[::1]:7500", 0, 0.25)
    assert parse_store("embedded:2GiB") == StoreOption("", 2 << 30, 1.0)
    for text in (
        "",
        "7500",
        ":7500",
        "embedded:",
        "embedded:1KiB",
        "a:1,deadline=",
        "a:1,deadline=nan",
        "a:1,b=2",
    ):
        with pytest.raises(kvik.InvalidArgument):
            parse_store(text)


def _side(pool: PagePool, ranks: int, recompute: Callable[[int, int], float | None]) -> StoreSide:
    from prometheus_client import CollectorRegistry

    names = [PLAN.namespace(TINY, PAGE, ranks, rank) for rank in range(ranks)]
    metrics = StoreFamilies(CollectorRegistry(), ("model",)).replica(("tiny",))
    return StoreSide(names, PAGE, pool, recompute, metrics)


def test_ranks_agree_on_the_fewest_blocks() -> None:
    pool = PagePool(8)
    side = _side(pool, 2, lambda _first, _last: None)
    request = _request(prompt_of(4 * PAGE, seed=80))
    request.pages = pool.take(5)
    assert side.fetch(request)
    assert not side.fetch(request), "once a request"
    (order,) = side.take_orders()
    assert (order.kind, order.pages.tolist()) == ("fetch", [0, 1, 2])
    assert [keys.size for keys in order.keys] == [96, 96]
    assert order.keys[0].tobytes() != order.keys[1].tobytes(), "other heads, other names"
    told = {"request_id": "one", "seconds": 0.1, "reason": "faster", "cause": "", "estimated": None}
    assert side.fetched({**told, "blocks": 3}) is None
    assert side.fetched({**told, "blocks": 2}) == (request, 2)


def test_pages_of_a_put_are_held_until_all_ranks_have_ended() -> None:
    """And no more than half of the pool is held."""
    pool = PagePool(12)
    side = _side(pool, 2, lambda _first, _last: None)
    first, second = (_request(prompt_of(4 * PAGE, seed=81 + number)) for number in range(2))
    for request in (first, second):
        request.pages, request.present = pool.take(4), 4 * PAGE
        side.put(request)
        pool.free_blocks(request.pages)
    (order,) = side.take_orders()
    assert (order.kind, order.pages.tolist()) == ("put", [0, 1, 2, 3])
    told = {"number": order.fields["number"], "stored": 4, "known": 0, "refused": 0, "cause": ""}
    side.ended(told)
    assert pool.free == 8
    side.ended(told)
    assert pool.free == 12
    side.put(first)
    assert side.take_orders() == [], "nothing is put twice"
