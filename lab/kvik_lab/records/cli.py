"""`kvik lab table`: one metric of a journal as CSV, for the commands that compare, fit and report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
import pandas as pd

from kvik_lab.errors import LabError
from kvik_lab.records.files import read
from kvik_lab.records.schema import Node, RunRecord
from kvik_lab.records.table import COLUMNS, table, unit

_PATH = click.Path(path_type=Path)
WORDS = {"invalid": "not measured", "lost": "failed", "cancelled": "failed"}
"""What reports call a reason that records name otherwise."""


@click.command()
@click.argument("journals", nargs=-1, required=True, type=_PATH)
@click.option("--metric", default="ttft", show_default=True, help="Of a request or of a run, such as tpot.")
@click.option("--out", type=_PATH, required=True, help="File for the table.")
@click.option("--anchors", is_flag=True, help="With the runs of the anchor, which are there to see drift.")
def table_command(journals: tuple[Path, ...], metric: str, out: Path, anchors: bool) -> None:
    """Write one METRIC of JOURNALS (files of run records, such as runs.jsonl) as CSV, a row a value.

    The columns are start, block, run, iteration, value, unit, a column a factor, and of each run when and
    where it was, the versions of its programs, and which gates call it suspect. Times are in seconds. What
    was not completed or is invalid has a word in place of its value. Of several journals starts and blocks
    are told apart by the journal's number: 2/s1.
    """
    try:
        frame = rows(read(journals), metric, anchors=anchors)
        frame.to_csv(out, index=False)
    except (LabError, OSError) as error:
        raise click.UsageError(str(error)) from error
    known = int(pd.to_numeric(frame["value"], errors="coerce").notna().sum())
    rest = f", and {len(frame) - known} without a value" if known < len(frame) else ""
    click.echo(f"{known} values of {metric} in {out}{rest}")


def rows(records: Sequence[RunRecord], metric: str, *, anchors: bool = False) -> pd.DataFrame:
    """The table that `kvik lab report`, `pilot` and `effects` take. Iterations count through all runs of a
    combination in a start, and `run` numbers these from 0. Raises `LabError` for a factor with the name of
    another column."""
    frame = table(records, metric)
    if not anchors:
        frame = frame[~frame["anchor"].astype(bool)]
    factors = [name for name in frame.columns if name not in COLUMNS]
    found = pd.DataFrame({"start": frame["start"], "block": frame["group"]})
    together = frame.groupby(["start", *factors], dropna=False)
    found["run"] = together["run"].transform(lambda ids: pd.factorize(ids)[0])
    found["iteration"] = together.cumcount()
    missing = frame["missing"].map(lambda why: WORDS.get(why, why))
    found["value"] = frame["value"].astype(object).where(frame["value"].notna(), missing)
    if (measured_in := unit(records, metric)) is not None:
        found["unit"] = measured_in
    told = {record.id: facts(record) for record in records}
    named = dict.fromkeys(name for one in told.values() for name in one)
    for name in factors:
        if name in found or name in named:
            raise LabError(f"a factor is called {name!r}, as a column of the table is; rename it")
        found[name] = frame[name]
    for name in named:
        found[name] = frame["run"].map(lambda run, name=name: told[run].get(name, ""))
    return found.drop(columns="block") if found["block"].isna().any() else found


def facts(record: RunRecord) -> dict[str, str]:
    """When a run was (UTC, to the minute), on what machines, with which versions, and which gates call it
    suspect: by the columns that `kvik lab report` takes them from."""
    began = datetime.fromtimestamp(record.times.began / 1e9, UTC)
    machines = dict.fromkeys(filter(None, map(_machine, record.nodes)))
    emulated = emulation(record)
    doubted = [one.gate for one in record.findings if one.status == "suspect"]
    return {
        "when": f"{began:%Y-%m-%d %H:%M} UTC",
        "where": "; ".join(machines),
        **{f"{program}_version": version for program, version in record.key.code.items()},
        **({"emulated": emulated} if emulated else {}),
        **({"suspect": " ".join(doubted)} if record.verdict == "suspect" else {}),
    }


def emulation(record: RunRecord) -> str:
    """What of a run was emulated, so that its figures are not those of hardware; empty where nothing was."""
    run = record.key.configuration.get("run")
    driver = run.get("driver") if isinstance(run, dict) else None
    found = dict.fromkeys(["engines without a model"] if driver == "emulator" else [])
    found |= dict.fromkeys(str(node.facts["emulated"]) for node in record.nodes if node.facts.get("emulated"))
    return ", ".join(found)


def _machine(node: Node) -> str:
    """A machine in a few words: its name, its CPU, how many cores may be used, its kernel."""
    known = node.facts
    cores = known.get("cores_usable")
    parts = [known.get("cpu"), cores and f"{cores} cores", known.get("kernel") and f"Linux {known['kernel']}"]
    said = ", ".join(str(part) for part in parts if part)
    return f"{known['host']} ({said})" if said and "host" in known else said
