"""A store under real vLLM: where a long prompt's KV comes from, and what a store costs that has nothing.

    python bench/vllm_store.py stages [--rounds 4] [--prompts 3] [--blocks 9] [--rate 1gbit] [--ranks 1]
    python bench/vllm_store.py cold [--starts 5] [--pairs 2] [--requests 16] [--hidden 2048]
    both: [--json FILE]

Real vLLM servers on CPU, with the environment of the tests.

`stages`: the store is at the other end of a shaped link (two network namespaces, `tc`), and keeps a log. A
round asks the same long prompts through restarts of the engine and of the store; its prompts are its own.
Each stage says where KV has to come from, and fails when the engine's own counters of computed prompt
tokens, or of blocks that were loaded, say something else, or when an answer's tokens are not those of the
prompt's first answer. A stage begins when engine and store have come to rest, so that all puts of the one
before are over. A sample is a source's requests a second in a round, asked one after the other, where that is
fast several times. Intervals are Student's t, 95 %.

`cold`: four fresh servers that are up together. `none` has no connector; `again` has none either, and shows
what two equal arms differ by; `bare` has one that does nothing, and shows what vLLM takes for having one
(`vllm_bare.py`); `store` has kvik's, which keeps everything and finds nothing. They answer the same prompts
in turns of random order, each when all have come to rest: all prompts are new, four at a time, with answers
of 64 to 192 tokens, so that the four do not begin and end together. Throughput is tokens a second, prompt and
answer; a step is the time between two tokens of an answer, as the client sees it; CPU seconds are those of
all processes of the arm, its store included. What a step costs a store is about the same with any model, so
`--hidden` decides what share of it that is: with 2048 a step of an answer takes 17 ms where kvik is
developed, with 768 4.5. (An 8B model's 16 GB of weights take a GPU 27 ms at the 600 GB/s of an A10G, and 4.8
ms at the 3.35 TB/s of an H100.) Intervals are over starts, of which each counts by the mean of its pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from stage_table import Stages, interval
from tests.python.store_rig import Served
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import prompt_of
from vllm_engine import LIMIT, Engine, cpu_of, engine_spec, rest
from without_autogroups import without_autogroups

from kvik.bench import facts
from kvik.demo import client
from kvik.demo.checkpoint import SPEC, ensure_checkpoint
from kvik.demo.engines import BLOCK_TOKENS, Connector
from kvik.roles.hosts import Host, Rate, two_hosts
from kvik.roles.processes import Fleet, Process, descendants

LAYERS = 64  # of the checkpoint: 64 KiB of KV a token
REPEATS = 8
"""Times that all prompts are asked of the engine's own cache, in each of two stages, and half as often as of
the host's in one: a request takes a tenth of a second there, and waits for a core as long now and then."""
MOST_BLOCKS = 31  # of a prompt: the model takes 4,096 tokens
TOKENS = 4
DEADLINE = 5.0
READY = "kvik store serves on "
OWN_CORES = ("chrt", "--rr", "1") if os.geteuid() == 0 else ()
"""The store stands for one on a host of its own, and shares the cores with vLLM's processes, which yield in
loops while they wait for each other: beside two ranks its threads waited runnable for up to 7 s (`schedstat`,
Linux 6.18), so that puts and gets ran into their deadlines."""
ARMS = ("none", "again", "bare", "store")
RATIOS = (("store", "none"), ("again", "none"), ("bare", "none"), ("store", "bare"))
COLD_FIGURES = ("tokens_per_second", "step_p99_s", "cpu_s")
COLD_PROMPT, COLD_TOKENS, COLD_AT_ONCE = 300, (64, 192), 4


class Store:
    """`kvik store serve` with a log, on its own host; killed and started again."""

    def __init__(self, fleet: Fleet, host: Host, memory: int, folder: Path, env: dict[str, str]) -> None:
        self._fleet, self._host, self._folder, self._env, self._starts = fleet, host, folder, env, 0
        self._options = ["--memory", str(memory), "--log", str(folder / "blocks"), "--log-size", "16GiB"]
        self.address = f"{host.v4}:7500"
        self.start()

    def start(self) -> None:
        """Start it, with what its log has."""
        self._starts += 1
        log = self._folder / f"store{self._starts}.log"
        command = [*OWN_CORES, sys.executable, "-m", "kvik.cli", "store", "serve", "--listen", self.address]
        with self._host.inside():
            process = Process("store", [*command, *self._options], log, self._env, 10.0)
        self.process = self._fleet.add(process)
        process.wait_until(lambda: READY in log.read_text(errors="replace"), time.monotonic() + LIMIT)

    def restart(self, *, empty: bool = False) -> None:
        """End it and start it; `empty`: without what it had in its log."""
        self._fleet.stop(self.process)
        if empty:
            for segment in (self._folder / "blocks").iterdir():
                segment.unlink()
        self.start()


