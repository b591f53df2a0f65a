"""``kvik bench``: the options of the transfer benchmark."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import click
from rich.console import Console

import kvik
from kvik import TrafficClassName, TransportName, VerifyName
from kvik.bench import facts
from kvik.bench.checks import checks
from kvik.bench.context import context
from kvik.bench.control import is_loopback, join_address, split_address
from kvik.bench.errors import BenchError
from kvik.bench.options import (
    BUFFERS_HELD,
    OPS,
    TRANSPORTS,
    UNITS,
    Options,
    demand_bounded,
    settle_buffer,
    settle_pages,
    size_text,
    split_list,
)
from kvik.bench.pages import Op, Spread
from kvik.bench.report import print_results, to_json
from kvik.bench.run import Results, Say, default_transports, execute
from kvik.bench.target import SECRET_VARIABLE, TargetOptions, engine_secret, listen
from kvik.bench.writing import writable, write
from kvik.ranges import Range

INTERRUPTED = 130
_TABLE_WIDTH = 150

Values = tuple[str, ...]


def parse_sizes(texts: Sequence[str], option: str) -> list[int]:
    """Sizes such as 16KiB, from repeated options and comma lists."""
    sizes = []
    for text in split_list(texts):
        try:
            size = kvik.parse_size(text)
        except (kvik.KvikError, ValueError) as error:
            raise click.BadParameter(str(error), param_hint=option) from error
        if size < 1:
            raise click.BadParameter(f"{text!r} is not a positive size", param_hint=option)
        sizes.append(size)
    if not sizes:
        raise click.BadParameter("no size given", param_hint=option)
    return sizes


def parse_counts(texts: Sequence[str], option: str) -> tuple[int, ...]:
    """Positive whole numbers, from repeated options and comma lists."""
    counts = split_list(texts)
    if not counts or any(not text.isdecimal() or int(text) < 1 for text in counts):
        raise click.BadParameter(f"{', '.join(texts)!r}: wants positive whole numbers", param_hint=option)
    return tuple(dict.fromkeys(int(text) for text in counts))


def parse_transports(texts: Sequence[str]) -> tuple[TransportName, ...]:
    """Names of transports; empty where none was named."""
    names = split_list(texts)
    for name in names:
        if name not in TRANSPORTS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(TRANSPORTS)}", param_hint="--transport")
    return tuple(cast(TransportName, name) for name in names)


def settle(given: dict[str, Any], say: Say) -> Options:
    """From the command line to a plan; everything that differs from what was asked is said."""
    pages = parse_counts(given["pages"], "--pages")
    page_bytes = settle_pages(parse_sizes(given["page"], "--page"), say)
    asked = None if given["buffer"] is None else parse_sizes([given["buffer"]], "--buffer")[0]
    inflight = int(given["inflight"])
    held = BUFFERS_HELD if given["listen"] is None else 1
    options = Options(
        transports=parse_transports(given["transport"])
        or default_transports(given["target"], is_loopback, say),
        ops=OPS if given["op"] == "both" else (cast(Op, given["op"]),),
        page_bytes=page_bytes,
        pages=pages,
        inflight=inflight,
        channels=int(given["channels"]),
        layout=cast(Spread, given["layout"]),
        memory=str(given["memory"]),
        buffer=settle_buffer(asked, page_bytes, pages, inflight, facts.memory_available(), say, held),
        duration=float(given["duration"]),
        unit=str(given["unit"]),
        verify=cast(VerifyName, given["verify"]),
        seed=secrets.randbits(32) if given["seed"] is None else int(given["seed"]),
        repetitions=int(given["repetitions"] or 0),
        warmup=int(given["warmup"]),
        traffic_class=cast(TrafficClassName, given["traffic_class"]),
    )
    if options.repetitions and inflight > 1:
        raise BenchError("--repetitions times one batch at a time: leave --inflight out")
    if options.warmup and not options.repetitions:
        raise BenchError("--warmup is of repetitions: give --repetitions, or leave it out")
    demand_bounded(options)
    return options


def target_options(given: dict[str, Any], say: Say) -> TargetOptions:
    """What a listening target offers: by default the buffer that the default plan needs."""
    plan = settle(given, say)
    host, _ = split_address(given["listen"])
    return TargetOptions(
        buffer=plan.buffer,
        memory=plan.memory,
        transport="auto",
        channels=plan.channels,
        verify=plan.verify,
        engine_listen=given["engine_listen"] or join_address(host, 0),
    )


@click.group()
def bench() -> None:
    """Measure kvik on this machine, beside what the machine does without it."""


bench.add_command(checks)
bench.add_command(context)


def _describe(options: Options, say: Say) -> None:
    if options.repetitions:
        say(
            f"{len(options.cells())} cells x {len(options.transports)} transports x {options.repetitions} "
            f"repetitions after {options.warmup}, checks apart; {options.layout} pages in "
            f"{size_text(options.buffer)} of {options.memory} memory on each side, seed {options.seed}"
        )
        return
    say(
        f"{len(options.cells())} cells x {len(options.transports)} transports and 2 limits x "
        f"{options.duration:g} s: about {options.measured_s:.0f} s of measuring, checks apart; "
        f"{options.layout} pages in {size_text(options.buffer)} of {options.memory} memory on each side, "
        f"inflight {options.inflight}, channels {options.channels}, verify {options.verify}, "
        f"seed {options.seed}"
    )


def _initiate(options: Options, notices: list[str], given: dict[str, Any], console: Console, say: Say) -> int:
    _describe(options, lambda text: console.print(text, markup=False, highlight=False))
    results = Results(options, notices)
    with console.status("starting") as status:
        execute(results, given["target"], given["secret"], say, lambda text: status.update(text))
    print_results(results, console)
    if given["json_file"] is not None:
        write(given["json_file"], to_json(results))
    if results.failure is not None:
        return 1
    return INTERRUPTED if results.interrupted else 0


def _console(json_file: str | None) -> Console:
    # With `--json -` standard output is the program's; a pipe gets the whole width of the table.
    console = Console(stderr=json_file == "-")
    return console if console.is_terminal else Console(stderr=json_file == "-", width=_TABLE_WIDTH)


@bench.command()
@click.option(
    "--transport",
    multiple=True,
    metavar="tcp|local|nics|auto",
    help="Repeat, or separate by commas; nics are those that KVIK_NICS names on both sides.  "
    "[default: tcp,local; to another host tcp]",
)
@click.option(
    "--op",
    type=click.Choice(["read", "write", "both"]),
    default="both",
    show_default=True,
    help="Whether the initiator reads the target's pages or writes them.",
)
@click.option(
    "--page",
    multiple=True,
    default=["16KiB", "128KiB"],
    show_default=True,
    metavar="SIZE",
    help="Bytes of a page. Repeat, or separate by commas.",
)
@click.option(
    "--pages",
    multiple=True,
    default=["20", "200", "2000"],
    show_default=True,
    metavar="N",
    help="Pages of a batch; one batch is one transfer. Repeat, or separate by commas.",
)
@click.option(
    "--inflight",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Batches in flight at a time.",
)
@click.option(
    "--channels",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Channels of a link (tcp: connections).",
)
@click.option(
    "--layout",
    type=click.Choice(["contiguous", "scattered"]),
    default="scattered",
    show_default=True,
    help="Where a batch's pages lie: side by side, or anywhere in the buffer, differently on either side.",
)
@click.option(
    "--memory",
    type=click.Choice(["host", "shared"]),
    default="shared",
    show_default=True,
    help="The program's own memory, or memory that kvik allocated so that peers on this host can map it.",
)
@click.option(
    "--buffer",
    metavar="SIZE",
    help="Memory of each side that batches lie in.  [default: 4 times the largest batch, at least 256MiB]",
)
@click.option(
    "--duration",
    type=Range(0.02, 3600.0),
    default=0.3,
    show_default=True,
    help="Seconds that each transport and each limit is timed in each cell.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Time N batches of each cell one by one, in place of turns beside the limits.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 1_000_000),
    default=0,
    metavar="N",
    help="With --repetitions: batches before them, timed apart.",
)
@click.option(
    "--class",
    "traffic_class",
    type=click.Choice(["handover", "bulk"]),
    default="handover",
    show_default=True,
    help="The class of kvik's transfers: handover goes before bulk.",
)
@click.option(
    "--unit", type=click.Choice(list(UNITS)), default="GB/s", show_default=True, help="Unit of rates."
)
@click.option(
    "--verify",
    type=click.Choice(["auto", "off", "sample", "full"]),
    default="auto",
    show_default=True,
    help="kvik's own checks of the bytes. This benchmark compares the bytes in any case.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Repeats the page ids of another run.")
@click.option(
    "--secret", callback=engine_secret, help=f"Shared secret of both sides; better in {SECRET_VARIABLE}."
)
@click.option(
    "--json", "json_file", metavar="FILE", callback=writable,
    help="Write the results as JSON; - is standard output.",
)  # fmt: skip
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Only be the target: wait on HOST:PORT for the control connection of a --target side.",
)
@click.option(
    "--engine-listen",
    metavar="HOST:PORT",
    help="With --listen: where the target's engine listens.  [default: the same host, a free port]",
)
@click.option(
    "--target",
    metavar="HOST:PORT",
    help="Use the target that listens there, in place of starting one on this host.",
)
def transfer(**given: Any) -> None:
    """Time batches of page transfers, and check that every byte arrived.

    Without --listen and --target, a target is started as a second process on this host. With --listen,
    HOST:PORT is the benchmark's own control connection: over it the initiator gets the ticket for the
    target's engine, which listens beside it (--engine-listen): one port, for all that kvik moves. The plain
    TCP stream of the comparison takes a free port of the same host, which is closed again once its one
    connection stands. All three must be reachable. Any address but loopback wants a secret.

    Each row stands beside two limits measured in the same rounds over the same memory: one thread's memcpy of
    the same pages, and one plain TCP stream between the same two processes. A percentile is shown only with
    enough samples: p90 from 10, p99 from 100.

    Exit status: 0 all measured and checked, 1 a transfer or a check failed, 2 wrong options, 130 interrupted.
    """
    if given["listen"] is not None and given["target"] is not None:
        raise click.UsageError("--listen is the target's side and --target the initiator's: give one of them")
    if given["engine_listen"] is not None and given["listen"] is None:
        raise click.UsageError("--engine-listen belongs to --listen")
    if given["listen"] is not None and given["json_file"] is not None:
        raise click.UsageError("--listen has no results to write: the side with --target has")
    console = _console(given["json_file"])
    notices: list[str] = []

    def say(text: str) -> None:
        notices.append(text)
        console.print(text, style="yellow", markup=False, highlight=False)

    try:
        if given["listen"] is not None:
            # Without markup, or `[fd00::1]:7` would be read as a tag and not be printed.
            plain = partial(console.print, markup=False, highlight=False)
            listen(given["listen"], target_options(given, say), given["secret"], plain)
            return
        options = settle(given, say)
    except (BenchError, OSError) as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        return
    sys.exit(_initiate(options, notices, given, console, say))
