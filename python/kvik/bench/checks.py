"""``kvik bench checks``: what page checksums cost, with and without in the same rounds, beside memcpy.

Two transports stand in one run. On ``tcp`` checksums are on unless told otherwise; on ``local`` they are
asked for with ``verify="full"``. In each round every contender has one short turn, and the next round starts
with another one, so that a neighbour on the machine slows all of them alike; a ratio compares turns of one
round.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import click

import kvik
from kvik.bench import facts, pattern
from kvik.bench.contenders import Kvik
from kvik.bench.errors import BenchError
from kvik.bench.figures import Series
from kvik.bench.limits import Memcpy
from kvik.bench.memory import Memory
from kvik.bench.options import BUFFER_STEP, BUFFERS_HELD, size_text
from kvik.bench.pages import Cell, Op, PagePlan
from kvik.bench.peer import Peer
from kvik.bench.run import Say, salts
from kvik.bench.target import CLOSE_SECONDS, SECRET_VARIABLE, TargetOptions, engine_at
from kvik.bench.writing import writable, write
from kvik.ranges import Range

LONGEST_S = 600.0
FLOOR = 32 << 20
PAIRS: tuple[tuple[kvik.TransportName, kvik.VerifyName], ...] = (("tcp", "auto"), ("local", "full"))
"""Transports, and what turns their checksums on."""


@dataclass(frozen=True)
class Plan:
    """What is moved, how often."""

    op: Op
    page_bytes: int
    pages: int
    rounds: int
    turn_s: float
    seed: int

    @property
    def buffer(self) -> int:
        """Bytes of either side: twice a batch, so that a batch finds little of its pages in a cache."""
        wanted = max(2 * self.page_bytes * self.pages, FLOOR)
        return -(-wanted // BUFFER_STEP) * BUFFER_STEP


@dataclass
class Cost:
    """One transport with checksums and without."""

    transport: str
    verify: str
    on: Series = field(default_factory=Series)
    off: Series = field(default_factory=Series)

    def to_json(self) -> dict[str, Any]:
        """Figures for programs."""
        ratio, on, off = self.on.ratio_to(self.off), self.on.cpu_per_gib(), self.off.cpu_per_gib()
        if ratio is None or on is None or off is None:
            raise BenchError(f"{self.transport} was not measured")
        return {
            "transport": self.transport,
            "verify": self.verify,
            "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
            "on_bytes_per_s": self.on.rate,
            "off_bytes_per_s": self.off.rate,
            "on_cpu_s_per_gib": sum(on),
            "off_cpu_s_per_gib": sum(off),
        }


def execute(plan: Plan, say: Say) -> tuple[list[Cost], Series]:
    """Measure; `BenchError` or `kvik.KvikError` when something fails or arrives otherwise than it was."""
    available = facts.memory_available()
    if available is not None and plan.buffer * BUFFERS_HELD > available:
        raise BenchError(
            f"{BUFFERS_HELD} buffers of {size_text(plan.buffer)} do not fit in {available >> 20} MiB"
        )
    with ExitStack() as stack:
        target = TargetOptions(
            buffer=plan.buffer,
            memory="shared",
            transport="auto",
            channels=4,
            verify="auto",
            engine_listen="127.0.0.1:0",
        )
        # As the engine beside it takes it.
        peer = Peer.start(target, os.environ.get(SECRET_VARIABLE))
        stack.callback(peer.close)
        engine = engine_at(name="bench-checks")
        stack.callback(engine.close, timeout=CLOSE_SECONDS)
        memory = Memory(engine, "shared", plan.buffer)
        cell = Cell(plan.op, plan.page_bytes, plan.pages)
        pages = PagePlan(plan.buffer, cell.page_bytes, cell.pages, "scattered", plan.seed)
        salt = salts(plan.seed)[plan.op]
        if plan.op == "read":
            peer.fill(salt)
        else:
            pattern.fill(memory.bytes, salt)
        expiry = LONGEST_S + plan.rounds * plan.turn_s * 20
        ticket = peer.open(cell, buffer=plan.buffer, layout="scattered", seed=plan.seed, expiry=expiry)
        return _rounds(plan, cell, pages, (engine, memory, peer), ticket, say)


def _rounds(
    plan: Plan,
    cell: Cell,
    pages: PagePlan,
    parts: tuple[kvik.Engine, Memory, Peer],
    ticket: str,
    say: Say,
) -> tuple[list[Cost], Series]:
    engine, memory, peer = parts
    costs = [Cost(transport, verify) for transport, verify in PAIRS]
    turns: list[tuple[Any, Series]] = []
    paths: list[Kvik] = []
    for cost, (transport, verify) in zip(costs, PAIRS, strict=True):
        both: list[tuple[kvik.VerifyName, Series]] = [(verify, cost.on), ("off", cost.off)]
        for verified, series in both:
            path = Kvik(transport, cell, pages, engine, memory, peer, inflight=1, verify=verified)
            path.open(ticket)
            path.warm_up(plan.turn_s)
            path.checked(salts(plan.seed)[plan.op], last=False)
            paths.append(path)
            turns.append((path, series))
    memcpy, copied = Memcpy(pages, memory.bytes.copy(), memory.bytes), Series()
    if plan.op == "write":
        memcpy = Memcpy(pages, memory.bytes, memory.bytes.copy())
    turns.append((memcpy, copied))
    for number in range(plan.rounds):
        first = number % len(turns)
        for contender, series in turns[first:] + turns[:first]:
            series.slices.append(contender.turn(plan.turn_s))
        say(f"round {number + 1} of {plan.rounds}")
    for path in paths:
        path.checked(salts(plan.seed)[plan.op], last=True)
        on = "page_checksum" in {check for checks in path.used.checks for check in checks}
        if on == (path.verify == "off"):
            raise BenchError(f"{path.name} reports other checks than verify={path.verify} asks for")
    return costs, copied


def _print(costs: list[Cost], copied: Series, plan: Plan, say: Say) -> None:
    say(
        f"{plan.op} of {plan.pages} scattered pages of {size_text(plan.page_bytes)}, {plan.rounds} rounds of "
        f"{plan.turn_s:g} s, seed {plan.seed}; rates and CPU time of all rounds, ratios as medians over "
        "rounds with the lowest and the highest"
    )
    for cost in costs:
        figures = cost.to_json()
        ratio = figures["ratio"]
        lines = []
        for name, verify, series in (("on", cost.verify, cost.on), ("off", "off", cost.off)):
            rate, cpu = figures[f"{name}_bytes_per_s"] / 1e9, figures[f"{name}_cpu_s_per_gib"]
            beside = series.ratio_to(copied)
            if beside is not None:
                lines.append(
                    f"  verify {verify:4}  {rate:6.2f} GB/s, {beside.median:.2f} of memcpy "
                    f"[{beside.low:.2f}, {beside.high:.2f}], {cpu:.2f} CPU s/GiB"
                )
        say(
            f"{cost.transport}: with checksums {ratio['median']:.3f} of without "
            f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
        )
        for line in lines:
            say(line)
    say(f"memcpy, one thread: {(copied.rate or 0) / 1e9:.2f} GB/s")


@click.command()
@click.option("--op", type=click.Choice(["read", "write"]), default="read", show_default=True)
@click.option("--page", metavar="SIZE", default="128KiB", show_default=True, help="Bytes of a page.")
@click.option(
    "--pages", type=click.IntRange(1, 1 << 20), default=2000, show_default=True, help="Pages of a transfer."
)
@click.option(
    "--rounds", type=click.IntRange(2, 1000), default=20, show_default=True, help="Turns of each contender."
)
@click.option(
    "--turn",
    type=Range(0.01, 10.0),
    default=0.2,
    show_default=True,
    help="Seconds of a turn; at least one transfer.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Repeats the page ids of another run.")
@click.option(
    "--json", "json_file", metavar="FILE", callback=writable,
    help="Write figures and facts of the machine as JSON; - is standard output.",
)  # fmt: skip
def checks(
    op: str, page: str, pages: int, rounds: int, turn: float, seed: int | None, json_file: str | None
) -> None:
    """Measure what page checksums cost: tcp and local, with and without them in one run, beside memcpy.

    Both sides are processes of this host. Bytes are compared before the first round and after the last.
    """
    try:
        page_bytes = kvik.parse_size(page)
    except kvik.KvikError as error:
        raise click.BadParameter(str(error), param_hint="--page") from error
    plan = Plan(
        op=cast(Op, op),
        page_bytes=page_bytes,
        pages=pages,
        rounds=rounds,
        turn_s=turn,
        seed=secrets.randbits(32) if seed is None else seed,
    )
    try:
        costs, copied = execute(plan, lambda text: click.echo(text, err=True))
    except (kvik.KvikError, BenchError, OSError) as error:
        raise click.ClickException(str(error)) from error
    _print(costs, copied, plan, lambda text: click.echo(text, err=json_file == "-"))
    if json_file is not None:
        content = {
            "plan": {**vars(plan)},
            "costs": [cost.to_json() for cost in costs],
            "memcpy_bytes_per_s": copied.rate,
            "machine": facts.collect(),
        }
        write(json_file, content)
