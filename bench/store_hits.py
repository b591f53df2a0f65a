"""Requests a second of an emulated engine by how much of its prompts is alike, in two passes.

    python bench/store_hits.py [--rounds 5] [--prompts 32] [--tokens 1008] [--seed N] [--json FILE]

Prompts begin with the same tokens, as many as the hit rate says, and go on with tokens of their own. In the
first pass nobody has seen them; then the engine is started again, and the second pass asks for the same
prompts, which the store has. Both with the engine's own prefix cache and without it. Four clients ask at a
time. Every answer of the second pass is compared with that of the first.

What would be measured besides is kept out of it: an engine that was started has all of its KV memory touched
and its connections to the store open, by prompts that are not counted, before a clock runs; the rates have
their turns in random order in each round, with and without the engine's cache; a rate begins when all puts of
the one before have ended. A round fails where a get failed or a block was not put. How often the engine chose
to compute what the store has, because of how long fetching had taken before, is said below the table: on a
machine that is busy otherwise those are many, and what is measured is another thing then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import kvik
from kvik.demo import client
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from kvik.store.bench.figures import markdown
from kvik.store.bench.served import served

SHAPE, PAGE_TOKENS, TOKENS, CLIENTS = "gemma-2b", 16, 2, 4
TOKEN_BYTES = 18 * 2 * 256 * 2
# Computing takes so much longer than fetching that the engine has no reason to choose it.
COMPUTE = "fixed=0.005,prefill_token=0.0004"
RATES = [share / 5 for share in range(6)]
CACHES = {"engine cache": (), "no engine cache": ("--no-prefix-cache",)}
LIMIT = 120.0  # seconds
KV_MEMORY, STORE_MEMORY = 384 << 20, 4 << 30

Prompts = list[list[int]]


class Engine:
    """An emulated engine with a store, which is started anew for each pass."""

    def __init__(self, fleet: Fleet, logs: Path, store: str, *options: str) -> None:
        self._fleet, self._logs, self._starts = fleet, logs, 0
        self._command = [sys.executable, "-m", "kvik.cli", "emulator", "serve", "--model-shape", SHAPE]
        self._command += ["--kv-memory", str(KV_MEMORY), "--page-tokens", str(PAGE_TOKENS)]
        self._command += ["--compute", COMPUTE, "--store", f"{store},deadline={LIMIT / 2}", *options]
        self.server: HttpServer | None = None

    def restart(self, warm_up: Prompts) -> str:
        """End it and start it, and have it touch all of its memory; gives its address."""
        self.stop()
        self._starts += 1
        (port,) = free_ports(1)
        log = self._logs / f"engine{port}-{self._starts}.log"
        env = {"KVIK_CONFIG": os.devnull}
        command = [*self._command, "--port", str(port)]
        self.server = self._fleet.add(HttpServer("engine", command, port, log, env, grace=1.0))
        self.server.wait_ready(time.monotonic() + LIMIT)
        ask_all(self.server.url, warm_up)
        wait_put(self.server.url)
        return self.server.url

    def stop(self) -> None:
        """End it."""
        if self.server is not None:
            self._fleet.stop(self.server)
            self.server = None


def prompts_of(rate: float, count: int, tokens: int, rng: random.Random) -> Prompts:
    """Prompts of which this part is the same."""
    alike = round(rate * tokens / PAGE_TOKENS) * PAGE_TOKENS
    common = [rng.randrange(300, 100_000) for _ in range(alike)]
    return [[*common, *(rng.randrange(300, 100_000) for _ in range(tokens - alike))] for _ in range(count)]


def ask_all(url: str, prompts: Prompts) -> tuple[float, list[list[int]]]:
    """Requests a second, and the answers."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        began = time.perf_counter()
        answers = list(
            clients.map(
                lambda prompt: client.complete(url, prompt, TOKENS, timeout=LIMIT, model=SHAPE).tokens,
                prompts,
            )
        )
        return len(prompts) / (time.perf_counter() - began), answers


def wait_put(url: str) -> None:
    """Wait until no page waits for a put: what is not stored by then is not in the second pass."""
    until = time.monotonic() + LIMIT
    while client.metrics(url)["vllm:kv_cache_usage_perc"]:
        if time.monotonic() > until:
            raise SystemExit("pages still wait for puts")
        time.sleep(0.01)  # a counter has no event to wait for


