"""Start real servers, try mutations of `kv_transfer_params`, print the table. Status 1: not all is well."""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvik.demo import client
from kvik.demo.checkpoint import ensure_checkpoint
from kvik.demo.engines import Connector, EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from tests.vllm.pairs import START_LIMIT, PairSpec, start_pair
from tests.vllm.params import catalogue, table
from tests.vllm.params.mutations import Mutation
from tests.vllm.params.trial import Row, Scene, Truth, attempt

# So long that no offer expires while it is needed, and so short that a load that waits for a grant that will
# never be there ends soon.
EXTRA = {"expiry": 60.0, "deadline": 3.0}
ONE_RANK = PairSpec("params", prefix_caching=True, extra=EXTRA)
TWO_RANKS = PairSpec("params-tp2", prefix_caching=True, ranks=(2, 2), extra=EXTRA)


def truth_of(alone: HttpServer) -> Truth:
    """One engine's own answers; each prompt is computed once."""
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(prompt: list[int], tokens: int) -> list[int]:
        key = (tokens, *prompt)
        if key not in known:
            known[key] = client.complete(alone.url, prompt, tokens).tokens
        return known[key]

    return answer


@contextlib.contextmanager
def servers(spec: PairSpec, more: int, truth: Truth, folder: Path) -> Iterator[Scene]:
    """A pair, and `more` prefill servers beside its own."""
    model = ensure_checkpoint()
    folder.mkdir()
    with Fleet() as fleet, contextlib.ExitStack() as stack:
        others = [
            fleet.add(
                EngineSpec(
                    f"prefill-{number + 2}", Connector("kv_producer", extra=spec.extra),
                    prefix_caching=spec.prefix_caching,
                ).start(model, free_ports(1)[0], folder)
            )
            for number in range(more)
        ]  # fmt: skip
        pair = start_pair(spec, model, folder / "pair")
        stack.callback(pair.stop)
        for other in others:
            other.wait_ready(time.monotonic() + START_LIMIT)
        yield Scene([pair.prefill, *others], pair.decode, pair.reports, truth)


def run(scene: Scene, chosen: list[tuple[int, Mutation]], seed: int) -> list[Row]:
    """Try them one after the other; each line is printed when it is known. The prompts of each are drawn from
    the seed and its number."""
    rows = []
    for number, mutation in chosen:
        row = attempt(scene, mutation, random.Random(f"{seed}/{number}"))
        rows.append(row)
        print(table.line(row), flush=True)
        if not scene.decode.alive:
            print(scene.decode.tail())
            row.wrong.append("the decode server has ended")
            break
    return rows


def planned(seed: int, count: int, only: str) -> list[tuple[PairSpec, Mutation]]:
    """So many mutations (of those whose family or name has `only` in it), each with the servers for it."""

    def wanted(found: list[Mutation]) -> list[Mutation]:
        return [one for one in found if only in f"{one.family}: {one.name}"]

    one, two = wanted(catalogue.one_rank(2)), wanted(catalogue.two_ranks())
    of_two = min(len(two), count // 8 if one else count)
    of_one = min(len(one), count - of_two) if only else count - of_two
    return [
        (spec, mutation)
        for spec, found, some in ((ONE_RANK, one, of_one), (TWO_RANKS, two, of_two))
        for mutation in catalogue.choose(found, some, random.Random(seed))
    ]


def attack(chosen: list[tuple[int, PairSpec, Mutation]], seed: int) -> list[Row]:
    """Start what the chosen mutations need, and try them."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvik-params-") as text, Fleet() as fleet:
        folder = Path(text)
        alone = fleet.add(
            EngineSpec("alone", prefix_caching=False).start(ensure_checkpoint(), free_ports(1)[0], folder)
        )
        alone.wait_ready(time.monotonic() + START_LIMIT)
        truth = truth_of(alone)
        print(table.HEAD)
        for spec, more in ((ONE_RANK, 1), (TWO_RANKS, 0)):
            its = [(number, mutation) for number, servers_of, mutation in chosen if servers_of is spec]
            if its:
                with servers(spec, more, truth, folder / spec.name) as scene:
                    rows += run(scene, its, seed)
    return rows


def main(arguments: list[str]) -> int:
    """See `--help`."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.params", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="mutations in all (default 500)")
    parser.add_argument("--seed", type=int, default=None, help="the seed of an earlier run")
    parser.add_argument("--only", default="", help="only mutations with this in their family or name")
    parser.add_argument("--part", default="1/1", help="K/N: of the mutations the Kth of N parts, as 2/5")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    chosen = [(number, *one) for number, one in enumerate(planned(seed, given.count, given.only))]
    part, parts = map(int, given.part.split("/"))
    began = time.monotonic()
    rows = attack(chosen[len(chosen) * (part - 1) // parts : len(chosen) * part // parts], seed)
    print("", *table.summary(rows), sep="\n")
    wrong = [row for row in rows if row.wrong]
    print(
        f"{len(rows)} mutations, {len(wrong)} with something wrong, "
        f"{time.monotonic() - began:.0f} s, seed {seed}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
