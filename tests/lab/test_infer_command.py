"""`kvik lab series` and `kvik lab compare`, and the files that they read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvik_lab import cli
from kvik_lab.errors import LabError
from kvik_lab.infer.compare import Conclusion, compare
from kvik_lab.infer.judge import Plan
from kvik_lab.infer.table import Columns, Starts, parse

SEED = 15


def starts(
    level: float,
    count: int = 5,
    spread: float = 0.02,
    seed: int = SEED,
    blocks: bool = False,
    step: float = 1.0,
) -> Starts:
    """Starts of 30 iterations whose levels differ; from iteration 12 on all are `step` times that."""
    rng = np.random.default_rng(seed)
    values = {}
    for i in range(count):
        x = level * (1 + spread * rng.standard_normal()) * (1 + 0.01 * rng.standard_normal(30))
        x[12:] *= step
        values[str(i)] = x
    return Starts(f"{level:g}", values, {s: s for s in values} if blocks else {})


def written(folder: Path, name: str, data: Starts) -> str:
    """The starts as a file."""
    rows = ["start,iteration,value" + (",block" if data.blocks else "")]
    for start, values in data.values.items():
        end = f",{data.blocks[start]}" if data.blocks else ""
        rows += [f"{start},{i},{v:.4f}{end}" for i, v in enumerate(values)]
    path = folder / name
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def invoke(*arguments: str) -> Result:
    """Run `kvik lab`."""
    return CliRunner().invoke(cli.lab, list(arguments))


def test_an_interval_beyond_all_numbers_is_shown(tmp_path: Path) -> None:
    """As of two starts that are far apart, where it is one of many."""
    rows = np.full(10, 1.0)
    a = Starts("a", {"1": rows, "2": 1.01 * rows})
    b = Starts("b", {"1": rows, "2": 50 * rows})
    files = written(tmp_path, "a.csv", a), written(tmp_path, "b.csv", b)
    result = invoke("compare", *files, "--comparisons", "1000", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["conclusion"] == "undecided"
    assert found["ratio"]["high"] > 1e300


def test_series_shows_segments_class_and_mean(tmp_path: Path) -> None:
    result = invoke("series", written(tmp_path, "a.csv", starts(1900, step=0.77)))
    assert result.exit_code == 0, result.output
    assert "warm-up" in result.output
    assert "Mean: 14" in result.output
    assert "in all series that change: 12;" in result.output


def test_series_gives_json(tmp_path: Path) -> None:
    result = invoke("series", "--json", written(tmp_path, "a.csv", starts(1900, 2, step=0.77)))
    found = json.loads(result.output)
    (file,) = found["files"]
    assert file["kind"] == "warm-up"
    assert file["starts"][0]["segmentation"]["changes"][0]["at"] == 12
    assert file["headline"]["low"] < file["headline"]["estimate"] < file["headline"]["high"]
    assert file["whole"]["0"]["naive"]["method"] == "t, as if independent"
    assert found["coincidence"]["together"] == [12]


def test_series_gives_json_of_single_values(tmp_path: Path) -> None:
    """As of a metric of whole runs: the mean over starts, and nothing of the inside of one."""
    data = Starts("a", {start: row[:1] for start, row in starts(1900).values.items()})
    result = invoke("series", "--json", written(tmp_path, "a.csv", data))
    assert result.exit_code == 0, result.output
    (file,) = json.loads(result.output)["files"]
    shown = invoke("series", written(tmp_path, "a.csv", data)).output
    assert f"Mean: {file['headline']['estimate']:.6g}, 95 % interval" in shown
    assert file["whole"]["0"] == {"serial": None, "interval": None, "naive": None}


def test_an_unsteady_series_has_no_mean(tmp_path: Path) -> None:
    data = starts(1900, 1)
    data.values["0"][24:] *= 1.4
    result = invoke("series", written(tmp_path, "a.csv", data))
    assert "Mean: none. Unsteady" in result.output


def test_compare_finds_a_difference_over_starts(tmp_path: Path) -> None:
    a, b = written(tmp_path, "a.csv", starts(1900)), written(tmp_path, "b.csv", starts(1600, seed=2))
    result = invoke("compare", a, b, "--margin", "0.01")
    assert result.exit_code == 0, result.output
    assert "two groups of starts" in result.output
    assert "Conclusion: different" in result.output
    found = json.loads(invoke("compare", a, b, "--json").output)
    assert found["conclusion"] == "different"
    assert found["test"]["exact"] is True
    assert found["ratio"]["low"] < 1600 / 1900 < found["ratio"]["high"]


def test_equivalence_takes_data_and_not_just_a_large_p() -> None:
    close = compare(starts(1900, 8, 0.002), starts(1900, 8, 0.002, seed=3), margin=0.01)
    assert close.conclusion is Conclusion.EQUIVALENT
    loose = compare(starts(1900, 3, 0.05), starts(1900, 3, 0.05, seed=3), margin=0.01)
    assert loose.conclusion is Conclusion.UNDECIDED
    assert loose.exact_p is None
    assert loose.exact_starts == 4
    with pytest.raises(LabError, match="the margin is 0"):
        compare(starts(1900), starts(1900), margin=0.0)


def test_starts_in_blocks_are_pairs_in_whatever_order_the_files_have_them() -> None:
    days = 1 + 0.3 * np.random.default_rng(SEED).standard_normal(7)
    rng = np.random.default_rng(SEED)

    def side(ratio: float, order: list[int]) -> Starts:
        values = {f"s{i}": 100 * ratio * days[i] * (1 + 0.01 * rng.standard_normal(20)) for i in order}
        return Starts("x", values, {f"s{i}": f"day{i}" for i in order})

    found = compare(side(1.0, [0, 1, 2, 3, 4, 5, 6]), side(0.95, [6, 2, 4, 0, 1, 5, 3]))
    assert found.plan is Plan.PAIRED
    assert found.conclusion is Conclusion.DIFFERENT
    assert found.ratio is not None
    assert 0.94 < found.ratio.estimate < 0.96
    assert found.exact_p == pytest.approx(2 / 2**7)


def test_several_starts_a_block_are_compared_within_blocks() -> None:
    def side(ratio: float, seed: int) -> Starts:
        rng = np.random.default_rng(seed)
        values = {
            f"{day}{i}": 100
            * ratio
            * level
            * (1 + 0.01 * rng.standard_normal())
            * (1 + 0.01 * rng.standard_normal(20))
            for day, level in (("a", 1.0), ("b", 2.0), ("c", 4.0))
            for i in range(3)
        }
        return Starts("x", values, {s: s[0] for s in values})

    found = compare(side(1.0, 1), side(0.95, 2))
    assert found.plan is Plan.BLOCKED
    assert found.conclusion is Conclusion.DIFFERENT
    assert found.ratio is not None
    assert found.ratio.low < 0.95 < found.ratio.high
    assert found.ratio.high < 1.0


def test_an_odd_start_that_was_alone_in_the_last_block_is_left_out(tmp_path: Path) -> None:
    """Then one side has no start in that block, and the other side's two are still there."""
    rng = np.random.default_rng(SEED)

    def side(name: str, count: int, ratio: float, last: float) -> Starts:
        values = {
            f"{name}{day}{i}": 100 * ratio * level * (1 + 0.01 * rng.standard_normal(20))
            for day, level in (("x", 1.0), ("y", 2.0), ("z", 4.0 * last))
            for i in range(count)
        }
        return Starts(name, values, {start: start[1] for start in values})

    a, b = side("a", 2, 1.0, 1.0), side("b", 1, 0.9, 1.5)
    found = compare(a, b)
    assert found.odd == ("b: bz0",)
    assert found.plan is Plan.BLOCKED
    assert found.ratio is not None
    assert found.ratio.low < 0.9 < found.ratio.high, f"seed {SEED}"
    assert found.difference is not None
    assert found.exact_p is None
    shown = invoke("compare", written(tmp_path, "a.csv", a), written(tmp_path, "b.csv", b))
    assert shown.exit_code == 0, shown.output
    assert "Left out as odd: " in shown.output
    assert "b.csv: bz0" in shown.output.replace("\n", "")


