"""Requests a second of an emulated engine by how much of its prompts is alike, in two passes.

    python bench/store_hits.py [--prompts 24] [--tokens 1008] [--json FILE]

Prompts begin with the same tokens, as many as the hit rate says, and go on with tokens of their own. The
first pass meets an empty store and an engine that was just started; then the engine is started again, and
the second pass asks for the same prompts. Both with the engine's own prefix cache and without it. Four
clients ask at a time. Every answer of the second pass is compared with that of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvik.demo import client
from kvik.demo.processes import Fleet, HttpServer, free_ports
from kvik.store.bench.figures import markdown
from kvik.store.bench.served import served

SHAPE, PAGE_TOKENS, TOKENS, CLIENTS = "gemma-2b", 16, 2, 4
COMPUTE = "fixed=0.005,prefill_token=0.0002"
RATES = [share / 10 for share in range(11)]
LIMIT = 120.0  # seconds
GIB = 1 << 30


class Engine:
    """An emulated engine with a store, which is started anew for each pass."""

    def __init__(self, fleet: Fleet, logs: Path, store: str, *options: str) -> None:
        self._fleet, self._logs, self._starts = fleet, logs, 0
        self._command = [sys.executable, "-m", "kvik.cli", "emulator", "serve", "--model-shape", SHAPE]
        self._command += ["--kv-memory", str(GIB), "--page-tokens", str(PAGE_TOKENS)]
        self._command += ["--compute", COMPUTE, "--store", store, *options]
        self.server: HttpServer | None = None

    def restart(self) -> str:
        """End it and start it; gives its address."""
        self.stop()
        self._starts += 1
        (port,) = free_ports(1)
        log = self._logs / f"engine{port}-{self._starts}.log"
        env = {"KVIK_CONFIG": os.devnull}
        command = [*self._command, "--port", str(port)]
        self.server = self._fleet.add(HttpServer("engine", command, port, log, env, grace=1.0))
        self.server.wait_ready(time.monotonic() + LIMIT)
        client.complete(self.server.url, [7] * (PAGE_TOKENS - 1), 1, model=SHAPE)
        return self.server.url

    def stop(self) -> None:
        """End it."""
        if self.server is not None:
            self._fleet.stop(self.server)
            self.server = None


def prompts_of(rate: float, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of which this part is the same."""
    rng = random.Random(seed)  # noqa: S311 - prompts, not secrets
    alike = round(rate * tokens / PAGE_TOKENS) * PAGE_TOKENS
    common = [rng.randrange(300, 100_000) for _ in range(alike)]
    return [[*common, *(rng.randrange(300, 100_000) for _ in range(tokens - alike))] for _ in range(count)]


def ask_all(url: str, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
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


def sweep(engine: Engine, count: int, tokens: int, seed: int) -> list[tuple[float, float, float]]:
    """Of each hit rate: requests a second of both passes. SystemExit for another answer."""
    rows = []
    for rate in RATES:
        prompts = prompts_of(rate, count, tokens, seed + round(100 * rate))
        url = engine.restart()
        first, truth = ask_all(url, prompts)
        wait_put(url)
        second, answers = ask_all(engine.restart(), prompts)
        if answers != truth:
            raise SystemExit(f"hit rate {rate}: the second pass has other answers than the first")
        rows.append((rate, first, second))
        print(f"hit rate {rate:.1f}: {first:.1f}, then {second:.1f} requests/s", flush=True)
    return rows


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1008)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    measured: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as logs, Fleet() as fleet:
        for name, options in (("engine cache", ()), ("no engine cache", ("--no-prefix-cache",))):
            with served(["--memory", str(2 * GIB)]) as address:
                engine = Engine(fleet, Path(logs), address, *options)
                measured[name] = sweep(engine, given.prompts, given.tokens, given.seed)
                engine.stop()
    names = list(measured)
    columns = ["hit rate", *(f"{name}, {which} pass" for name in names for which in ("first", "second"))]
    rows = [
        [f"{rate:.1f}", *(f"{value:.1f}" for name in names for value in measured[name][at][1:])]
        for at, rate in enumerate(RATES)
    ]
    print("\n" + markdown(columns, rows))
    if given.json:
        given.json.write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
