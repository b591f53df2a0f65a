"""From the journal of a study through `kvik lab table` to the commands that take its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from pydantic import JsonValue

from kvik_lab import cli
from kvik_lab.design.effects_cli import study_effects
from kvik_lab.design.from_study import Options, plan_study
from kvik_lab.design.pilot import read_pilot
from kvik_lab.errors import LabError
from kvik_lab.records import Figure, Key, Node, Place, RunRecord, Times, append
from kvik_lab.records.cli import rows
from kvik_lab.report.codec import from_json
from kvik_lab.report.figures import RunOrder
from kvik_lab.report.read import Choice
from kvik_lab.report.read import read as read_data
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import Study, load_study
from tests.lab.test_records import record, request

SEED = 21
LINKS, STARTS, ITERATIONS = ("old", "new"), 5, 12
FASTER = 0.7
STUDY = """\
study: links
unit: {model: llama-3.1-8b}
factors:
  link: {levels: [old, new], restart: true}
  tokens: {levels: [1000, 4000], scale: log2}
model: log(ttft) ~ link + tokens
design: {kind: split-plot, runs: 4, starts: 10, blocks: 5, seed: 1}
"""


def invoke(*arguments: object) -> str:
    """What `kvik lab` prints, which has gone well."""
    done = CliRunner().invoke(cli.lab, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Starts in blocks, at times and places of their own, each at two sizes; one request failed, one answer
    has one token and no pace, and one run was lost."""
    rng = np.random.default_rng(SEED)
    file = tmp_path / "runs.jsonl"
    for start in range(len(LINKS) * STARTS):
        link, began = LINKS[start % 2], (1_800_000_000 + 600 * start) * 10**9
        level = 0.2 * (FASTER if link == "new" else 1.0) * (1 + 0.01 * rng.standard_normal())
        facts: dict[str, JsonValue] = {"host": f"n{start % 3}", "cpu": "Some CPU"}
        for at, tokens in enumerate((1000, 4000)):
            times = level * tokens / 1000 * (1 + 0.02 * rng.standard_normal(ITERATIONS))
            sent = [request(i, 1.0, time, 1.1 * time) for i, time in enumerate(times)]
            if start == 3 and not at:
                sent[4] = sent[4].model_copy(update={"error": "HTTP 500: x", "status": 500})
                sent[5] = request(5, 1.0, times[5])
            lost = start == 6 and at == 1
            one = record(
                2 * start + at, levels={"link": link, "tokens": tokens}, requests=() if lost else tuple(sent),
                outcome="lost" if lost else "completed", key=Key(configuration={}, code={"kvik": "1.2.3"}),
                place=Place(order=2 * start + at, start=f"s{start}", group=f"g{start // 2}"),
                times=Times(began=began, ended=began + 10**9), nodes=(Node(name="local", facts=facts),),
            )  # fmt: skip
            append(file, one)
    return file


@pytest.fixture
def written(journal: Path) -> Path:
    """The table of TTFT."""
    out = journal.with_name("ttft.csv")
    told = invoke("table", journal, "--out", out)
    assert f"{(2 * len(LINKS) * STARTS - 1) * ITERATIONS - 1} values" in told
    assert "and 2 without a value" in told
    return out


def test_the_table_says_what_its_values_are_in(written: Path, journal: Path) -> None:
    frame = pd.read_csv(written)
    names = "start block run iteration value unit link tokens when where kvik_version"
    assert list(frame.columns) == names.split()
    assert set(frame["unit"]) == {"s"}
    assert sorted(word for word in frame["value"] if word[0].isalpha()) == ["failed", "failed"]
    for metric, unit in (("tpot", "s"), ("output_rate", "tokens/s"), ("throughput", "requests/s")):
        invoke("table", journal, "--metric", metric, "--out", journal.with_name("t.csv"))
        assert set(pd.read_csv(journal.with_name("t.csv"))["unit"]) == {unit}


def test_figures_in_several_units_are_no_table() -> None:
    both = tuple(Figure(metric="moved", unit=unit, value=2.0) for unit in ("bytes", "s"))
    with pytest.raises(LabError, match="moved is in bytes and in s; make a table of the runs of each unit"):
        rows([record(0, requests=(), figures=both)], "moved")
    assert set(rows([record(0, requests=(), figures=both[:1])], "moved")["unit"]) == {"bytes"}


@pytest.mark.parametrize("name", ["unit", "block", "run", "when"])
def test_a_factor_with_the_name_of_a_column_is_refused(name: str) -> None:
    with pytest.raises(LabError, match=f"a factor is called '{name}', (as|and so is) a column of the table"):
        rows([record(0, levels={name: "a"})], "ttft")


def test_a_pilot_takes_the_starts_of_a_configuration_together(written: Path) -> None:
    told = json.loads(
        invoke("pilot", written, "--cost-restart", 60, "--cost-iteration", 1, "--halfwidth", 0.1, "--json")
    )
    assert told["components"]["configurations"] == 4
    assert told["components"]["starts"] == 4 * STARTS - 1
    assert told["components"]["iterations"] == (4 * STARTS - 1) * ITERATIONS - 1
    assert told["notes"] == [
        "rows without a value are left out: 2 failed",
        "starts differ in where, and what that does is in the variance between them",
    ]


