"""What the first read of pages costs in a young process: memory that kvik allocated against ordinary memory.

    python bench/first_touch.py [--rounds 21] [--settle 0.3] [--pages 20,200] [--page 16KiB] [--buffer 1GiB]

Each figure is one read of random pages, over `local`, the first one that touches them, by a process that
was started for it and has read one page before. Kinds of memory take turns, in an order that changes with
each round. Both sides have memory of the same kind, and have written all of it: what is first is the reader's
sight of the owner's pages. `--settle` is the time between the first contact and the read. Prints medians with
their quartiles, and the median of the rounds' ratios with a 95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvik

KINDS = ("ordinary", "shared")
MECHANISMS = {"ordinary": "process_vm_readv", "shared": "memfd"}
UNITS = {"KiB": 10, "MiB": 20, "GiB": 30}
LIMIT = 30.0
BOOTSTRAPS = 2000


def size(text: str) -> int:
    """Bytes of ``16KiB`` or ``1GiB``."""
    for unit, power in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) << power
    return int(text)


def memory(engine: kvik.Engine, kind: str, nbytes: int) -> tuple[Any, Any]:
    """A region of the kind, and its bytes, every page of them written."""
    if kind == "shared":
        region = engine.allocate(nbytes)
        view = np.frombuffer(memoryview(region), dtype=np.uint8)
    else:
        view = np.empty(nbytes, dtype=np.uint8)
        region = engine.register(view)
    view[:] = 0
    return region, view


def owner(args: argparse.Namespace) -> None:
    """Grants all of its pages, until standard input ends."""
    with kvik.Engine(transport="auto", name="first-touch-owner") as engine:
        region, view = memory(engine, args.kind, args.buffer)
        count = args.buffer // args.page
        view.reshape(count, args.page)[:, 0] = np.arange(count) % 251
        pages = region.pages(kvik.Layout(count, args.page), np.arange(count, dtype=np.uint32))
        grant = engine.grant(pages, right="read", use="many", expiry=600.0, max_expiry=600.0)
        print(grant.ticket, flush=True)
        sys.stdin.read()


def reader(args: argparse.Namespace) -> None:
    """Reads once, and says how long that took."""
    with kvik.Engine(transport="auto", name="first-touch-reader") as engine:
        region, view = memory(engine, args.kind, args.buffer)
        count = args.buffer // args.page
        layout = kvik.Layout(count, args.page)
        rng = np.random.default_rng(args.seed)
        theirs, mine = (rng.permutation(count)[: args.count].astype(np.uint32) for _ in range(2))
        engine.read(region.pages(layout, [0]), args.ticket, [0]).wait(LIMIT)
        time.sleep(args.settle)
        into = region.pages(layout, mine)
        began = time.perf_counter()
        report = engine.read(into, args.ticket, theirs).wait(LIMIT)
        seconds = time.perf_counter() - began
        if report.mechanism != MECHANISMS[args.kind]:
            raise SystemExit(f"it went by {report.mechanism}, not {MECHANISMS[args.kind]}")
        if not (view.reshape(count, args.page)[mine, 0] == theirs % 251).all():
            raise SystemExit("wrong pages")
        print(json.dumps(seconds))


def measure(args: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Seconds of each round, by kind and number of pages."""
    shared = [f"--{name}={getattr(args, name)}" for name in ("page", "buffer", "settle")]
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.rounds):
        for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
            command = [sys.executable, __file__, *shared, f"--kind={kind}"]
            with subprocess.Popen(
                [*command, "--role=owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as there:
                ticket = there.stdout.readline().strip() if there.stdout is not None else ""
                for count in args.pages:
                    one = [
                        *command,
                        "--role=reader",
                        f"--count={count}",
                        f"--seed={turn}",
                        f"--ticket={ticket}",
                    ]
                    said = subprocess.run(one, check=True, stdout=subprocess.PIPE, text=True)
                    seconds.setdefault((kind, count), []).append(float(said.stdout))
                there.communicate()
    return seconds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of samples drawn from the values."""
    drawn = np.random.default_rng(1).choice(np.array(values), size=(BOOTSTRAPS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def report(args: argparse.Namespace, seconds: dict[tuple[str, int], list[float]]) -> float:
    """Prints the table; the largest ratio of medians."""
    worst = 0.0
    for count in args.pages:
        for kind in KINDS:
            low, middle, high = (1e3 * one for one in statistics.quantiles(seconds[kind, count], n=4))
            print(f"{count:4} pages  {kind:9} {middle:7.3f} ms  (quartiles {low:.3f} to {high:.3f})")
        of = [shared / plain for plain, shared in zip(*(seconds[kind, count] for kind in KINDS), strict=True)]
        medians = [statistics.median(seconds[kind, count]) for kind in KINDS]
        low, high = interval(of)
        ratio = medians[1] / medians[0]
        print(
            f"{count:4} pages  shared / ordinary: {ratio:.2f} of medians; "
            f"{statistics.median(of):.2f} by round (95 %: {low:.2f} to {high:.2f})"
        )
        worst = max(worst, ratio)
    return worst


def main() -> int:
    """The command, and its children."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--settle", type=float, default=0.3)
    parser.add_argument("--pages", type=lambda text: [int(one) for one in text.split(",")], default=[20, 200])
    parser.add_argument("--page", type=size, default=16 << 10)
    parser.add_argument("--buffer", type=size, default=1 << 30)
    parser.add_argument("--most", type=float, help="fail when a ratio of medians is above this")
    parser.add_argument("--role", choices=("owner", "reader"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    for name, kind in (("--count", int), ("--seed", int), ("--ticket", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        (owner if args.role == "owner" else reader)(args)
        return 0
    worst = report(args, measure(args))
    return 1 if args.most is not None and worst > args.most else 0


if __name__ == "__main__":
    sys.exit(main())
