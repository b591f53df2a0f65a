"""A store under real vLLM: by the hit rate in two passes, and what it costs where it has nothing.

    python bench/vllm_store_sweep.py hits [--rounds 10] [--prompts 4] [--shares 0,0.5,1] [--at-once 1]
    python bench/vllm_store_sweep.py overhead [--starts 1] [--pairs 8] [--steps 1024,128,32] [--caches on,off]
    both: [--quick] [--seed N] [--minutes 30] [--out FILE] [--go-on] [--table]

Real vLLM servers on CPU, with the environment of the tests; the store is a server on the same host.

`hits`: for each share of a prompt's KV blocks that the store has, requests a second and the time to the
first token (TTFT). In each round, whose prompts are its own, one engine without a store answers all
prompts; one with the store computes the first blocks of each, as many as the share says; a third one, which
has nothing in its own cache, answers the prompts (first pass) and then the same again (second pass, from
its own prefix cache). Shares have their turns in random order. `none` is before or after the others at
random. A share is invalid where the engine's counters of computed prompt tokens and loaded blocks are not
those of the stated share, or where an answer's tokens are not those without a store. Intervals are
Student's t over rounds, 95 %.

`overhead`: prompts that nobody has. Two servers are up at a time, one with a store and one without a
connector. Both answer the same batch of four prompts at once (one token each), a pair of turns in random
order, each after both have come to rest. Shown is the time with the store to the time without, as a
geometric mean with its interval over the starts, each by the mean of its pairs; of one start, over its
pairs, which says nothing of another start. By two settings of the engine:

- *tokens a step*: `--max-num-batched-tokens`, by default the eight sizes of `kvik store bench misses`;
- *cache*: whether the engine's own prefix cache is on.

The connector has no option for saves that are waited for, so both figures come from the same turn. *Saves
asynchronous* ends with the last answer: the next batch would begin while blocks are still being put. *Saves
synchronous* ends when the store has all blocks of the batch, by its own counter: as if nothing else began
before. Asynchronous scheduling (a step is scheduled while the one before is computed), which is what "sync"
and "async" mean in the article that `kvik store bench misses` follows, is not measured: vLLM turns it off on
CPU.

A pair of servers is invalid where one has computed other than all prompt tokens or loaded a block, where a
block did not come into the store, or where tokens differ.

Every round (`hits`) or pair of servers (`overhead`) is written to `--out` when it has ended; `--go-on` does
what is missing there. Exit status 1: something is invalid. 2: the time is up, and parts are missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import kept
import vllm_sweep_figures as figures
from tests.python.store_rig import NAMESPACE, Served
from tests.vllm.forked import ForkParent
from vllm_engine import LIMIT, Engine, engine_spec, rest
from without_autogroups import without_autogroups

import kvik
from kvik.bench import facts
from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, ensure_checkpoint
from kvik.demo.engines import BLOCK_TOKENS, EngineSpec
from kvik.roles.processes import Fleet

LAYERS = 16  # of the checkpoint for `hits`: 16 KiB of KV a token
TOKENS = 4  # of an answer of `hits`
BATCH = 4  # prompts at once of `overhead`
WARM_UP = 2
DEADLINE = 10.0  # seconds that a load may take: one that is late would be computed
STORED = 30.0  # seconds within which blocks have to be in the store
MEMORY = "4GiB"
CACHES = {"on": True, "off": False}

Prompts = list[list[int]]


@dataclass(frozen=True)
class Place:
    """Where servers are started."""

    parent: ForkParent
    model: Path
    fleet: Fleet
    folder: Path

    @contextmanager
    def life(self, *specs: EngineSpec) -> Iterator[list[Engine]]:
        """Servers from their start to their end."""
        engines = [Engine(self.parent, self.model, spec, self.fleet, self.folder) for spec in specs]
        with ExitStack() as stack:
            for engine in engines:
                engine.begin()
                stack.callback(engine.stop)
            for engine in engines:
                engine.wait_ready()
            yield engines


def prompts_of(rng: random.Random, count: int, tokens: int) -> Prompts:
    """Prompts of random bytes."""
    return [
        [rng.randrange(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256) for _ in range(tokens)] for _ in range(count)
    ]


def ask_all(engine: Engine, prompts: Prompts, tokens: int, at_once: int) -> list[client.Completion]:
    """All of them, so many at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(
                lambda prompt: client.complete(engine.server.url, prompt, tokens, timeout=LIMIT), prompts
            )
        )


