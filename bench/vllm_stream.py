"""How long KV is still on its way when prefill has computed the last layer: pulled, and streamed.

    python bench/vllm_stream.py [--rounds 10] [--tokens 2048 3500] [--rates 1gbit 10gbit] [--layers 8]
                                [--seed N] [--limit 1800] [--json FILE]

Two real vLLM servers on CPU, each in a network namespace of its own, with a cable of the given rate between
them; two routers of kvik before the same two servers, one that pulls and one that streams. In each round both
answer the same fresh prompt of each length, in random order, one request at a time, and the answers must be
equal tokens.

*Prefill* is the time from when the router is asked until the last layer of the prompt is written in prefill.
*Exposed* is the time from when the last layer of the prompt is written in prefill until the last byte of its
KV is in decode: what a client waits for besides computing. Both ends are written by the servers themselves
(`report_file`), on this machine's one clock. A round fails where decode computed more than one token of a
prompt, where KV came another way than over tcp, or where a load was not what the mode says: one part pulled,
several streamed.

Shown are medians with 95% intervals (bootstrap over rounds), and the ratio of the medians with its own. All
rounds are of one start of the servers, so an interval says nothing of another start. It needs
the privilege to make network namespaces, and vLLM; a machine that is busy otherwise measures something else,
and its load is shown.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.netns.hosts import two_hosts
from tests.vllm.pairs import Pair, PairSpec, prompt_of, start_pair
from without_autogroups import without_autogroups

from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, ensure_checkpoint
from kvik.demo.engines import start_router
from kvik.roles.hosts import CannotError, Rate
from kvik.roles.ports import free_ports
from kvik.roles.processes import HttpServer

MODES = ("pull", "stream")
TOKENS = 8  # of an answer
NOTICE = 20.0  # seconds for a server to have noticed the end of a handover
DRAWS = 2000


class WrongError(Exception):
    """A round that does not count, and why."""


@dataclass(frozen=True)
class Round:
    """One request: seconds of prefill and of its transfer exposed, and in how many parts its KV came."""

    rate: str
    tokens: int
    mode: str
    number: int
    prefill_s: float
    exposed_s: float
    parts: int
    nbytes: int


class Bench:
    """A pair of servers, a router of each mode, and the prompts that they are asked."""

    def __init__(self, pair: Pair, pulling: HttpServer, seed: int) -> None:
        self._pair = pair
        self._routers = {"pull": pulling, "stream": pair.router}
        self._prompts = random.Random(seed)  # noqa: S311

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        return prompt_of(tokens, self._prompts.randrange(2**30))

    def warm_up(self) -> None:
        """Open connections, and let the streaming router hear of prefill's template."""
        for router in self._routers.values():
            for _ in range(2):
                client.complete(router.url, self.prompt(300), 1)
        time.sleep(0.5)  # what the servers still write of these; a plain file has no event to wait for
        for _ in range(2):
            client.complete(self._pair.prefill.url, [FIRST_BYTE_TOKEN], 1)

    def ask(self, mode: str, prompt: list[int]) -> tuple[list[int], float, float, int, int]:
        """One request: its answer's tokens, its prefill's and its exposed time, its parts and bytes."""
        before = self._pair.decode_computed()
        sent = self._sent()
        self._pair.reports.new()
        asked_at = time.time()
        answer = client.complete(self._routers[mode].url, prompt, TOKENS).tokens
        computed_at = self._computed_at(sent)
        loads = self._pair.reports.wait(1)
        if {(load.outcome, load.transport) for load in loads} != {("loaded", "tcp")}:
            raise WrongError(f"{mode}: {[(load.outcome, load.reason, load.transport) for load in loads]}")
        if (len(loads) > 1) != (mode == "stream"):
            raise WrongError(f"{mode}: {len(loads)} part(s)")
        if self._pair.decode_computed() - before > 1:
            raise WrongError(f"{mode}: decode has computed the prompt")
        last = max(load.ended_at or 0.0 for load in loads)
        nbytes = sum(load.bytes for load in loads)
        return answer, computed_at - asked_at, last - computed_at, len(loads), nbytes

    def _sent(self) -> int:
        path = self._pair.reverse.path
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _computed_at(self, sent: int) -> float:
        """When prefill wrote the last layer of the handover that it reports next."""
        until = time.monotonic() + NOTICE
        while self._sent() <= sent:
            if time.monotonic() > until:
                raise WrongError("prefill has not noticed the end of the handover")
            # An idle server notices it with its next step.
            client.complete(self._pair.prefill.url, [FIRST_BYTE_TOKEN], 1)
        record = json.loads(self._pair.reverse.path.read_text().splitlines()[sent])
        if record["reason"] != "consumed":
            raise WrongError(f"prefill's grants ended as {record['reason']}")
        return float(record["computed_at"])


