"""``kvik bench context``: hand a long context over between two processes in pieces, every byte checked.

A context of 128 Ki tokens of a model with 70 billion parameters has 40 GiB of KV, more than most machines for
trying things out can hold twice. So it goes in pieces of some tokens, all layers of them: the owner (a
second process) writes a piece's real KV (`kvik.emulator.content`), grants it, and this process reads it into
pages that lie anywhere. Both read every byte of what they have; the digests must be equal, and together they
give the context's next token, as an emulated server would.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import click
import numpy as np

import kvik
from kvik.bench import facts
from kvik.bench.context_side import Order, Side, pages_for
from kvik.bench.errors import BenchError
from kvik.bench.options import size_text
from kvik.bench.writing import writable, write
from kvik.emulator import wire
from kvik.emulator.content import MASK
from kvik.emulator.tokens import next_token
from kvik.emulator.wire import Message
from kvik.shapes import ModelShape

SEED = 7
MEMCPY_BYTES = 512 << 20
ANSWER_LIMIT_S = 600.0
_GB = 1e9


@dataclass
class Rates:
    """Of each piece, GB/s (1e9 bytes a second)."""

    fill: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    kvik: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """What was moved, how, and how fast."""

    shape: str
    tokens: int
    pieces: int
    piece_tokens: int
    bytes: int = 0
    extents: int = 0
    transport: str = ""
    mechanism: str = ""
    checks: str = ""
    digest: int = 0
    token: int = 0
    seconds: float = 0.0
    rates: Rates = field(default_factory=Rates)


class Owner:
    """The other process, which has the KV."""

    def __init__(self, order: Order) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(ANSWER_LIMIT_S)
        with theirs:
            command = [sys.executable, "-m", "kvik.bench.context_side", str(theirs.fileno())]
            # In a session of its own, so that a Ctrl-C reaches this process alone.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        wire.send(self._ours, Message("order", {"order": asdict(order)}))

    def make(self, piece: int) -> dict[str, Any]:
        """Let it write a piece; its ticket, digest and rates. `BenchError` when it has ended."""
        try:
            wire.send(self._ours, Message("make", {"piece": piece}))
            answer = wire.receive(self._ours)
        except OSError as error:
            raise BenchError(f"the owner's process does not answer: {error}") from error
        if answer is None:
            raise BenchError(
                f"the owner's process ended with status {self._process.wait()}; its error is above"
            )
        return dict(answer.fields)

    def close(self) -> None:
        """Let it end."""
        self._ours.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def execute(order: Order, say: Callable[[str], None]) -> Outcome:
    """Move the whole context; `BenchError` or `kvik.KvikError` when something does not arrive as it was."""
    outcome = Outcome(order.shape.name, order.tokens, order.pieces, order.piece_tokens)
    owner, began = Owner(order), time.monotonic()
    try:
        side = Side(order, "reader", np.random.default_rng(SEED).permutation(order.pages))
        # Every page of the machine is there before anything is timed.
        scratch = np.ones(min(MEMCPY_BYTES, side.bytes.size), dtype=np.uint8)
        side.bytes[:] = 0
        for piece in range(order.pieces):
            _one(order, side, owner.make(piece), piece, outcome)
            outcome.rates.memcpy.append(_memcpy(side.bytes, scratch))
            rates = outcome.rates
            say(
                f"piece {piece + 1}/{order.pieces}: kvik {rates.kvik[-1]:.2f} GB/s, "
                f"memcpy {rates.memcpy[-1]:.2f} GB/s, digests equal"
            )
    finally:
        owner.close()
    outcome.token = next_token(outcome.digest, order.tokens, order.shape.vocab_size, may_end=False)
    outcome.seconds = time.monotonic() - began
    return outcome


def _one(order: Order, side: Side, made: dict[str, Any], piece: int, outcome: Outcome) -> None:
    """Read one piece, and compare."""
    first, last = order.bounds(piece)
    report = side.read_from(made["ticket"], first, last)
    start = time.perf_counter()
    digest = side.digest(first, last)
    seconds = time.perf_counter() - start
    if digest != made["digest"]:
        raise BenchError(
            f"tokens {first} to {last} arrived otherwise than they left: digest {made['digest']:016x} at the "
            f"owner, {digest:016x} here. Please report this."
        )
    outcome.digest = (outcome.digest + digest) & MASK
    outcome.bytes += report.bytes
    outcome.extents += report.extents
    outcome.transport = _also(outcome.transport, report.transport)
    outcome.mechanism = _also(outcome.mechanism, report.mechanism)
    outcome.checks = _also(outcome.checks, ", ".join(report.checks))
    outcome.rates.fill.append(made["fill"])
    outcome.rates.read.append(report.bytes / seconds / _GB)
    outcome.rates.kvik.append(report.bytes / report.total_s / _GB)


def _also(known: str, now: str) -> str:
    """What pieces before had, and this one, if it is another: the medians are of them all."""
    return known if now in known.split("; ") else f"{known}; {now}" if known else now


def _memcpy(
    source: np.ndarray[Any, np.dtype[np.uint8]], scratch: np.ndarray[Any, np.dtype[np.uint8]]
) -> float:
    """One thread's contiguous copy of as much as `scratch` holds."""
    start = time.perf_counter()
    np.copyto(scratch, source[: scratch.size])
    return scratch.size / (time.perf_counter() - start) / _GB