def test_effects_take_the_column_of_values_and_leave_words_out(written: Path, journal: Path) -> None:
    study = written.with_name("links.yaml")
    study.write_text(STUDY)
    told = json.loads(invoke("effects", study, written, "--json"))
    (link,) = (one for one in told["effects"] if one["contrast"].startswith("link"))
    assert link["low"] < FASTER < link["high"], f"seed {SEED}"
    assert told["runs"] == 4 * STARTS - 1
    notes = ["ttft is what the column 'value' has", "rows without a value are left out: 2 failed"]
    assert told["notes"] == notes
    pace = journal.with_name("tpot.csv")
    invoke("table", journal, "--metric", "tpot", "--out", pace)
    last = json.loads(invoke("effects", study, pace, "--value", "value", "--json"))["notes"][-1]
    assert last == "rows without a value are left out: 2 failed, 1 not measured"


def ran(study: Study) -> list[RunRecord]:
    """The runs of a study's plan, four requests each, as if nothing had an effect."""
    rng = np.random.default_rng(SEED)
    return [
        record(
            slot.order, levels=slot.levels,
            place=Place(order=slot.order, start=start.name, group=start.group),
            requests=tuple(request(i, 1.0, rng.uniform(1, 2), 3.0) for i in range(4)),
        )
        for start in plan_slots(study) for slot in start.slots
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_row_that_the_plan_has_several_times_is_as_many_runs(tmp_path: Path, blocks: int) -> None:
    """Its replicates are what effects are judged by; requests of one run are not."""
    file = tmp_path / "twice.yaml"
    file.write_text(
        "study: twice\nunit: {model: llama-3.1-8b}\nfactors: {a: {levels: [x, y]}, b: {levels: [1, 2]}}\n"
        "model: log(ttft) ~ a*b\n"
        f"design: {{kind: d-optimal, runs: 12, starts: {blocks}, blocks: {blocks}}}\n"
    )
    study = load_study(file)
    records = ran(study)
    frame = rows(records, "ttft")
    assert sorted(frame["run"].unique()) == [0, 1, 2]
    found = study_effects(study, frame)
    planned = {one.contrast: one.df for one in plan_study(study, Options()).powers}
    assert found.runs == 12 * blocks
    assert {one.contrast: one.df for one in found.effects} == planned, f"seed {SEED}"
    assert set(planned.values()) == {12 * blocks - 3 - blocks}
    written = tmp_path / "twice.csv"
    frame.to_csv(written, index=False)
    assert "run" not in (data := read_data([written], Choice())).others
    assert data.arm == "a"
    groups, _ = read_pilot(frame.assign(start=frame["start"] + "x").pipe(lambda x: pd.concat([x, frame])))
    assert [[len(one) for one in group] for group in groups] == [[12] * 2 * blocks] * 4


RELEASES = """\
study: releases
unit: {model: llama-3.1-8b}
factors:
  release: {levels: ["0.9", "0.10"]}
  cache: {levels: ["None", "NA", "null"]}
  size: {levels: [1, 2], within: {release: "0.10"}}
  pinned: {levels: [true, false]}
model: log(ttft) ~ release/size + cache + pinned
design: {kind: full, starts: 2}
"""


def test_levels_that_look_like_numbers_or_like_nothing_are_fitted(tmp_path: Path) -> None:
    file = tmp_path / "releases.yaml"
    file.write_text(RELEASES)
    study = load_study(file)
    records = ran(study)
    written = tmp_path / "releases.csv"
    rows(records, "ttft").to_csv(written, index=False)
    told = json.loads(invoke("effects", file, written, "--json"))
    assert [one["contrast"] for one in told["effects"]] == [
        "release: 0.10 vs 0.9", "cache: NA vs None", "cache: null vs None", "size: 2 vs 1",
        "pinned: False vs True",
    ]  # fmt: skip
    assert (told["runs"], told["starts"]) == (len(records), 2)
    found = json.loads(invoke("pilot", written, "--cost-restart", 60, "--cost-iteration", 1, "--json"))
    assert found["components"]["configurations"] == len(records) // 2
    first = study.candidates().iloc[:6]
    first.to_csv(tmp_path / "ran.csv", index_label="id")
    planned = json.loads(invoke("plan", file, "--ran", tmp_path / "ran.csv", "--add", 9, "--json"))
    assert [row["cache"] for row in planned["rows"][:6]] == list(first["cache"])


def test_of_words_alone_there_are_no_effects(written: Path) -> None:
    frame = pd.read_csv(written)
    frame["value"] = "failed"
    frame.to_csv(written, index=False)
    study = written.with_name("links.yaml")
    study.write_text(STUDY)
    done = CliRunner().invoke(cli.lab, ["effects", str(study), str(written)])
    assert done.exit_code == 2
    assert "no row has a value of ttft; rows without a value are left out: " in " ".join(done.output.split())


def test_a_report_labels_values_by_the_unit_of_the_table(written: Path) -> None:
    out = written.with_name("r.json")
    invoke("report", written, "--arm", "link", "--json", out)
    made = from_json(out.read_text())
    (cells,) = (table for section in made.sections for table in section.tables if table.id == "cells")
    assert "mean, s" in cells.columns
    labels = [
        figure for section in made.sections for figure in section.figures if isinstance(figure, RunOrder)
    ]
    assert {figure.y for figure in labels} == {"value, s"}
    assert not any("unit was" in text for section in made.sections for text in section.text)
    invoke("report", written, "--arm", "link", "--unit", "s", "--json", out)
    done = CliRunner().invoke(cli.lab, ["report", str(written), "--unit", "ms", "--json", str(out)])
    assert done.exit_code == 2
    assert "values are in s, and --unit says ms; leave --unit out" in " ".join(done.output.split())