def check(url: str, *wrong: str) -> None:
    """SystemExit where an engine has counted something by which a pass is not what it is said to be."""
    found = [
        f"{name} {value:g}"
        for name, value in client.metrics(url).items()
        if name.startswith("kvik_emulator_store") and "_total" in name and value
        if "_failures_" in name or any(f'"{word}"' in name for word in wrong)
    ]
    if found:
        raise SystemExit(f"not a pass that counts: {', '.join(found)}")


def add_choices(choices: Counter[str], url: str) -> None:
    """How often an engine has chosen what, by its reasons."""
    for name, value in client.metrics(url).items():
        if name.startswith("kvik_emulator_store_choices_total"):
            choices[name.partition('reason="')[2].partition('"')[0]] += round(value)


@dataclass
class Cell:
    """Requests a second of one hit rate, of each round."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)


def one_round(
    engine: Engine,
    cells: dict[float, Cell],
    choices: Counter[str],
    given: argparse.Namespace,
    rng: random.Random,
) -> None:
    """Both passes of all hit rates, in random order. SystemExit for another answer."""
    warm_up = prompts_of(0, -(-KV_MEMORY // (given.tokens * TOKEN_BYTES)) + CLIENTS, given.tokens, rng)
    prompts = {rate: prompts_of(rate, given.prompts, given.tokens, rng) for rate in RATES}
    truth: dict[float, list[list[int]]] = {}
    url = engine.restart(warm_up)
    for rate in rng.sample(RATES, len(RATES)):
        asked, truth[rate] = ask_all(url, prompts[rate])
        wait_put(url)
        cells[rate].first.append(asked)
    check(url, "skipped", "refused", "unavailable")
    add_choices(choices, url)
    url = engine.restart(warm_up)
    for rate in rng.sample(RATES, len(RATES)):
        asked, answers = ask_all(url, prompts[rate])
        wait_put(url)
        if answers != truth[rate]:
            raise SystemExit(f"hit rate {rate}: the second pass has other answers than the first")
        cells[rate].second.append(asked)
    check(url, "skipped", "refused", "unavailable")
    add_choices(choices, url)
    engine.stop()


def cleaner(address: str, engine: kvik.Engine) -> Callable[[], int]:
    """What takes all blocks out of the store, and leaves it its memory."""
    layout = kvik.Layout(1, 4096)
    namespace = kvik.Namespace(
        model="none", kv_dtype="uint8", layers=(0, 1), model_layers=1, heads=(0, 1), model_heads=1,
        block_tokens=PAGE_TOKENS,
    )  # fmt: skip
    return kvik.Store.connect(engine, address, namespace, layout).clear_tenant


def measured(given: argparse.Namespace) -> tuple[dict[str, dict[float, Cell]], Counter[str]]:
    """Of each cache and hit rate: what was measured. And all choices of the engines."""
    choices: Counter[str] = Counter()
    rng = random.Random(given.seed)  # noqa: S311 - prompts and orders, not secrets
    cells = {name: {rate: Cell() for rate in RATES} for name in CACHES}
    with (
        tempfile.TemporaryDirectory() as logs,
        Fleet() as fleet,
        served(["--memory", str(STORE_MEMORY)]) as address,
        kvik.Engine() as beside,
    ):
        clear = cleaner(address, beside)
        engines = {name: Engine(fleet, Path(logs), address, *options) for name, options in CACHES.items()}
        for number in range(given.rounds):
            for name in rng.sample(list(CACHES), len(CACHES)):
                clear()
                one_round(engines[name], cells[name], choices, given, rng)
                print(f"round {number + 1}, {name}", flush=True)
    return cells, choices


def text(values: list[float]) -> str:
    """The median, and the lowest and the highest."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1008)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))  # noqa: S311 - of a benchmark
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    cells, choices = measured(given)
    columns = ["hit rate", *(f"{name}, {which} pass" for name in CACHES for which in ("first", "second"))]
    rows = [
        [f"{rate:.1f}", *(text(values) for name in CACHES for values in vars(cells[name][rate]).values())]
        for rate in RATES
    ]
    print("\n" + markdown(columns, rows))
    print("\nloads: " + ", ".join(f"{reason} {count}" for reason, count in choices.most_common() if count))
    if given.json:
        of_each = {
            name: {f"{rate:.1f}": vars(cell) for rate, cell in rates.items()} for name, rates in cells.items()
        }
        options = {"seed": given.seed, "prompts": given.prompts, "tokens": given.tokens}
        whole = {"options": options, "rounds": of_each, "choices": choices}
        given.json.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
