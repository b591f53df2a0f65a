"""What a move has changed beside what the doctor predicts: of known effects, and of data that cannot say."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvik.doctor import Traffic, examine, load
from kvik.doctor.cost import MODELS, change
from kvik_lab import cli
from kvik_lab.run.build import resolve
from kvik_lab.run.cli import chosen
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import load_study
from tests.docs.pages import ROOT

EXAMPLES = ROOT / "lab" / "kvik_lab" / "study" / "examples"
STUDY = EXAMPLES / "hardware-move.yaml"
BEFORE, AFTER = (EXAMPLES / f"hardware-move-{name}.json" for name in ("before", "after"))
COLUMNS = ("start", "iteration", "value", "move", "llm", "tp", "pp", "emulated")


def predicted(model: str, tp: int, pp: int, batch: int) -> float:
    """Per cent."""
    chosen_model = next(one for one in MODELS if one.name == model)
    machines = [examine(load(path)) for path in (BEFORE, AFTER)]
    found = change(machines[0], machines[1], Traffic(tp=tp, pp=pp, batch=batch, model=chosen_model))
    assert found is not None
    return found


def measured(path: Path, effects: dict[tuple[str, int, int], float], emulated: str = "") -> Path:
    """A table of runs in which the move had these effects, per cent."""
    rng = random.Random(7)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for (model, tp, pp), percent in effects.items():
            for move in ("before", "after"):
                for start in range(5):
                    level = 100 * (1 + percent / 100 * (move == "after")) * rng.gauss(1, 0.001)
                    for at in range(10):
                        value = level * rng.gauss(1, 0.001)
                        name = f"{move}-{model}-{tp}-{pp}-{start}"
                        writer.writerow((name, at, f"{value:.5f}", move, model, tp, pp, emulated))
    return path


def asked(data: Path, *more: str) -> Result:
    """The command."""
    words = ["predicted", str(data), "--before", str(BEFORE), "--after", str(AFTER), *more]
    return CliRunner().invoke(cli.lab, words)


def test_effects_are_found_again_beside_the_prediction(tmp_path: Path) -> None:
    """One that is as predicted, one that is larger, one that goes the other way."""
    right = predicted("Llama-3.2-1B", 2, 1, 8)
    effects = {("Llama-3.2-1B", 2, 1): right, ("Llama-3-8B", 4, 1): 30.0, ("Llama-3-8B", 2, 2): -9.0}
    data = measured(tmp_path / "rate.csv", effects)
    told = json.loads(asked(data, "--batch", "8", "--json").output)
    assert told["emulated"] is None
    found = {(one["model"], one["tp"], one["pp"]): one for one in told["rows"]}
    assert found.keys() == effects.keys()
    for key, percent in effects.items():
        assert found[key]["measured"] == pytest.approx(percent, abs=0.5)
        assert found[key]["low"] < found[key]["measured"] < found[key]["high"]
        assert found[key]["predicted"] == pytest.approx(predicted(*key, 8))
    assert found["Llama-3.2-1B", 2, 1]["verdict"] == "the interval holds the prediction"
    assert found["Llama-3-8B", 4, 1]["verdict"] == "outside, of the same direction"
    assert found["Llama-3-8B", 2, 2]["verdict"] == "outside, of the other direction"
    assert "Llama-3.2-1B      2  1" in asked(data, "--batch", "8").output


def test_what_is_emulated_is_said_first(tmp_path: Path) -> None:
    """Here and in the report, whose first sentence is what is passed on."""
    what = "engines without a model"
    data = measured(tmp_path / "rate.csv", {("Llama-3-8B", 2, 1): 5.0}, what)
    assert asked(data).output.startswith(f"emulated ({what}): ")
    out = str(tmp_path / "report.json")
    words = ["report", str(data), "--arm", "move", "--larger-is-better", "--unit", "tokens/s", "--json", out]
    told = CliRunner().invoke(cli.lab, words)
    assert told.exit_code == 0, told.output
    first = json.loads(Path(out).read_text(encoding="utf-8"))["answer"]["sentence"]
    assert first.startswith(f"Emulated ({what}), so not what hardware does: after is ")


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    """A model that the doctor has no figures of is said; a table of something else is refused."""
    data = measured(tmp_path / "rate.csv", {("Other-1B", 2, 1): 5.0})
    assert "the doctor's cost model has no Other-1B" in asked(data).output
    wrong = asked(data, "--arm", "llm")
    assert (wrong.exit_code, "llm has the levels Other-1B" in wrong.output) == (2, True), wrong.output
    nameless = asked(data, "--model", "none")
    assert (nameless.exit_code, "no column 'none'" in nameless.output) == (2, True), nameless.output
    stages = asked(data, "--pp", "stages")  # else every prediction would be of one stage
    assert (stages.exit_code, "no column 'stages'" in stages.output) == (2, True), stages.output


@pytest.mark.parametrize(
    ("column", "levels", "said"),
    [
        ("unit", ("s", "s"), "the values are in s, and the prediction is of tokens/s"),
        ("users", ("8", "16"), "the data vary in users, too, which no line names"),
    ],
)
def test_a_table_of_something_else_is_refused(
    tmp_path: Path, column: str, levels: tuple[str, str], said: str
) -> None:
    data = measured(tmp_path / "rate.csv", {("Llama-3-8B", 2, 1): 5.0})
    first, *rows = data.read_text().splitlines()
    data.write_text(
        "\n".join([f"{first},{column}", *(f"{row},{levels[at % 2]}" for at, row in enumerate(rows))])
    )
    told = asked(data)
    assert (told.exit_code, said in " ".join(told.output.split())) == (2, True), told.output


def test_the_ready_study_before_and_after() -> None:
    """`--only` takes whole starts of a level, and every combination of hosts that there are."""
    study = load_study(STUDY)
    starts = resolve(study, plan_slots(study))
    parts = [chosen(study, starts, (f"move={name}",)) for name in ("before", "after")]
    assert [len(part) for part in parts] == [len(starts) // 2] * 2
    assert {one.start.name for part in parts for one in part} == {one.start.name for one in starts}
    combinations = {(one.runs[0].slot.levels["tp"], one.runs[0].slot.levels["pp"]) for one in starts}
    assert combinations == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)}
    small = chosen(study, starts, ("move=after", "tp=4"))
    options = small[0].spec.role("unified").options
    model = small[0].runs[0].slot.levels["llm"]
    assert options["compute"] == f"doctor=./hardware-move-after.json,model={model},tp=4,pp=1"


@pytest.mark.parametrize(
    ("only", "said"),
    [("users=8", "no factor 'users' takes a restart"), ("tp=3", "tp has no such level; its levels: 1, 2, 4")],
)
def test_starts_that_cannot_be_chosen(tmp_path: Path, only: str, said: str) -> None:
    """Nothing is begun."""
    words = ["run", str(STUDY), "--out", str(tmp_path / "out"), "--only", only]
    told = CliRunner().invoke(cli.lab, words)
    assert (told.exit_code, said in told.output) == (2, True), told.output
    assert not (tmp_path / "out").exists()