# Stages.


@dataclass
class Round:
    """One round: its prompts, and the truth once they were answered."""

    prompts: list[list[int]]
    blocks: int  # of each prompt, which has one token more
    ranks: int  # each counts its own blocks
    truth: dict[int, list[int]] = field(default_factory=dict)

    def ask(self, stage: str, engine: Engine, source: str) -> float:
        """All prompts once, one after the other: requests a second. SystemExit for what must not be."""
        seconds = 0.0
        for number, prompt in enumerate(self.prompts):
            before = engine.counts()
            began = time.monotonic()
            answer = client.complete(engine.server.url, prompt, TOKENS, timeout=LIMIT)
            seconds += time.monotonic() - began
            grown = engine.counts().since(before)
            expected = self._counts(source)
            if grown != expected:
                raise SystemExit(
                    f"stage {stage}: {tuple(grown)} computed tokens, host and remote blocks; {source} has "
                    f"{expected}\n{engine.server.tail()}"
                )
            if self.truth.setdefault(number, answer.tokens) != answer.tokens or len(answer.tokens) != TOKENS:
                raise SystemExit(f"stage {stage}: {answer.tokens}, and {self.truth[number]} at first")
        return len(self.prompts) / seconds

    def _counts(self, source: str) -> tuple[int, int, int]:
        """What a prompt has to count: tokens computed, blocks loaded from the host, from the server."""
        loaded = self.ranks * self.blocks
        return {
            "recompute": (self.blocks * BLOCK_TOKENS + 1, 0, 0),
            "remote store": (1, 0, loaded),
            "host store": (1, loaded, 0),
            "engine cache": (1, 0, 0),
        }[source]


def kv_bytes(blocks: int) -> int:
    """KV of so many blocks: layers, K and V, KV heads, head dimension, bytes of a float32."""
    head = int(SPEC["num_key_value_heads"]) * int(SPEC["head_dim"])
    return LAYERS * 2 * head * 4 * blocks * BLOCK_TOKENS


def stages_of(engine: Engine, store: Store, this: Round) -> Iterator[tuple[str, str, float]]:
    """One round: of each stage its text, its source, and requests a second."""

    def stage(text: str, source: str, times: int = 1) -> tuple[str, str, float]:
        rest([engine], store.process.pid)
        seconds = []
        for _ in range(times):
            if source == "host store":
                engine.forget()
            seconds.append(1 / this.ask(text, engine, source))
        return text, source, 1 / statistics.fmean(seconds)

    store.restart(empty=True)
    engine.restart()
    yield stage("1 both started, empty", "recompute")
    yield stage("2 the same again", "engine cache", REPEATS)
    yield stage("3 prefix cache emptied", "host store", 2 * REPEATS)
    engine.restart()
    yield stage("4 engine restarted", "remote store")
    yield stage("5 the same again", "engine cache", REPEATS)
    store.restart()
    engine.restart()
    yield stage("6 both restarted, the store with its log", "remote store")
    store.restart(empty=True)
    engine.restart()
    yield stage("7 both restarted, the store empty", "recompute")


