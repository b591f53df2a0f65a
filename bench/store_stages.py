"""The time to the first token of a long prompt by where its KV is from, through restarts of engine and store.

    python bench/store_stages.py [--rounds 5] [--prompts 3] [--rate 2.5gbit] [--json FILE]

Twelve stages a round, each with prompts of its round alone, asked of an emulated engine. The store is at the
other end of a shaped link (two network namespaces, `tc`), so it takes root and iproute2. Each stage says
where KV has to come from, and fails when the engine's counters say something else, or when one token of an
answer is not that of the same prompt's first answer. A sample is a source's mean in a round: what is
restarted between stages is restarted in each round. Intervals are Student's t, 95 %.

Afterwards the store is killed and stopped under load: how many answers, the slowest, and when hits resume.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stage_table import Stages

from kvik.demo import client
from kvik.roles.hosts import Host, Rate, two_hosts
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer, Process
from kvik.shapes import ModelShape

SHAPE = "llama-3.1-8b"
PAGE_TOKENS, PROMPT_TOKENS, TOKENS = 16, 544, 4  # 68 MiB of KV
# A large model on a small GPU: 250 prompt tokens a second, 5 ms for each step besides.
COMPUTE = "fixed=0.005,prefill_token=0.004"
DEADLINE = 3.0
LIMIT = 120.0
READY = "kvik store serves on "
BLOCKS = 'kvik_emulator_store_blocks_total{{result="{}"}}'
CACHED = 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'


@dataclass(frozen=True)
class Setting:
    """What all processes are started with. `address` is the store's."""

    engine_host: Host
    store_host: Host
    address: str
    env: dict[str, str]
    logs: Path
    prompts: int

    @property
    def kv_bytes(self) -> int:
        """Of one prompt."""
        return ModelShape.resolve(SHAPE).page_bytes(PAGE_TOKENS, 1) * (PROMPT_TOKENS // PAGE_TOKENS)


class Store:
    """`kvik store serve` on its own host; killed, stopped and started again."""

    def __init__(self, setting: Setting, fleet: Fleet) -> None:
        self._setting, self._fleet, self._starts = setting, fleet, 0
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        self._starts += 1
        log = self._setting.logs / f"store{self._starts}.log"
        memory = 2 * self._setting.prompts * self._setting.kv_bytes
        command = [sys.executable, "-m", "kvik.cli", "store", "serve", "--listen", self._setting.address]
        with self._setting.store_host.inside():
            process = Process("store", [*command, "--memory", str(memory)], log, self._setting.env, 1.0)
        self.process = self._fleet.add(process)
        process.wait_until(lambda: READY in log.read_text(errors="replace"), time.monotonic() + LIMIT)

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.signal(signal.SIGKILL)
        self._fleet.stop(self.process)

    def restart(self) -> None:
        """End it and start it: what it had is gone, since it has no log."""
        self._fleet.stop(self.process)
        self.start()


class Engine:
    """An emulated engine with a store, which can be started again."""

    def __init__(self, setting: Setting, fleet: Fleet, name: str, store: str, *options: str) -> None:
        self._setting, self._fleet, self._name, self._starts = setting, fleet, name, 0
        memory = (2 * setting.prompts + 1) * setting.kv_bytes
        self._command = [sys.executable, "-m", "kvik.cli", "emulator", "serve", "--model-shape", SHAPE]
        self._command += ["--kv-memory", str(memory), "--page-tokens", str(PAGE_TOKENS), "--reread", "16"]
        self._command += ["--compute", COMPUTE, "--store", f"{store},deadline={DEADLINE}", *options]
        self.server = self._start()
        self.warm_up()

    def _start(self) -> HttpServer:
        self._starts += 1
        (port,) = free_ports(1)
        log = self._setting.logs / f"{self._name}{self._starts}.log"
        command = [*self._command, "--port", str(port)]
        server = self._fleet.add(HttpServer(self._name, command, port, log, self._setting.env, grace=1.0))
        server.wait_ready(time.monotonic() + LIMIT)
        return server

    def restart(self) -> None:
        """End it and start it, with nothing in its memory."""
        self._fleet.stop(self.server)
        self.server = self._start()
        self.warm_up()

    def warm_up(self) -> None:
        """A prompt too short to have a block: first connections and imports are not of interest."""
        client.complete(self.server.url, [7] * (PAGE_TOKENS - 1), 1, model=SHAPE)

    def ask(self, prompt: Sequence[int]) -> client.Completion:
        """One prompt."""
        return client.complete(self.server.url, prompt, TOKENS, timeout=LIMIT, model=SHAPE)

    def counted(self, name: str) -> float:
        """One metric."""
        return client.metrics(self.server.url)[name]

    def of_store(self) -> dict[str, float]:
        """What it has counted of the store."""
        counted = client.metrics(self.server.url).items()
        kept = ("blocks_total", "choices_total", "failures_total", "seconds_total", "seconds_sum")
        return {
            name.removeprefix("kvik_emulator_store_"): value
            for name, value in counted
            if value and name.startswith("kvik_emulator_store_") and name.partition("{")[0].endswith(kept)
        }

    def wait_store(self) -> None:
        """Wait until it has met a store that was started anew: until the store takes a block."""

        def taken() -> float:
            return self.counted(BLOCKS.format("put")) + self.counted(BLOCKS.format("known"))

        def probed() -> bool:
            client.complete(self.server.url, [7] * (PAGE_TOKENS + 1), 1, model=SHAPE)
            return taken() > before

        before = taken()
        wait_for(probed, "the store was not met again")

    def wait_put(self) -> None:
        """Wait until no page waits for a put."""
        wait_for(lambda: self.counted("vllm:kv_cache_usage_perc") == 0, "pages still wait for puts")


def wait_for(good: Callable[[], bool], otherwise: str) -> None:
    """Look again and again; SystemExit with a text when the time is up."""
    until = time.monotonic() + LIMIT
    while not good():
        if time.monotonic() > until:
            raise SystemExit(otherwise)
        time.sleep(0.005)  # a counter has no event to wait for


@dataclass
class Round:
    """One round: its prompts, and the truth once they were answered."""

    prompts: list[list[int]]
    truth: dict[int, list[int]] = field(default_factory=dict)

    def ask(self, stage: str, engine: Engine, source: str) -> tuple[float, float]:
        """All prompts once: mean and longest time to the first token. SystemExit for what must not be."""
        times = []
        for number, prompt in enumerate(self.prompts):
            hit, cached = engine.counted(BLOCKS.format("hit")), engine.counted(CACHED)
            answer = engine.ask(prompt)
            hit, cached = engine.counted(BLOCKS.format("hit")) - hit, engine.counted(CACHED) - cached
            # At least the last token is computed: the block that ends with it is not asked for.
            whole = (PROMPT_TOKENS - 1) // PAGE_TOKENS
            found = (
                "engine cache" if cached == whole * PAGE_TOKENS else "store" if hit == whole else "recompute"
            )
            if found != source.split()[-1] and found != source:
                raise SystemExit(
                    f"stage {stage}: KV came from {found}, not {source}: {cached:.0f} tokens cached, "
                    f"{hit:.0f} of {whole} blocks of the store; {engine.of_store()}\n{engine.server.tail()}"
                )
            if self.truth.setdefault(number, answer.tokens) != answer.tokens or len(answer.tokens) != TOKENS:
                raise SystemExit(f"stage {stage}: {answer.tokens}, and {self.truth[number]} at first")
            times.append(answer.ttft)
        engine.wait_put()
        return statistics.fmean(times), max(times)


def stages(
    setting: Setting, fleet: Fleet, store: Store, number: int
) -> Iterator[tuple[str, str, float, float]]:
    """One round: of each stage its text, its source, and the mean and longest time to the first token."""
    rng = random.Random(7_000 + number)  # noqa: S311 - prompts, not secrets
    this = Round(
        [[rng.randrange(300, 100_000) for _ in range(PROMPT_TOKENS)] for _ in range(setting.prompts)]
    )
    store.restart()
    engine = Engine(setting, fleet, f"engine-{number}-", setting.address)
    host = Engine(
        setting,
        fleet,
        f"host-{number}-",
        f"embedded:{2 * setting.prompts * setting.kv_bytes}",
        "--no-prefix-cache",
    )

    def stage(text: str, source: str, at: Engine = engine) -> tuple[str, str, float, float]:
        return (text, source, *this.ask(text, at, source))

    yield stage("1 first engine, empty store", "recompute")
    yield stage("2 the same again", "engine cache")
    engine.restart()
    yield stage("3 engine restarted", "remote store")
    yield stage("4 the same again", "engine cache")
    store.restart()
    engine.wait_store()
    yield stage("5 store restarted, empty", "engine cache")
    engine.restart()
    yield stage("6 engine restarted, store filled again by stage 5", "remote store")
    store.restart()
    engine.restart()
    yield stage("7 both restarted", "recompute")
    engine.restart()
    store.signal(signal.SIGSTOP)
    yield stage("8 engine restarted, store stopped (SIGSTOP)", "recompute")
    store.signal(signal.SIGCONT)
    engine.restart()
    yield stage("9 store goes on, engine restarted", "remote store")
    engine.restart()
    store.kill()
    yield stage("10 engine restarted, store killed (SIGKILL)", "recompute")
    store.start()
    yield stage("11 engine with a store in host memory, empty", "recompute", host)
    yield stage("12 the same again, without a prefix cache", "host store", host)
    fleet.stop(engine.server, host.server)


# Under load.


@dataclass
class Load:
    """Clients that ask without end; every answer is compared."""

    engine: Engine
    prompts: list[list[int]]
    truth: list[list[int]] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    wrong: int = 0
    failed: list[Exception] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """One client."""
        at = number
        try:
            while not self.over.is_set():
                at = (at + 1) % len(self.prompts)
                began = time.monotonic()
                answer = self.engine.ask(self.prompts[at])
                self.times.append((began, time.monotonic() - began))
                self.wrong += answer.tokens != self.truth[at]
        except Exception as error:  # a client less would be a load less, and nobody would know
            self.failed.append(error)


@contextmanager
def loaded(engine: Engine, prompts: list[list[int]]) -> Iterator[Load]:
    """Three clients within the block. SystemExit where one of them was not answered."""
    load = Load(engine, prompts, [engine.ask(prompt).tokens for prompt in prompts])
    engine.wait_put()
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join(LIMIT)
    if load.failed:
        raise SystemExit(f"under load: {load.failed[0]!r}\n{engine.server.tail()}")


def under_load(setting: Setting, fleet: Fleet, store: Store, how: str) -> dict[str, float | str]:
    """Kill or stop the store for some seconds under load, and let it come back."""
    rng = random.Random(9_000)  # noqa: S311 - prompts, not secrets
    prompts = [
        [rng.randrange(300, 100_000) for _ in range(PROMPT_TOKENS // 4)] for _ in range(setting.prompts)
    ]
    engine = Engine(setting, fleet, f"load-{how}-", setting.address, "--no-prefix-cache")
    away = 4.0
    with loaded(engine, prompts) as load:
        time.sleep(away)
        lost = time.monotonic()
        store.kill() if how == "killed" else store.signal(signal.SIGSTOP)
        time.sleep(away)
        store.start() if how == "killed" else store.signal(signal.SIGCONT)
        back = time.monotonic()
        hit = engine.counted(BLOCKS.format("hit"))
        wait_for(lambda: engine.counted(BLOCKS.format("hit")) > hit, "hits do not resume")
        resumed = time.monotonic() - back
        time.sleep(away / 2)
    fleet.stop(engine.server)
    before = [took for began, took in load.times if began + took < lost]
    during = [took for began, took in load.times if lost <= began + took and began < back]
    return {
        "store": how,
        "answers": len(load.times),
        "wrong": load.wrong,
        "slowest before, s": max(before),
        "slowest while it was away, s": max(during),
        "hits resume after, s": resumed,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rate", type=Rate.parse, default=Rate.parse("2.5gbit"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: an interval takes two at least")
    means = Stages("TTFT, s", 3, rising=False)
    longest: dict[str, float] = {}
    with (
        two_hosts() as (left, right),
        tempfile.TemporaryDirectory() as logs,
        right.inside(),
        Fleet() as fleet,
    ):
        for host in (left, right):
            host.shape(given.rate)
        env = {"KVIK_SECRET": secrets.token_hex(16), "KVIK_CONFIG": os.devnull}
        setting = Setting(right, left, f"{left.v4}:7500", env, Path(logs), given.prompts)
        print(
            f"{SHAPE}, {PROMPT_TOKENS} tokens, {setting.kv_bytes >> 20} MiB a prompt, {given.prompts} "
            f"prompts a stage, {given.rounds} rounds, link of {given.rate}, deadline {DEADLINE} s, "
            f"compute {COMPUTE}"
        )
        store = Store(setting, fleet)
        for number in range(given.rounds):
            for text, source, mean, most in stages(setting, fleet, store, number):
                means.add(text, source, mean)
                longest[text] = max(longest.get(text, 0.0), most)
                print(f"round {number + 1}: {text}: {source}, {mean:.3f} s", flush=True)
        # A store that is stopped or killed costs its deadline besides: those stages stand for themselves.
        by_stage, by_source = means.by_stage(**{"longest, s": longest}), means.by_source(without="(SIG")
        print(f"\n{by_stage}\n\n{by_source}")
        lost = [under_load(setting, fleet, store, how) for how in ("killed", "stopped")]
        for row in lost:
            print(row)
    if given.json:
        whole = {"stages": means.figures, "sources": means.sources, "longest": longest, "load": lost}
        given.json.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