# Hits.


def one_pass(engine: Engine, which: str, share: float, prompts: Prompts, at_once: int) -> dict[str, Any]:
    """Prompts of one share: what came, and what the engine counted."""
    before = engine.counts()
    began = time.monotonic()
    answers = ask_all(engine, prompts, TOKENS, at_once)
    seconds = time.monotonic() - began
    return {
        "pass": which, "share": share, "seconds": seconds, "ttft_s": [answer.ttft for answer in answers],
        "tokens": [answer.tokens for answer in answers], **engine.counts().since(before)._asdict(),
    }  # fmt: skip


class HitsRound:
    """One round of all shares."""

    def __init__(self, place: Place, settings: argparse.Namespace, number: int) -> None:
        self._place, self._at_once = place, settings.at_once
        self._rng = random.Random(f"{settings.seed}/hits/{number}")  # noqa: S311 - a workload
        self._prompts = {
            share: prompts_of(self._rng, settings.prompts, figures.PROMPT) for share in settings.shares
        }
        self._warm_up = prompts_of(self._rng, WARM_UP, figures.PROMPT)
        self._points: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """All passes."""
        lives = [self._without, self._with]
        self._rng.shuffle(lives)
        for life in lives:
            life()
        return self._points

    def _shares(self) -> list[float]:
        return self._rng.sample(list(self._prompts), len(self._prompts))

    def _without(self) -> None:
        with self._place.life(engine_spec(None)) as (engine,):
            ask_all(engine, self._warm_up, TOKENS, self._at_once)
            self._passes(engine, "none")

    def _with(self) -> None:
        with Served("--memory", MEMORY) as store:
            spec = engine_spec({"address": store.address, "deadline": DEADLINE})
            with self._place.life(spec) as (engine,):
                engine.wait_keeping()
                self._put(engine)
            with self._place.life(spec) as (engine,):
                engine.wait_keeping()
                # Half of each is in the store, so the way of a load is warm too.
                ask_all(engine, self._warm_up, TOKENS, self._at_once)
                self._passes(engine, "first", "second")

    def _put(self, engine: Engine) -> None:
        """The blocks that the store is to have."""
        stored = {share: figures.stored_blocks(share) for share in self._shares()}
        beginnings = [
            prompt[: blocks * BLOCK_TOKENS + 1]
            for share, blocks in stored.items()
            for prompt in self._prompts[share]
            if blocks
        ]
        half = figures.stored_blocks(0.5) * BLOCK_TOKENS + 1
        ask_all(engine, [*(prompt[:half] for prompt in self._warm_up), *beginnings], 1, self._at_once)
        engine.counts()  # which waits for all saves

    def _passes(self, engine: Engine, *names: str) -> None:
        for share in self._shares():
            for which in names:
                self._points.append(one_pass(engine, which, share, self._prompts[share], self._at_once))