def stages(given: argparse.Namespace, stack: ExitStack, folder: Path) -> dict[str, object]:
    """All rounds, and their table."""
    model = ensure_checkpoint(LAYERS)
    left, right = stack.enter_context(two_hosts())
    for host in (left, right):
        host.shape(given.rate)
    # Servers that can be told to forget their prefix cache; vLLM reads it when it is imported.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    parent = stack.enter_context(ForkParent(folder))
    stack.enter_context(right.inside())
    fleet = stack.enter_context(Fleet())
    room, tokens = 4 * given.prompts * kv_bytes(given.blocks), given.blocks * BLOCK_TOKENS + 1
    secret = {"KVIK_SECRET": secrets.token_hex(16)}
    store = Store(fleet, left, room, folder, secret)
    # What is measured is the store, also where computing would be faster.
    config = {"address": store.address, "host_cache": room, "deadline": DEADLINE, "prefill_rate": "off"}
    extra = {"store": config, "listen": f"{right.v4}:0"}
    plain = engine_spec(config, given.ranks)
    spec = replace(plain, connector=Connector("kv_both", extra=extra), env=secret)
    engine = Engine(parent, model, spec, fleet, folder)
    print(
        f"{LAYERS} layers, {tokens} tokens, {kv_bytes(given.blocks) >> 20} MiB of KV a prompt, "
        f"{given.prompts} prompts a stage, {given.rounds} rounds, link of {given.rate}, {given.ranks} rank(s)"
    )
    found = Stages("requests/s", 2, rising=True)
    for number in range(given.rounds):
        first = number * given.prompts
        prompts = [prompt_of(tokens, seed) for seed in range(first, first + given.prompts)]
        this = Round(prompts, given.blocks, given.ranks)
        for text, source, rate in stages_of(engine, store, this):
            found.add(text, source, rate)
            print(f"round {number + 1}: {text}: {source}, {rate:.2f} requests/s", flush=True)
    print(f"\n{found.by_stage()}\n\n{found.by_source()}")
    return {"requests_per_second": found.figures, "sources": found.sources}


# Cold.


