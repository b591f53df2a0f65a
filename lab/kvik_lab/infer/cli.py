"""`kvik lab series` and `kvik lab compare`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval
from kvik_lab.infer.coincide import Coincidence, coincidence
from kvik_lab.infer.compare import Comparison, Conclusion, compare
from kvik_lab.infer.serial import mean_interval, naive_interval, serial
from kvik_lab.infer.states import states
from kvik_lab.infer.steady import Steady, examine
from kvik_lab.infer.table import Columns, Starts, read

Command = TypeVar("Command", bound=Callable[..., None])

WIDTH = 100
"""Columns that the table of segments takes: no number is cut in a narrower terminal."""
_FILE = click.Path(path_type=Path, dir_okay=False)


def _usage(command: Command) -> Command:
    """Errors of the lab become usage errors: exit status 2, and no traceback."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LabError as error:
            raise click.UsageError(str(error)) from error

    return guarded  # type: ignore[return-value]


def _shared(command: Command) -> Command:
    """Options that both commands have."""
    options = [
        click.option("--start", default="start", show_default=True, help="Column of the server start."),
        click.option("--iteration", default="iteration", show_default=True, help="Column of the iteration."),
        click.option("--value", default="value", show_default=True, help="Column of the value."),
        click.option("--block", default="block", show_default=True, help="Column of the block, if any."),
        click.option("--alpha", default=0.05, show_default=True, help="Error that a test may make."),
        click.option("--larger-is-better", is_flag=True, help="Values are rates, not times."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("series")
@click.argument("files", nargs=-1, required=True, type=_FILE)
@_shared
@_usage
def series_command(
    files: tuple[Path, ...],
    start: str,
    iteration: str,
    value: str,
    block: str,
    alpha: float,
    larger_is_better: bool,
    as_json: bool,
) -> None:
    """Find level changes, the steady state and its mean in series of iterations.

    Each FILE is CSV with the columns start, iteration and value. Changes that several series have are tested
    for falling together.
    """
    columns = Columns(start, iteration, value, block)
    tables = [read(path, columns) for path in files]
    found = [examine(t.values, not larger_is_better, alpha) for t in tables]
    together = _together(tables, found)
    if as_json:
        listed = [
            {"file": t.source, **_json_of(f), "whole": _whole(t)} for t, f in zip(tables, found, strict=True)
        ]
        _print_json({"files": listed, "coincidence": plain(together)})
        return
    console = Console(soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for table, result in zip(tables, found, strict=True):
        _show_series(console, table, result)
    if together is not None:
        at = ", ".join(map(str, together.together)) or "none"
        console.print(
            f"Changes within {together.window} of each other in all series that change: {at}; "
            f"by chance as near with p = {together.p:.3g}"
        )


def _together(tables: list[Starts], found: list[Steady]) -> Coincidence | None:
    """The test over all series that have changes, where two or more do, of one length."""
    changed = [s for f in found for s in f.starts if s.segmentation.changes]
    lengths = {s.segmentation.n for s in changed}
    if len(changed) < 2 or len(lengths) != 1 or not tables:
        return None
    return coincidence([[c.at for c in s.segmentation.changes] for s in changed], lengths.pop())


def _whole(table: Starts) -> dict[str, Any]:
    """Of each start over all its iterations: serial correlation, and the interval beside the naive one; None
    of fewer than three values, which have neither."""
    kinds: dict[str, Callable[[Floats], Any]] = {
        "serial": serial,
        "interval": mean_interval,
        "naive": naive_interval,
    }
    return {
        name: {kind: plain(of(row)) if len(row) > 2 else None for kind, of in kinds.items()}
        for name, row in table.values.items()
    }


def _show_series(console: Console, table: Starts, found: Steady) -> None:
    shown = Table(title=table.source, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("start", "class", "from", "to", "median", "low", "high", "change", "p", "begins"):
        shown.add_column(name, justify="left" if name in {"start", "class"} else "right", no_wrap=True)
    for start in found.starts:
        result = start.segmentation
        for i, segment in enumerate(result.segments):
            change = result.changes[i - 1] if i else None
            shown.add_row(
                start.name if not i else "",
                start.verdict.kind.value if not i else "",
                str(segment.start),
                str(segment.start + segment.length - 1),
                f"{segment.median:.6g}",
                "-" if segment.low is None else f"{segment.low:.6g}",
                "-" if segment.high is None else f"{segment.high:.6g}",
                "" if change is None else f"{change.percent:+.1f} %",
                "" if change is None else f"{change.p:.2g}",
                "" if change is None else f"{change.earliest}-{change.latest}",
            )
    console.print(shown)
    console.print(f"Class: {found.kind.value}")
    if found.settling is not None:
        console.print(f"All {found.settling.starts} starts together: {found.settling}")
    for state in states(found):
        share = f"{100 * state.share.estimate:.3g} % of iterations, in {state.starts} starts"
        console.print(f"State: {_interval(state.level)}; {share}")
    if found.headline is None:
        console.print(f"Mean: none. {found.why[0].upper()}{found.why[1:]}.")
    else:
        console.print(f"Mean: {_interval(found.headline)}: {found.why} ({found.headline.method})")
    if found.all_kept is not None:
        console.print(f"With all starts kept: {_interval(found.all_kept)}")


def _interval(found: Interval) -> str:
    if not math.isfinite(found.low):
        return f"{found.estimate:.6g}"
    return f"{found.estimate:.6g}, {100 * found.level:g} % interval {found.low:.6g} to {found.high:.6g}"


@click.command("compare")
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@click.option("--margin", type=float, help="Ratio within 1 +- this share counts as equal, such as 0.01.")
@click.option("--seed", default=1, show_default=True, help="For p-values that are drawn.")
@click.option(
    "--comparisons",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of which this is one: all their intervals hold together.",
)
@_shared
@_usage
def compare_command(
    a: Path,
    b: Path,
    margin: float | None,
    seed: int,
    comparisons: int,
    start: str,
    iteration: str,
    value: str,
    block: str,
    alpha: float,
    larger_is_better: bool,
    as_json: bool,
) -> None:
    """Compare B with A, the base: the ratio with its interval, and the verdict that it gives.

    Both files are CSV with the columns start, iteration and value. Where a column block says which starts ran
    together, starts are compared within blocks.
    """
    columns = Columns(start, iteration, value, block)
    found = compare(
        read(a, columns), read(b, columns), margin, alpha, not larger_is_better, seed, comparisons
    )
    if as_json:
        hidden = {"a", "b", "levels", "layout"}
        result = {f.name: plain(getattr(found, f.name)) for f in fields(found) if f.name not in hidden}
        result["test"] = plain(found.test)
        _print_json({**result, "a": _json_of(found.a), "b": _json_of(found.b)})
        return
    _show_comparison(Console(soft_wrap=True), found)


def _show_comparison(console: Console, found: Comparison) -> None:
    console.print(f"Compared as: {found.plan.value}")
    for name, side in (("A", found.a), ("B", found.b)):
        mean = side.why if side.headline is None else _interval(side.headline)
        console.print(f"{name}: {side.kind.value}; {mean}")
    for line in _warm_up(found):
        console.print(line)
    if found.ratio is not None:
        console.print(f"B / A: {_interval(found.ratio)} ({found.ratio.method})")
    if found.difference is not None:
        console.print(f"B - A: {_interval(found.difference)}")
    if found.odd:
        console.print(f"Left out as odd: {', '.join(found.odd)}")
    if found.all_kept is not None:
        console.print(f"With all starts kept: {_interval(found.all_kept)}")
    if found.p is not None:
        console.print(f"p = {found.p:.4g}; exact test: {_exact(found)}")
    console.print(f"Conclusion: {found.conclusion.value}")
    if found.conclusion is Conclusion.UNDECIDED:
        console.print(f"What would decide it: {_needed(found)}")
    for note in found.notes:
        console.print(f"Note: {note}")


def _warm_up(found: Comparison) -> list[str]:
    """What was left out of every start, and of those that are too few to share a warm-up."""
    told = [f"Warm-up left out of every start: {found.cut} iterations"] if found.cut else []
    own = max(found.a.left_out, found.b.left_out)
    if own > found.cut:
        told.append(f"Warm-up left out of each start by itself: up to {own} iterations")
    return told


def _exact(found: Comparison) -> str:
    if found.exact_p is None:
        return f"cannot reject with {found.starts} starts; {found.exact_starts} could"
    return f"p = {found.exact_p:.4g}"


def _needed(found: Comparison) -> str:
    needed = found.would_decide()
    if needed is None:
        return "over 500 starts each, if the difference is the one measured; or a margin (--margin)"
    return f"{needed.starts} starts each, if the difference is the one measured (power {needed.power:.2f})"


def _json_of(found: Steady) -> dict[str, Any]:
    """A result without the raw values, which the file has."""
    starts = [
        {"start": s.name, "segmentation": plain(s.segmentation), "verdict": plain(s.verdict)}
        for s in found.starts
    ]
    names = ("kind", "settling", "odd", "headline", "all_kept", "why")
    rest = {name: plain(getattr(found, name)) for name in names}
    return {**rest, "states": plain(states(found)), "starts": starts}


def plain(value: Any) -> Any:
    """Results as what JSON has: objects, lists, numbers, null for what is not a number."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
