"""What a move of hardware has changed, beside what `kvik doctor` predicts of it: `kvik lab predicted`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvik.doctor import Machine, RecordingError, Traffic, examine
from kvik.doctor import load as load_recording
from kvik.doctor.cost import MODELS, change
from kvik_lab.errors import LabError
from kvik_lab.report.look import Compared, Rules, compare_all, settle_arms
from kvik_lab.report.read import Choice, Data, read

_FILE = click.Path(path_type=Path, dir_okay=False)
UNIT = "tokens/s"


@dataclass(frozen=True)
class Row:
    """One condition: per cent of tokens a second that the move has changed, by measurement and by the doctor.

    `low` and `high` bound it; those of all rows hold together. `why` says why a number is not there."""

    model: str
    tp: int
    pp: int
    measured: float | None
    low: float | None
    high: float | None
    predicted: float | None
    why: str

    @property
    def verdict(self) -> str:
        """What the interval says of the prediction."""
        if self.predicted is None or self.low is None or self.high is None:
            return self.why or "not comparable"
        if self.low <= self.predicted <= self.high:
            return "the interval holds the prediction"
        if self.low <= 0 <= self.high:
            return "no change is shown, and the prediction is outside"
        same = self.predicted * (self.measured or 0.0) > 0
        return "outside, of the same direction" if same else "outside, of the other direction"


@dataclass(frozen=True)
class Columns:
    """Of the data: which say the model, TP and PP."""

    model: str
    tp: str
    pp: str


def rows(
    data: Data, base: str, machines: tuple[Machine, Machine], columns: Columns, batch: int, alpha: float
) -> list[Row]:
    """Every condition of the data.

    Raises `LabError` for a column that is not there, for values of something else than tokens a second, and
    where more varies than a line names."""
    if data.unit not in (None, UNIT):
        raise LabError(
            f"the values are in {data.unit}, and the prediction is of {UNIT}: --metric output_rate"
        )
    for name, usual in ((columns.model, None), (columns.tp, "tp"), (columns.pp, "pp")):
        if name not in data.constant and name not in data.others and name != usual:
            raise LabError(f"the data have no column {name!r}; name the right one, or add it")
    for at, name in enumerate(data.others):
        if name not in (columns.model, columns.tp, columns.pp) and len({c[at] for c in data.conditions}) > 1:
            raise LabError(f"the data vary in {name}, too, which no line names; take one level of it")
    rules = Rules(unit=UNIT, base=base, alpha=alpha, smaller_is_better=False)
    compared = compare_all(data, base, rules, settle_arms(data))
    found = [_row(one, data, machines, columns, batch) for one in compared]
    return sorted(found, key=lambda one: (one.model, one.tp, one.pp))


def _row(one: Compared, data: Data, machines: tuple[Machine, Machine], columns: Columns, batch: int) -> Row:
    levels = {**data.constant, **dict(zip(data.others, one.condition, strict=True))}
    name, tp, pp = levels[columns.model], _whole(levels, columns.tp), _whole(levels, columns.pp)
    model = next((known for known in MODELS if known.name.lower() == name.lower()), None)
    predicted, why = None, one.why
    if model is None:
        why = f"the doctor's cost model has no {name}"
    else:
        predicted = change(*machines, Traffic(tp=tp, pp=pp, batch=batch, model=model))
        why = why if predicted is not None else "no path from a GPU to a NIC is in a recording"
    ratio = one.ratio
    percents = [
        None if not isinstance(value, int | float) else (value - 1) * 100
        for value in (ratio.value, ratio.low, ratio.high)
    ]
    return Row(name, tp, pp, percents[0], percents[1], percents[2], predicted, why)


def _whole(levels: Mapping[str, str], column: str) -> int:
    text = levels.get(column, "1")
    try:
        return int(float(text))
    except ValueError as error:
        raise LabError(f"column {column!r} has {text!r}, which is no number of hosts") from error


def lines(found: list[Row], arm: str, base: str, emulated: str | None) -> list[str]:
    """For people."""
    told = [f"emulated ({emulated}): what is measured here is not what hardware does"] if emulated else []
    told.append(f"tokens a second, {arm} against {base}; the intervals hold together")
    told.append(f"{'model':<16}{'TP':>3}{'PP':>3}{'measured':>11}   {'interval':<22}{'doctor':>9}   ")
    for one in found:
        interval = "none" if one.low is None else f"{one.low:+.2f} to {one.high:+.2f} %"
        told.append(
            f"{one.model:<16}{one.tp:>3}{one.pp:>3}{_percent(one.measured):>11}   {interval:<22}"
            f"{_percent(one.predicted):>9}   {one.verdict}"
        )
    return told


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:+.2f} %"


@click.command("predicted")
@click.argument("data", type=_FILE)
@click.option("--before", type=_FILE, required=True, help="Recording of a host before: `kvik doctor --save`.")
@click.option("--after", type=_FILE, required=True, help="Recording of it afterwards.")
@click.option("--arm", default="move", show_default=True, help="Column of what was moved, of two levels.")
@click.option("--base", default="before", show_default=True, help="Its level before the move.")
@click.option("--model", default="llm", show_default=True, help="Column of the model.")
@click.option("--tp", default="tp", show_default=True, help="Column of the hosts of tensor parallelism.")
@click.option("--pp", default="pp", show_default=True, help="Column of the stages of pipeline parallelism.")
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True, help="Sequences at once.")
@click.option("--alpha", default=0.05, show_default=True, help="Error rate of all intervals together.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def predicted_command(
    data: Path,
    before: Path,
    after: Path,
    arm: str,
    base: str,
    model: str,
    tp: str,
    pp: str,
    batch: int,
    alpha: float,
    as_json: bool,
) -> None:
    """Compare tokens a second before and after a move of hardware, in DATA, with the doctor's prediction.

    DATA is CSV as `kvik lab table --metric output_rate` writes it. One line a model, TP and PP: what was
    measured, with its interval, what the doctor predicts of both recordings, and what the interval says of
    that.
    """
    try:
        table = read([data], Choice(arm=arm))
        if base not in table.arms or len(table.arms) != 2:
            raise LabError(f"{arm} has the levels {', '.join(table.arms)}; it takes {base} and another one")
        machines = (examine(load_recording(before)), examine(load_recording(after)))
        found = rows(table, base, machines, Columns(model, tp, pp), batch, alpha)
    except (LabError, RecordingError) as error:
        raise click.UsageError(str(error)) from error
    emulated = table.facts.get("emulated")
    if as_json:
        told = [{**asdict(one), "verdict": one.verdict} for one in found]
        click.echo(json.dumps({"emulated": emulated, "rows": told}, indent=1))
        return
    other = next(one for one in table.arms if one != base)
    click.echo("\n".join(lines(found, other, base, emulated)))