@dataclass
class Arm:
    """A server, and the process of its store if it has one."""

    engine: Engine
    others: Sequence[int]

    def turn(
        self, prompts: Sequence[list[int]], together: Sequence[Engine]
    ) -> tuple[dict[str, float], list[list[int]]]:
        """All prompts, some at once, when all servers that are up `together` have come to rest: figures and
        tokens. SystemExit for a block that was found."""
        before = self.engine.counts()
        rest(together)
        figures, answers = self._answers(prompts)
        grown = self.engine.counts().since(before)
        if grown != (sum(map(len, prompts)), 0, 0):
            raise SystemExit(
                f"{tuple(grown)} computed tokens, host and remote blocks\n{self.engine.server.tail()}"
            )
        return figures, answers

    def _answers(self, prompts: Sequence[list[int]]) -> tuple[dict[str, float], list[list[int]]]:
        steps: list[float] = []

        def ask(prompt: list[int]) -> list[int]:
            tokens = random.Random(repr(prompt)).randint(*COLD_TOKENS)  # noqa: S311 - as long in each arm
            answer = client.complete(self.engine.server.url, prompt, tokens, timeout=LIMIT)
            steps.extend(after - before for before, after in pairwise(answer.arrivals))
            return answer.tokens

        pids = [*descendants(self.engine.server.pid), *self.others]
        cpu, began = sum(map(cpu_of, pids)), time.monotonic()
        with ThreadPoolExecutor(COLD_AT_ONCE) as pool:
            answers = list(pool.map(ask, prompts))
        seconds, cpu = time.monotonic() - began, sum(map(cpu_of, pids)) - cpu
        moved = sum(map(len, prompts)) + sum(map(len, answers))
        last = sorted(steps)[len(steps) * 99 // 100]
        return dict(zip(COLD_FIGURES, (moved / seconds, last, cpu), strict=True)), answers


def cold(given: argparse.Namespace, stack: ExitStack, folder: Path) -> dict[str, object]:
    """All starts, and the ratios of the arms."""
    model = ensure_checkpoint(hidden=given.hidden)
    parent = stack.enter_context(ForkParent(folder))
    fleet = stack.enter_context(Fleet())
    starts = [cold_start(given, parent, model, fleet, folder, number) for number in range(given.starts)]
    return {"starts": starts, "ratios": cold_table(starts)}


def cold_start(
    given: argparse.Namespace, parent: ForkParent, model: Path, fleet: Fleet, folder: Path, number: int
) -> list[dict[str, dict[str, float]]]:
    """A fresh server of each arm and a store, and what each round of turns gave."""
    rng, cells = random.Random(f"{given.seed}/{number}"), []  # noqa: S311 - an order
    with ExitStack() as stack:
        served = stack.enter_context(Served("--memory", "1GiB"))
        config = {"address": served.address, "host_cache": "256MiB"}
        connectors = {
            "bare": Connector("kv_both", module="vllm_bare", cls="BareConnector"),
            "store": Connector("kv_both", extra={"store": config}),
        }
        arms: dict[str, Arm] = {}
        for arm in rng.sample(ARMS, len(ARMS)):
            env = {"PYTHONPATH": str(Path(__file__).parent)}
            spec = engine_spec(None, name=arm, connector=connectors.get(arm), env=env)
            arms[arm] = Arm(Engine(parent, model, spec, fleet, folder), [])
            arms[arm].engine.begin()
            stack.callback(arms[arm].engine.stop)
        arms["store"].others = [served.process.pid]
        together = [arm.engine for arm in arms.values()]
        for arm in arms.values():
            arm.engine.wait_ready()
        for arm in arms.values():
            arm.turn([prompt_of(COLD_PROMPT, -1 - warm) for warm in range(COLD_AT_ONCE)], together)
        arms["store"].engine.wait_keeping()
        for pair in range(given.pairs):
            first = (number * given.pairs + pair) * given.requests
            prompts = [prompt_of(COLD_PROMPT, seed) for seed in range(first, first + given.requests)]
            kept = arms["store"].engine.saved()
            found = {arm: arms[arm].turn(prompts, together) for arm in rng.sample(ARMS, len(ARMS))}
            if any(found[arm][1] != found["none"][1] for arm in ARMS):
                raise SystemExit(f"start {number + 1}, pair {pair + 1}: the arms' tokens differ")
            kept, wanted = arms["store"].engine.saved() - kept, len(prompts) * (COLD_PROMPT // BLOCK_TOKENS)
            if kept < wanted:
                raise SystemExit(f"start {number + 1}: {kept:.0f} blocks were saved, not {wanted}")
            cells.append({arm: figures for arm, (figures, _) in found.items()})
        print(f"start {number + 1}: {_ratios([cells])}", flush=True)
    return cells


def _ratios(starts: Sequence[Sequence[dict[str, dict[str, float]]]]) -> dict[str, list[float]]:
    """Of each figure the ratios of arms, a geometric mean of each start's pairs."""
    return {
        f"{arm}/{to} {what}": [
            math.exp(statistics.fmean(math.log(cell[arm][what] / cell[to][what]) for cell in cells))
            for cells in starts
        ]
        for what in COLD_FIGURES
        for arm, to in RATIOS
    }


def cold_table(starts: Sequence[Sequence[dict[str, dict[str, float]]]]) -> dict[str, tuple[float, ...]]:
    """The ratios over all starts: geometric means with intervals."""
    rows = {}
    print("\n| | geometric mean | 95 % interval | starts |\n|---|---|---|---|")
    for name, ratios in _ratios(starts).items():
        mean, low, high = rows[name] = tuple(map(math.exp, interval([*map(math.log, ratios)])))
        print(f"| {name} | {mean:.3f} | {low:.3f} to {high:.3f} | {len(starts)} |")
    return rows


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_subparsers(dest="which", required=True)
    one = which.add_parser("stages", help="where a long prompt's KV comes from")
    one.add_argument("--rounds", type=int, default=4)
    one.add_argument("--prompts", type=int, default=3)
    one.add_argument("--blocks", type=int, default=9, help=f"of a prompt, 8 MiB each; at most {MOST_BLOCKS}")
    one.add_argument("--rate", type=Rate.parse, default=Rate.parse("1gbit"))
    one.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    one.set_defaults(work=stages)
    other = which.add_parser("cold", help="what a store costs that has nothing")
    other.add_argument("--starts", type=int, default=5)
    other.add_argument("--pairs", type=int, default=2, help="of turns, in each start")
    other.add_argument("--requests", type=int, default=16, help="in a turn")
    other.add_argument("--hidden", type=int, default=2048, help="hidden size of the model")
    other.add_argument("--seed", type=int, default=1)
    other.set_defaults(work=cold)
    for command in (one, other):
        command.add_argument("--json", type=Path)
    given = parser.parse_args()
    if (given.rounds if given.which == "stages" else given.starts) < 2:
        parser.error("an interval takes two samples at least")
    if given.which == "stages" and not 1 <= given.blocks <= MOST_BLOCKS:
        parser.error(f"--blocks: a prompt has 1 to {MOST_BLOCKS}")
    with ExitStack() as stack:
        stack.enter_context(without_autogroups())
        machine = facts.collect()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-store-")))
        found = given.work(given, stack, folder)
    if given.json:
        given.json.write_text(json.dumps({"facts": machine, **found}, indent=1))


if __name__ == "__main__":
    main()