def test_one_start_each_is_compared_with_a_warning() -> None:
    found = compare(starts(1900, 1), starts(1600, 1, seed=2))
    assert found.plan is Plan.SINGLE
    assert found.conclusion is Conclusion.ONE_START
    assert found.p is None
    assert any("replicate the starts" in note for note in found.notes)


def test_warm_up_that_each_of_two_starts_has_by_itself_is_told(tmp_path: Path) -> None:
    slow = written(tmp_path, "a.csv", starts(1900, 2, step=0.77))
    for arguments in ((slow, written(tmp_path, "b.csv", starts(1600, 2, seed=2))), (slow, slow)):
        shown = invoke("compare", *arguments).output
        assert "Warm-up left out of each start by itself: up to 12 iterations" in shown, f"seed {SEED}"
        assert "left out of every start" not in shown


def test_of_two_starts_one_that_is_unsteady_leaves_no_conclusion() -> None:
    bad = starts(1900, 2)
    bad.values["1"][24:] *= 1.4
    found = compare(starts(1900, 2), bad)
    assert found.conclusion is Conclusion.UNSTEADY
    assert found.ratio is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("start,iteration,value\n", "no values"),
        ("start,iteration,ttft\n1,0,5\n", "no column 'value'"),
        ("start,iter,value\n1,0,5\n", "is it 'iter'? then --iteration iter"),
        ("start,iteration,value\n1,0,5\n1,1,\n", "line 3: value is empty"),
        ("start,iteration,value\n1,0,fast\n", "line 2: value is 'fast', not a number"),
        ("start,iteration,value\n1,0,nan\n", "line 2: value is nan"),
        ("start,iteration,value\n1,0.5,3\n", "line 2: iteration is '0.5', not a whole number"),
        ("start,iteration,value\n1,0,3\n1,0,4\n", "line 3: start '1' has iteration 0 already (line 2)"),
        ("start,iteration,value\n1,0\n", "line 2: has not the 3 columns"),
        ("start,iteration,value,value\n1,0,3,4\n", "names value more than once"),
        (
            "start,iteration,value,block\n1,0,3,a\n1,1,3,b\n",
            "line 3: start '1' is in block 'b' here and in 'a'",
        ),
        ("start,iteration,value,block\n1,0,3,\n", "line 2: block is empty"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    result = invoke("series", str(path))
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    assert "cannot be read" in invoke("series", str(tmp_path / "none.csv")).output
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in invoke("series", str(tmp_path / "binary.csv")).output


def test_columns_may_have_other_names_and_rows_any_order() -> None:
    text = "run,n,ms\n1,2,30\n1,0,10\n1,1,20\n"
    found = parse(text, "x", Columns("run", "n", "ms"))
    assert list(found.values["1"]) == [10, 20, 30]
    with pytest.raises(LabError, match="named by --start"):
        parse(text, "x", Columns("srv", "n", "ms"))


def test_a_file_without_starts_is_one_start() -> None:
    assert list(parse("iteration,value\n0,1\n1,2\n", "x", Columns()).values) == ["1"]


def test_blocks_that_one_side_lacks_are_refused() -> None:
    with pytest.raises(LabError, match="both or none"):
        compare(starts(1900, blocks=True), starts(1900))
    with pytest.raises(LabError, match="one file only"):
        compare(starts(1900, 5, blocks=True), starts(1900, 4, blocks=True))