def measure(bench: Bench, rate: str, args: argparse.Namespace, until: float) -> list[Round]:
    """All rounds of one rate."""
    rng = random.Random(args.seed)  # noqa: S311
    bench.warm_up()
    found = []
    for number in range(args.rounds):
        for tokens in rng.sample(args.tokens, len(args.tokens)):
            prompt = bench.prompt(tokens)
            answers = []
            for mode in rng.sample(MODES, len(MODES)):
                if time.monotonic() > until:
                    raise WrongError(f"not done within {args.limit} s")
                answer, *figures = bench.ask(mode, prompt)
                answers.append(answer)
                found.append(Round(rate, tokens, mode, number, *figures))
            if answers[0] != answers[1]:
                raise WrongError(f"{tokens} tokens: pull and stream answer {answers}")
    return found


def interval(
    values: Sequence[tuple[float, ...]], figure: Callable[[Sequence[tuple[float, ...]]], float]
) -> str:
    """A figure of paired values, with its 95% bootstrap interval."""
    rng = random.Random(1)  # noqa: S311
    draws = sorted(figure([rng.choice(values) for _ in values]) for _ in range(DRAWS))
    low, high = draws[DRAWS * 25 // 1000], draws[DRAWS * 975 // 1000 - 1]
    return f"{figure(values):.3g} [{low:.3g}, {high:.3g}]"


def table(rounds: Sequence[Round], floor: Callable[[str, int], float]) -> str:
    """What was found, as Markdown."""
    lines = [
        "| rate | tokens | MiB | wire, ms | prefill, ms | parts | pull, exposed ms | stream, exposed ms "
        "| stream / pull |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases = sorted(
        {(one.rate, one.tokens) for one in rounds}, key=lambda case: (Rate.parse(case[0]).bits, case[1])
    )
    for rate, tokens in cases:
        mine = [one for one in rounds if (one.rate, one.tokens) == (rate, tokens)]
        by = {mode: [one for one in mine if one.mode == mode] for mode in MODES}
        pairs = [
            (pull.exposed_s * 1e3, stream.exposed_s * 1e3)
            for pull, stream in zip(by["pull"], by["stream"], strict=True)
        ]
        medians = [
            interval(pairs, lambda some, side=side: statistics.median(one[side] for one in some))  # type: ignore[misc]
            for side in range(2)
        ]
        ratio = interval(
            pairs,
            lambda some: statistics.median(b for _, b in some) / statistics.median(a for a, _ in some),
        )
        nbytes = by["stream"][0].nbytes
        prefill = statistics.median(one.prefill_s for one in mine) * 1e3
        lines.append(
            f"| {rate} | {tokens} | {nbytes / 2**20:.1f} | {floor(rate, nbytes) * 1e3:.1f} | {prefill:.0f} "
            f"| {by['stream'][0].parts} | {medians[0]} | {medians[1]} | {ratio} |"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> list[Round]:
    """Start everything, measure, and stop it."""
    until = time.monotonic() + args.limit
    spec = PairSpec("bench", secrets=("the secret of both",) * 2, forked=False, mode="stream")
    rounds: list[Round] = []
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="kvik-stream-") as folder:
        pair = start_pair(spec, ensure_checkpoint(args.layers), Path(folder) / "pair", hosts)
        try:
            with pair.near():
                logs = Path(folder) / "pull"
                logs.mkdir()
                router = start_router([pair.prefill.url], [pair.decode.url], free_ports(1)[0], logs)
                pair.fleet.add(router)
                router.wait_ready(time.monotonic() + 30)
                bench = Bench(pair, router, args.seed)
                for rate in args.rates:
                    for host in hosts:
                        host.shape(Rate.parse(rate))
                    rounds += measure(bench, rate, args, until)
                    print(f"{rate}: {args.rounds} rounds, load {os.getloadavg()[0]:.2f}", flush=True)
        finally:
            pair.stop()
    return rounds


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 3500])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**30)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which it gives up")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.layers} layers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    try:
        with without_autogroups():
            rounds = run(args)
    except (WrongError, CannotError) as error:
        print(f"vllm_stream: {error}", file=sys.stderr)
        return 1
    print(table(rounds, lambda rate, nbytes: Rate.parse(rate).floor(nbytes)))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
