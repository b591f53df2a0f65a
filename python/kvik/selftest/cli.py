"""``kvik selftest``: its options, and its exit statuses."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from typing import Any, NoReturn

import click

import kvik
from kvik import signals
from kvik.bench.control import split_address
from kvik.bench.errors import BenchError
from kvik.bench.target import listen
from kvik.cli import say_nothing_more
from kvik.ranges import Range
from kvik.selftest import hardware, report
from kvik.selftest.here import listen_in, preflight
from kvik.selftest.other import SelftestTarget
from kvik.selftest.plan import Asked, Plan, settle
from kvik.selftest.run import Results, execute
from kvik.selftest.sides import Session

INTERRUPTED = 130


def _say(text: str) -> None:
    try:
        click.echo(text)
        sys.stdout.flush()
    except OSError:
        # Who read the lines has left (`head`; at Ctrl-C `tee`), or a disk is full. The report is still made.
        say_nothing_more()


def _asked(given: dict[str, Any]) -> Asked:
    serve = given["serve"]
    if serve is not None:
        split_address(serve)
    return Asked(
        nics=given["nics"],
        transport=given["transport"],
        target=given["target"],
        listen=given["listen"] or (f"{serve.rpartition(':')[0]}:0" if serve is not None else None),
        seconds_per_point=float(given["seconds_per_point"]),
        max_bytes=kvik.parse_size(given["max_bytes"]),
        seed=secrets.randbits(32) if given["seed"] is None else int(given["seed"]),
    )


def _demand_sense(given: dict[str, Any]) -> None:
    if given["nics"] is not None and given["transport"] not in (None, "nics"):
        raise click.UsageError(
            f"--nics is for transport nics, and --transport {given['transport']} is another"
        )
    if given["serve"] is not None and given["target"] is not None:
        raise click.UsageError("--serve is the other side, and --target is this one: give one of them")
    if given["serve"] is not None and given["report"] is not None:
        raise click.UsageError("--serve writes no report: the side with --target does")


def _leave(status: int) -> NoReturn:
    """End. A part that was cut short may still be in its thread, and Python does not survive to be taken down
    under a thread that is inside the engine: so it is not. What this process started notices, and ends."""
    sys.stdout.flush()
    if any(thread.name.startswith("selftest-") for thread in threading.enumerate()):
        os._exit(status)
    sys.exit(status)


def _serve(address: str, plan: Plan) -> None:
    _say(f"transport {plan.transport}, NICs {plan.nics or 'none'}: {plan.why}")
    try:
        listen(
            address,
            plan.target_options(plan.listen),
            plan.secret,
            _say,
            SelftestTarget,
            "kvik selftest serves",
        )
    except KeyboardInterrupt:
        return


@click.command()
@click.option(
    "--nics",
    metavar="NICS",
    help="The NICs to test, as `kvik.Engine(nics=...)` takes them: efa, verbs, verbs:mlx5_0, libfabric:tcp.  "
    "[default: KVIK_NICS, else what the kernel has: efa, then verbs]",
)
@click.option(
    "--transport", type=click.Choice(["auto", "tcp", "local", "nics"]), help="Test this transport instead."
)
@click.option(
    "--target",
    metavar="HOST:PORT",
    help="Use the other side that `kvik selftest --serve` runs there, in place of a process of this host.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where this side's engine listens.  [default: loopback; else the address on the way to the target]",
)
@click.option("--serve", metavar="HOST:PORT", help="Be the other side, for one selftest after the other.")
@click.option(
    "--report",
    metavar="FILE",
    help="The report's JSON; a summary, FILE.md, goes beside it.  [default: kvik-selftest-DATE.json]",
)
@click.option(
    "--seconds-per-point",
    metavar="S",
    type=Range(0.01, 600.0),
    default=1.0,
    show_default=True,
    help="Seconds that each point of the sweep and of the grid is measured.",
)
@click.option(
    "--max-bytes",
    metavar="N",
    default="256MiB",
    show_default=True,
    help="Memory of either side, such as 1GiB.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Repeats the page ids of another run.")
def selftest(**given: Any) -> None:
    """See whether kvik works on this host's NICs, and how fast; write a report.

    Without --target the other side is a process of this host. With it, the other side is a `kvik selftest
    --serve` on another host, with the same KVIK_SECRET in its environment. There, HOST:PORT is this command's
    own control connection; its engine takes another port, which --listen names.

    Exit status: 0 all passed, 1 something failed, 2 it could not begin, 130 interrupted.
    """
    _demand_sense(given)
    try:
        plan = settle(_asked(given), hardware.ports())
        heard = listen_in()
        preflight(Session(plan))
        if given["serve"] is not None:
            _serve(given["serve"], plan)
            return
        files = report.files(given["report"])
    except (kvik.KvikError, BenchError, OSError) as error:
        raise click.UsageError(str(error)) from error
    results = Results(plan)
    status, where = 1, f"report in {files[0]}, summary in {files[1]}"
    with signals.noted() as interrupt:
        _say(f"kvik selftest, seed {plan.asked.seed}\n")
        execute(results, heard, _say, interrupt)
        try:
            report.write(results, files)
            status = INTERRUPTED if results.interrupted else 0 if results.passed else 1
        except OSError as error:
            where = f"the report is not whole: {error}"
    ended = "INTERRUPTED" if results.interrupted else "PASSED" if results.passed else "FAILED"
    _say(f"{ended}; {where}")
    _leave(status)