def _print(outcome: Outcome, order: Order, say: Callable[[str], None]) -> None:
    median = {name: statistics.median(values) for name, values in vars(outcome.rates).items()}
    say(f"{outcome.tokens} tokens of {outcome.shape}, {order.shape.kv_bytes_per_token()} bytes of KV a token")
    say(
        f"moved: {outcome.bytes} bytes ({outcome.bytes / 2**30:.2f} GiB) in {outcome.pieces} pieces and "
        f"{outcome.extents} extents, over {outcome.mechanism}; all of it took {outcome.seconds:.0f} s"
    )
    say(
        f"medians: kvik {median['kvik']:.2f} GB/s, memcpy {median['memcpy']:.2f} GB/s (one thread), "
        f"ratio {median['kvik'] / median['memcpy']:.2f}; writing KV {median['fill']:.2f}, "
        f"reading it {median['read']:.2f} GB/s"
    )
    say(f"every byte was read on both sides: digest {outcome.digest:016x}, next token {outcome.token}")


@click.command()
@click.option(
    "--shape",
    default="llama-3.1-70b",
    show_default=True,
    help="Whose KV: a preset, a config.json, or numbers.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 24),
    default=131072,
    show_default=True,
    help="Length of the context.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    default="8GiB",
    show_default=True,
    help="KV memory of both processes together; a piece takes half of it on either side.",
)
@click.option(
    "--page-tokens", type=click.IntRange(1, 4096), default=16, show_default=True, help="Tokens of a page."
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "tcp", "local"]),
    default="auto",
    show_default=True,
    help="How it is read; one that was named is used, or the run fails.",
)
@click.option(
    "--json", "json_file", metavar="FILE", callback=writable,
    help="Write figures and facts of the machine as JSON; - is standard output.",
)  # fmt: skip
def context(
    shape: str, tokens: int, memory: str, page_tokens: int, transport: str, json_file: str | None
) -> None:
    """Hand a long context over between two processes, every byte of it checked.

    The context's KV is made, granted, read and verified in pieces, as memory allows. Rates are medians over
    pieces, with a memcpy timed after each of them.
    """
    try:
        model = ModelShape.resolve(shape)
        order = Order(
            shape=model,
            tokens=tokens,
            page_tokens=page_tokens,
            pages=pages_for(model, page_tokens, tokens, kvik.parse_size(memory) // 2),
            transport=transport,
        )
        available = facts.memory_available()
        needed = 2 * order.nbytes + min(MEMCPY_BYTES, order.nbytes)
        if available is not None and needed > available:
            raise BenchError(
                f"--memory {memory} needs {size_text(needed)}; {size_text(available)} are available"
            )
        outcome = execute(order, lambda text: click.echo(text, err=True))
    except (kvik.KvikError, BenchError, OSError) as error:
        raise click.ClickException(str(error)) from error
    _print(outcome, order, lambda text: click.echo(text, err=json_file == "-"))
    if json_file is not None:
        write(json_file, {"outcome": asdict(outcome), "machine": facts.collect()})