def hits_parts(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds."""
    return [{"round": number} for number in range(settings.rounds)]


def hits_part(place: Place, settings: argparse.Namespace, part: dict[str, Any]) -> dict[str, Any]:
    """One of them."""
    return {"points": HitsRound(place, settings, part["round"]).run()}


# Overhead.


class Watch:
    """A client of a store that looks at its counters."""

    def __init__(self, engine: kvik.Engine, address: str) -> None:
        self._store = kvik.Store.connect(engine, address, NAMESPACE, kvik.Layout(1, 4096, layers=2))

    def stored(self) -> int:
        """Blocks that were put into it so far."""
        return int(self._store.stat()["stored"])

    def reaches(self, blocks: int, within: float) -> bool:
        """Wait until it has so many; whether it has."""
        until = time.monotonic() + within
        while self.stored() < blocks:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)  # a counter has no event to wait for
        return True


def turn(engine: Engine, prompts: Prompts, watch: Watch | None) -> dict[str, Any]:
    """One batch, until it is answered, and until the store has its blocks."""
    blocks = sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
    aim = watch.stored() + blocks if watch else 0
    began = time.monotonic()
    answers = ask_all(engine, prompts, 1, len(prompts))
    found: dict[str, Any] = {"seconds": time.monotonic() - began}
    if watch:
        there = watch.reaches(aim, STORED)
        found["stored_s"] = time.monotonic() - began if there else None
    return {**found, "tokens": [answer.tokens for answer in answers]}


def pairs_of(
    engines: dict[str, Engine], watch: Watch, settings: argparse.Namespace, rng: random.Random
) -> list[dict[str, Any]]:
    """All pairs of turns, in random order within each."""
    turns, last = [], ""
    for pair in range(settings.pairs):
        prompts = prompts_of(rng, BATCH, figures.LONG)
        for arm in rng.sample(figures.ARMS, len(figures.ARMS)):
            if arm != last:
                rest(engines.values())
            last = arm
            measured = turn(engines[arm], prompts, watch if arm == "store" else None)
            turns.append({"pair": pair, "arm": arm, **measured})
    return turns


def overhead_parts(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """The pairs of servers of all starts, in random order within each."""
    parts = []
    for start in range(settings.starts):
        of_start = [
            {"start": start, "steps": steps, "cache": cache}
            for steps in settings.steps
            for cache in settings.caches
        ]
        random.Random(f"{settings.seed}/order/{start}").shuffle(of_start)  # noqa: S311 - an order
        parts += of_start
    return parts


def overhead_part(place: Place, settings: argparse.Namespace, part: dict[str, Any]) -> dict[str, Any]:
    """One pair of servers."""
    rng = random.Random(f"{settings.seed}/{part}")  # noqa: S311 - a workload
    with Served("--memory", MEMORY) as store, kvik.Engine() as beside:
        arguments = ["--max-num-batched-tokens", str(part["steps"])]
        specs = [
            engine_spec(
                {"address": store.address} if arm == "store" else None,
                name=arm, prefix_caching=CACHES[part["cache"]], arguments=arguments,
            )
            for arm in figures.ARMS
        ]  # fmt: skip
        with place.life(*specs) as servers:
            engines = dict(zip(figures.ARMS, servers, strict=True))
            engines["store"].wait_keeping()
            for engine in servers:
                ask_all(engine, prompts_of(rng, BATCH, figures.LONG), 1, BATCH)
            before = {arm: engine.counts() for arm, engine in engines.items()}
            turns = pairs_of(engines, Watch(beside, store.address), settings, rng)
            counted = {arm: engine.counts().since(before[arm])._asdict() for arm, engine in engines.items()}
    return {"turns": turns, "counted": counted}


# Both.


@dataclass(frozen=True)
class Kind:
    """What one command measures. settings: with their values of a whole and of a quick run."""

    layers: int | None
    settings: dict[str, tuple[Any, Any]]
    parts: Callable[[argparse.Namespace], list[dict[str, Any]]]
    part: Callable[[Place, argparse.Namespace, dict[str, Any]], dict[str, Any]]
    report: Callable[[figures.Raw], str]
    invalid: Callable[[figures.Raw], Sequence[object]]


KINDS = {
    "hits": Kind(
        LAYERS,
        {
            "rounds": (10, 2),
            "prompts": (4, 2),
            "shares": ([number / 10 for number in range(11)], [0.0, 0.5, 1.0]),
            "at_once": (1, 1),
        },
        hits_parts, hits_part, figures.hits_report, lambda raw: list(figures.invalid_shares(raw)),
    ),
    "overhead": Kind(
        None,
        {
            "starts": (1, 1),
            "pairs": (8, 3),
            "steps": ([1024, 768, 512, 384, 256, 128, 64, 32], [1024, 32]),
            "caches": (list(CACHES), list(CACHES)),
        },
        overhead_parts, overhead_part, figures.overhead_report, lambda raw: list(figures.invalid_cells(raw)),
    ),
}  # fmt: skip


def missing(raw: figures.Raw, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts that are to come, in their order."""
    return [part for part in parts if not any(part.items() <= _names(cell, part) for cell in raw["cells"])]


def _names(cell: figures.Raw, part: dict[str, Any]) -> set[tuple[str, Any]]:
    """What a cell says of what names a part."""
    return {(name, cell[name]) for name in part}


def go(kind: Kind, settings: argparse.Namespace, raw: dict[str, Any]) -> bool:
    """Do what is missing; whether the time sufficed."""
    end = time.monotonic() + settings.minutes * 60
    model = ensure_checkpoint(kind.layers)
    with ExitStack() as stack:
        stack.enter_context(without_autogroups())
        kept.note_facts(raw, facts.collect() | {"vllm": importlib.metadata.version("vllm")})
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-store-sweep-")))
        parent = stack.enter_context(ForkParent(folder))
        place = Place(parent, model, stack.enter_context(Fleet()), folder)
        for part in missing(raw, kind.parts(settings)):
            if time.monotonic() > end:
                return False
            began = time.monotonic()
            cell = {**part, **kind.part(place, settings, part)}
            cell["seconds"] = time.monotonic() - began
            raw["cells"].append(cell)
            kept.write(settings.out, raw)
            said = ", ".join(f"{name} {value}" for name, value in part.items())
            print(f"{said}: {cell['seconds']:.0f} s", flush=True)
    return True


def _numbers(kind: type) -> Callable[[str], list[Any]]:
    return lambda text: [kind(one) for one in text.split(",")]


def parse() -> argparse.Namespace:
    """The settings, those that were not given as the command and `--quick` have them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_subparsers(dest="which", required=True)
    hits = which.add_parser("hits", help="requests a second by the hit rate, in two passes")
    hits.add_argument("--rounds", type=int)
    hits.add_argument("--prompts", type=int, help="of each share, in each round")
    hits.add_argument("--shares", type=_numbers(float), help=f"of a prompt's {figures.BLOCKS} KV blocks")
    hits.add_argument("--at-once", type=int, help="prompts that are asked at a time")
    overhead = which.add_parser("overhead", help="what a store costs that has nothing")
    overhead.add_argument("--starts", type=int, help="of each pair of servers")
    overhead.add_argument("--pairs", type=int, help="of turns, in each start")
    overhead.add_argument("--steps", type=_numbers(int), help="tokens a step")
    overhead.add_argument("--caches", type=_numbers(str), help="on, off")
    for command in (hits, overhead):
        command.add_argument("--quick", action="store_true", help="a run of at most three minutes")
        command.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
        command.add_argument("--minutes", type=float, default=30.0, help="after which nothing further begins")
        command.add_argument("--out", type=Path, help="file of the raw data, JSON")
        command.add_argument("--go-on", action="store_true", help="do what is missing in the file")
        command.add_argument("--table", action="store_true", help="only print the tables of the file")
    settings = parser.parse_args()
    for name, (whole, quick) in KINDS[settings.which].settings.items():
        if getattr(settings, name) is None:
            setattr(settings, name, quick if settings.quick else whole)
    if wrong := faults_of(settings):
        parser.error(wrong)
    return settings


def faults_of(settings: argparse.Namespace) -> str | None:
    """What cannot be measured with these settings."""
    if (settings.go_on or settings.table) and settings.out is None:
        return "--go-on and --table take --out"
    if settings.which == "hits":
        bad = [
            share
            for share in settings.shares
            if not 0 <= share <= 1 or abs(share * figures.BLOCKS - figures.stored_blocks(share)) > 1e-9
        ]
        return f"--shares: {bad} are no tenths from 0 to 1" if bad else None
    unknown = {*settings.caches} - CACHES.keys()
    return f"--caches: no such setting: {', '.join(sorted(unknown))}" if unknown else None


def main() -> int:
    """Run one of them."""
    settings = parse()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # servers are stopped on the way
    kind = KINDS[settings.which]
    names = ["which", "seed", *kind.settings]
    if settings.go_on or settings.table:
        raw = kept.read(settings.out, settings, names)
        kind = KINDS[settings.which]
    else:
        raw = kept.begun(settings, names)
    enough = True
    if not settings.table:
        print(f"seed {settings.seed}, {len(missing(raw, kind.parts(settings)))} parts", flush=True)
        enough = go(kind, settings, raw)
    print(kind.report(raw))
    if kind.invalid(raw):
        return 1
    return 0 if enough else 2


if __name__ == "__main__":
    sys.exit(main())
