"""`kvik lab run`, `kvik lab resume` and `kvik lab status`."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from kvik_lab.errors import LabError
from kvik_lab.run.build import PlannedStart, resolve
from kvik_lab.run.control import Control
from kvik_lab.run.journal import Journal, is_running
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import Study, load_study
from kvik_lab.tracking.beside import beside

FAILED, INVALID, INTERRUPTED = 1, 3, 130

_STUDY = click.argument("study", type=click.Path(path_type=Path))
_OUT = click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the journal; by default the study's name + `.runs`.",
)


_ONLY = click.option(
    "--only",
    multiple=True,
    metavar="FACTOR=LEVEL",
    help="Only starts with this level, of a factor that takes a restart; repeatable.",
)


def _uri(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """What is taken for a URI and is none is the word after the option."""
    if value and ":" not in value:
        raise click.BadParameter(f"{value!r} is no URI; write --mlflow=URI, or --mlflow after STUDY")
    return value


_MLFLOW = click.option(
    "--mlflow",
    is_flag=False,
    flag_value="",
    metavar="[URI]",
    callback=_uri,
    is_eager=True,
    help="Bring each run into MLflow: by default MLFLOW_TRACKING_URI, or mlflow.db in the journal's folder.",
)


@click.command()
@_STUDY
@_OUT
@_ONLY
@_MLFLOW
def run(study: Path, out: Path | None, only: tuple[str, ...], mlflow: str | None) -> None:
    """Run STUDY: start its servers as planned, send each load, judge each run, and write all of it down.

    The journal is a folder; an interrupted study goes on with `kvik lab resume`, and so does one of which
    --only ran a part, such as what is to be measured before hardware is moved. Ends with 0 when every
    run counts, 3 when all were completed and some are invalid, 1 when some failed, and 130 when it was
    interrupted.
    """
    _go(study, out, only, mlflow, resume=False)


@click.command()
@_STUDY
@_OUT
@_ONLY
@_MLFLOW
def resume(study: Path, out: Path | None, only: tuple[str, ...], mlflow: str | None) -> None:
    """Go on with STUDY where it was interrupted: what is not completed is run, in the order of the plan,
    and of each start what failed before comes last.

    Exit statuses are those of `kvik lab run`.
    """
    _go(study, out, only, mlflow, resume=True)


@click.command()
@_STUDY
@_OUT
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(study: Path, out: Path | None, as_json: bool) -> None:
    """Say how far STUDY is. Exit statuses are those of `kvik lab run`; 4 where runs are still to be done."""
    try:
        loaded, starts = _planned(study)
        journal = Journal(folder_of(loaded, out))
        journal.load()
        found = _status(journal, starts)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        state = "runs" if found["running"] else "is not running"
        counts = ", ".join(f"{number} {name}" for name, number in found["runs"].items()) or "none yet"
        click.echo(f"{loaded.name}: {found['done']} of {found['planned']} runs are completed; it {state}")
        click.echo(f"runs: {counts}; replicates of a configuration: {found['replicates']}")
        for line in found["problems"]:
            click.echo(line)
    sys.exit(4 if found["done"] < found["planned"] and not found["failed"] else _exit_status(journal, starts))


def folder_of(study: Study, out: Path | None) -> Path:
    """Where the journal of a study is."""
    return out if out is not None else Path(f"{study.name}.runs")


def _planned(path: Path) -> tuple[Study, tuple[PlannedStart, ...]]:
    study = load_study(path)
    return study, resolve(study, plan_slots(study))


def chosen(study: Study, starts: tuple[PlannedStart, ...], only: tuple[str, ...]) -> tuple[PlannedStart, ...]:
    """The starts that have these levels. Raises `LabError` for what names no level of a factor that takes a
    restart."""
    for text in only:
        name, _, wanted = text.partition("=")
        factor = next((one for one in study.factors if one.name == name and one.hard), None)
        if factor is None:
            known = ", ".join(one.name for one in study.factors if one.hard) or "none"
            raise LabError(f"--only {text}: no factor {name!r} takes a restart; those that do: {known}")
        level = next((one for one in factor.levels if str(one) == wanted), None)
        if level is None:
            levels = ", ".join(map(str, factor.levels))
            raise LabError(f"--only {text}: {name} has no such level; its levels: {levels}")
        starts = tuple(one for one in starts if all(run.slot.levels.get(name) == level for run in one.runs))
    return starts


def _go(path: Path, out: Path | None, only: tuple[str, ...], mlflow: str | None, *, resume: bool) -> None:
    again = shlex.join(["kvik", "lab", "resume", str(path), *([] if out is None else ["--out", str(out)])])
    try:
        study, starts = _planned(path)
        starts = chosen(study, starts, only)
        text = path.read_text(encoding="utf-8-sig")
        with (
            Journal.opened(folder_of(study, out), text, resume=resume) as journal,
            beside(journal, study.name, mlflow, click.echo) as around,
        ):
            _do(Control(study, starts, journal, click.echo, around=around), again)
    except LabError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        click.echo(f"interrupted; every process has ended. Go on with: {again}", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(_exit_status(journal, starts))


def _do(control: Control, again: str) -> None:
    """All that is not done. A disk that is full ends it: what is run from there on would not be kept."""
    try:
        control.run()
    except BrokenPipeError:
        raise  # who read what is said here has left
    except OSError as error:
        slots = [one.slot for start in control.starts for one in start.runs]
        done = sum(control.journal.done(slot.id) for slot in slots)
        raise click.ClickException(
            f"{error.filename or control.journal.folder}: {error.strerror or error}; every process has "
            f"ended. {done} of {len(slots)} runs are completed, and kept in {control.journal.file}. Mend "
            f"that (make room on a disk that is full), and go on with: {again}"
        ) from error


def _exit_status(journal: Journal, starts: tuple[PlannedStart, ...]) -> int:
    records = [journal.records.get(one.slot.id) for start in starts for one in start.runs]
    if any(record is None or record.outcome != "completed" for record in records):
        return FAILED
    return INVALID if any(record is not None and record.verdict == "invalid" for record in records) else 0


def _status(journal: Journal, starts: tuple[PlannedStart, ...]) -> dict[str, Any]:
    slots = [one.slot for start in starts for one in start.runs]
    records = [journal.records[slot.id] for slot in slots if slot.id in journal.records]
    states = Counter(
        one.verdict or "not judged" if one.outcome == "completed" else one.outcome for one in records
    )
    keys = Counter(one.key.digest() for one in records if one.outcome == "completed")
    problems = [
        f"{one.id}: {one.outcome}: {(one.error or '').splitlines()[0]}" for one in records if one.error
    ]
    problems += [
        f"{one.id}: {one.verdict}: {finding.gate}: {finding.what}"
        for one in records
        for finding in one.findings
        if finding.status in ("invalid", "suspect")
    ]
    replicates = f"{min(keys.values())} to {max(keys.values())}" if keys else "none"
    return {
        "running": is_running(journal.folder),
        "planned": len(slots),
        "done": sum(journal.done(slot.id) for slot in slots),
        "failed": sum(one.outcome != "completed" for one in records),
        "runs": dict(states),
        "replicates": replicates,
        "problems": problems,
    }
