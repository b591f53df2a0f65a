"""`kvik lab report` says what data of known truth hold, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import JsonValue

from kvik.cli import main
from kvik_lab.errors import LabError
from kvik_lab.infer.judge import Layout, judge
from kvik_lab.records import Key, Place, Times, append
from kvik_lab.records.schema import Finding, Gate, Node
from kvik_lab.report.build import build_report
from kvik_lab.report.cells import Missing, State
from kvik_lab.report.codec import from_json
from kvik_lab.report.figures import Distributions, Factor, RunOrder, SizeTime
from kvik_lab.report.look import Rules
from kvik_lab.report.model import Claim, Interval, Report, Verdict
from kvik_lab.report.read import Choice, read
from tests.lab.test_records import record

SEED = 1
TRUTH = {"TCP": (120.0, 0.5), "EFA": (250.0, 0.4)}
"""Milliseconds, and milliseconds a token: they cross at 1300 tokens."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four starts of 18 at four sizes; one of EFA changes at 4000, and a value of TCP failed."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,tokens"]
    for arm, (fixed, each) in TRUTH.items():
        for tokens in (500, 1000, 2000, 4000):
            for start in range(4):
                values = (fixed + each * tokens) * (1 + 0.005 * rng.standard_normal())
                row = values * (1 + 0.01 * rng.standard_normal(18))
                if (arm, tokens) == ("EFA", 4000) and start == 2:
                    row[14:] *= 0.7
                for i, v in enumerate(row):
                    failed = (arm, tokens, start, i) == ("TCP", 500, 0, 5)
                    lines.append(
                        f"{arm}-{tokens}-{start},{i},{'failed' if failed else f'{v:.3f}'},{arm},{tokens}"
                    )
    path = tmp_path_factory.mktemp("data") / "ttft.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def report(measured: Path) -> Report:
    return build_report(read([measured], Choice()), Rules(margin=0.02), "TTFT")


def claims(report: Report) -> dict[str, Claim]:
    assert report.answer is not None
    return {claim.id: claim for claim in report.answer.claims}


def figure(report: Report, name: str) -> object:
    return next(f for s in report.sections for f in s.figures if f.id == name)


def test_the_ratio_of_the_truth_lies_in_each_claims_interval(report: Report) -> None:
    for number, tokens in enumerate((500, 1000, 2000), 1):
        claim = claims(report)[f"C{number}"]
        truth = (250.0 + 0.4 * tokens) / (120.0 + 0.5 * tokens)
        assert isinstance(claim.interval, Interval), f"seed {SEED}"
        low, high = claim.interval.low, claim.interval.high
        assert (low or 0.0) < truth < (high or 0.0), f"seed {SEED}, {tokens} tokens"
        assert claim.verdict is Verdict.SUPPORTED
        assert claim.where == f"tokens {tokens}"
    assert claims(report)["C1"].sentence.startswith("EFA takes 21")
    assert "less time than TCP at tokens 2000" in claims(report)["C3"].sentence


def test_the_answer_is_one_sentence_that_decides(report: Report) -> None:
    assert report.answer is not None
    said = report.answer.sentence
    assert said.startswith("EFA takes ")
    assert "more time than TCP at tokens 500, 1000" in said
    assert "less time at tokens 2000" in said
    assert "They cross near 12" in said or "They cross near 13" in said
    assert "5 intervals of this page hold together with 95 %" in report.answer.sure
    assert "bias of" in report.answer.change
    assert dict(report.answer.facts)["when"] == "not stated"


def test_one_start_that_changes_voids_nothing_and_is_named(report: Report) -> None:
    ratio = claims(report)["C4"]
    assert isinstance(ratio.interval, Interval)
    true = (250 + 0.4 * 4000) / (120 + 0.5 * 4000)
    assert (ratio.interval.low or 0.0) < true < (ratio.interval.high or 0.0)
    cells = next(t for s in report.sections for t in s.tables if t.id == "cells")
    row = next(r for r in cells.rows if r[:2] == ("EFA", "4000"))
    assert "changes in mid-run: EFA-4000-2" in str(row[-1])


def test_a_change_that_all_starts_make_late_has_no_mean_and_no_ratio(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend"]
    for arm, late in (("a", 1.0), ("b", 1.5)):
        for start in range(4):
            for i in range(24):
                value = 100 * (late if i >= 20 else 1.0) * (1 + 0.01 * rng.standard_normal())
                lines.append(f"{start}{arm},{i},{value:.3f},{arm}")
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    claim = claims(made)["C1"]
    assert isinstance(claim.estimate, Missing)
    assert claim.verdict is Verdict.INSUFFICIENT
    assert "not settled" in str(claim.interval)
    assert "no steady state: b" in " ".join(made.sections[-1].text)


def test_the_crossover_of_the_truth_lies_in_its_interval(report: Report) -> None:
    claim = claims(report)["X1"]
    assert claim.verdict is Verdict.SUPPORTED
    assert isinstance(claim.interval, Interval)
    low, high = claim.interval.low, claim.interval.high
    assert (low or 0.0) < 1300 < (high or 0.0), f"seed {SEED}: {low} to {high}"
    drawn = figure(report, "size-1")
    assert isinstance(drawn, SizeTime)
    assert drawn.crossings[0].stretches[0].low == pytest.approx(low)
    assert all(arm.model for arm in drawn.arms)


def test_what_takes_many_times_as_long_is_told_so_and_a_range_by_its_ends(tmp_path: Path) -> None:
    """24 times at one size, 245 at the other; a third arm cannot be told from the base within the sizes."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,tokens"]
    for tokens in (256, 1024):
        levels = {
            "TCP": 0.1 * tokens,
            "EFA": 0.1 * tokens,
            "slow": (24.5 if tokens == 256 else 2.45) * tokens,
        }
        for arm, level in levels.items():
            for start in range(4):
                row = level * (1 + 0.01 * rng.standard_normal()) * (1 + 0.004 * rng.standard_normal(12))
                lines += [f"{arm}{tokens}-{start},{i},{v:.3f},{arm},{tokens}" for i, v in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(unit="s", base="TCP"), "r")
    assert made.answer is not None
    assert re.search(r"slow takes 24\.\d to 24\d times as long as TCP everywhere\.", made.answer.sentence)
    assert claims(made)["C2"].sentence.startswith("slow takes 24"), f"seed {SEED}"
    assert "times as long as TCP at tokens 256" in claims(made)["C2"].sentence
    (open_,) = (
        one for one in claims(made).values() if "if they do" in one.sentence and "EFA" in one.sentence
    )
    assert "at 256 to 1024 tokens. Probability" in open_.sentence, f"seed {SEED}"


def test_a_crossover_beyond_the_sizes_is_not_in_the_measured_range(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,tokens"]
    for arm, (fixed, each) in TRUTH.items():
        for tokens in (100, 200, 400, 800):  # they cross at 1300
            for start in range(4):
                own = (fixed + each * tokens) * (1 + 0.005 * rng.standard_normal())
                lines += [
                    f"{arm}{tokens}-{start},{i},{own * (1 + 0.01 * rng.standard_normal()):.3f},{arm},{tokens}"
                    for i in range(12)
                ]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    claim = claims(made)["X1"]
    assert isinstance(claim.estimate, Missing)
    assert "do not cross in the measured range, 100 to 800 tokens: TCP is faster" in claim.sentence
    assert str(claim.interval) == "none possible: not in the measured range"
    assert made.answer is not None
    assert "cross" not in made.answer.sentence


def test_a_crossover_is_of_the_levels_of_the_other_factors_that_it_is_under(tmp_path: Path) -> None:
    """Of one model the arms cross, of the other it is not decided: the sentence over all says neither."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,model,tokens"]
    for model, truth in (("small", TRUTH), ("big", {"TCP": (120.0, 0.5), "EFA": (121.0, 0.4999)})):
        for arm, (fixed, each) in truth.items():
            for tokens in (500, 1000, 2000, 4000):
                for start in range(4):
                    own = (fixed + each * tokens) * (1 + 0.005 * rng.standard_normal())
                    row = own * (1 + 0.01 * rng.standard_normal(12))
                    name = f"{arm}-{model}-{tokens}-{start}"
                    lines += [f"{name},{i},{v:.3f},{arm},{model},{tokens}" for i, v in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    small, big = claims(made)["X1"], claims(made)["X2"]
    assert (small.verdict, big.verdict) == (Verdict.SUPPORTED, Verdict.INSUFFICIENT), f"seed {SEED}"
    assert small.sentence.startswith("At model small: TCP and EFA cross at 1")
    assert big.sentence.startswith("At model big: Whether TCP and EFA cross")
    assert (small.where, big.where) == ("crossover, model small", "crossover, model big")
    assert made.answer is not None
    assert "cross" not in made.answer.sentence


def test_a_crossover_that_single_sizes_contradict_is_not_given(tmp_path: Path) -> None:
    """They cross twice, near 1100 and 3400 tokens; straight lines through that cross once, in the middle."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,tokens"]
    for tokens in range(500, 4001, 500):
        plain = 100 + 0.5 * tokens
        bent = plain + 60 * ((tokens - 2250) / 1750) ** 2 - 25
        for arm, level in (("TCP", plain), ("EFA", bent)):
            for start in range(4):
                row = level * (1 + 0.002 * rng.standard_normal()) * (1 + 0.004 * rng.standard_normal(12))
                lines += [f"{arm}{tokens}-{start},{i},{v:.3f},{arm},{tokens}" for i, v in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    claim = claims(made)["X1"]
    assert claim.verdict is Verdict.INSUFFICIENT, f"seed {SEED}: {claim}"
    assert "EFA is above TCP at 500" in claim.because
    assert made.answer is not None
    assert "more time than TCP at tokens 500" in made.answer.sentence
    assert "cross" not in made.answer.sentence
    drawn = figure(made, "size-1")
    assert isinstance(drawn, SizeTime)
    assert not drawn.crossings


def test_equal_arms_whose_starts_are_fast_or_slow_as_a_whole_have_no_faster_one(tmp_path: Path) -> None:
    """Each start measures all sizes, so that the gaps at all of them have one sign, which is not known."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,tokens"]
    for arm in ("near", "far"):
        for start, own in enumerate((-0.03, -0.02, -0.01, 0.01, 0.02, 0.03)):
            for tokens in (500, 1000, 2000, 4000):
                row = (100 + 0.5 * tokens) * (1 + own) * (1 + 1e-4 * rng.standard_normal(12))
                lines += [f"{arm}{start},{i},{v:.4f},{arm},{tokens}" for i, v in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    claim = claims(made)["X1"]
    assert claim.verdict is Verdict.INSUFFICIENT, f"seed {SEED}: {claim}"
    assert "keep one order in the measured range, 500 to 4000 tokens; which is faster is not decided" in (
        claim.sentence
    )
    assert str(claim.interval) == "none possible: in one order, and not known in which"
    assert isinstance(claim.estimate, Missing)


def test_means_over_other_factors_are_over_the_same_of_them_at_each_level(tmp_path: Path) -> None:
    """A long prompt takes twice the time, and the model does nothing; the big one did not run long ones."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,model,prompt"]
    for arm in ("TCP", "EFA"):
        for model, prompt, level in (("small", "short", 100), ("small", "long", 200), ("big", "short", 100)):
            for start in range(3):
                row = level * (1 + 0.01 * rng.standard_normal(12))
                name = f"{arm}{model}{prompt}{start}"
                lines += [f"{name},{i},{v:.3f},{arm},{model},{prompt}" for i, v in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    drawn = figure(made, "factor-1")
    assert isinstance(drawn, Factor)
    assert drawn.levels == ("small", "big")
    for line in drawn.lines:
        small, big = (cell.value for cell in line.cells)
        assert small == pytest.approx(150, rel=0.02)
        assert big == Missing(State.NOT_MEASURED, "not at every level of the other factors")


def test_facts_come_from_columns_and_from_who_asks(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend,when,host,vllm_version"]
    for arm in "ab":
        for start in range(4):
            lines += [
                f"{arm}{start},{i},{value:.3f},{arm},2026-11-{20 + start},n1,0.9.2"
                for i, value in enumerate(100 * (1 + 0.01 * rng.standard_normal(10)))
            ]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    data = read([tmp_path / "d.csv"], Choice())
    assert (data.arm, data.others) == ("backend", ())
    made = build_report(data, Rules(facts={"where": "the lab", "power cap": "200 W"}), "r")
    assert made.answer is not None
    facts = dict(made.answer.facts)
    assert facts["when"] == "2026-11-20 to 2026-11-23"
    assert facts["where"] == "the lab"
    assert facts["versions"] == "vllm 0.9.2"
    assert facts["power cap"] == "200 W"


def test_a_failed_value_keeps_its_place_in_the_series(report: Report) -> None:
    drawn = figure(report, "series-1")
    assert isinstance(drawn, RunOrder)
    assert isinstance(drawn.series[0].values[5], Missing)
    assert len(drawn.series[0].values) == 18
    assert drawn.series[0].levels[0].last == 17


def test_a_99_percent_quantile_is_not_given_from_72_values(report: Report) -> None:
    drawn = figure(report, "distribution-1")
    assert isinstance(drawn, Distributions)
    tail = drawn.groups[0].quantiles[-1]
    assert tail.probability == 0.99
    assert isinstance(tail.estimate.value, Missing)


def test_the_report_says_what_it_cannot(report: Report) -> None:
    text = " ".join(report.sections[-1].text)
    assert report.sections[-1].title == "What these data cannot say"
    for word in (
        "99 % quantile",
        "missing values",
        "beyond the sizes",
    ):
        assert word in text


def test_one_start_each_supports_no_claim_of_the_arms(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    for name, level in (("a", 100.0), ("b", 150.0)):
        rows = [f"{i},{v:.3f}" for i, v in enumerate(level * (1 + 0.01 * rng.standard_normal(30)))]
        (tmp_path / f"{name}.csv").write_text("\n".join(["iteration,value", *rows]))
    data = read([tmp_path / "a.csv", tmp_path / "b.csv"], Choice())
    assert (data.arm, data.arms) == ("file", ("a", "b"))
    claim = claims(build_report(data, Rules(), "r"))["C1"]
    assert claim.estimate == pytest.approx(1.5, rel=0.02)
    assert claim.verdict is Verdict.INSUFFICIENT
    assert "replicate the starts" in claim.because


def test_warm_up_that_each_of_two_starts_has_by_itself_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,backend"]
    for arm, step in (("a", 1.5), ("b", 1.0)):
        for start in range(2):
            row = 100 * np.where(np.arange(30) < 10, step, 1.0) * (1 + 0.01 * rng.standard_normal(30))
            lines += [f"{arm}{start},{i},{v:.3f},{arm}" for i, v in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    told = " ".join(next(s for s in made.sections if s.id == "method").text)
    assert "No warm-up is left out" not in told, f"seed {SEED}"
    assert (
        "Of an arm with one start or two each start's own warm-up is left out, up to 10 iterations." in told
    )


def test_the_command_writes_the_three_forms(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, ["lab", "report", str(measured), "--out", str(out), "--json", str(out / "r.json")]
    )
    assert done.exit_code == 0, done.output
    assert {p.name for p in out.iterdir()} == {"report.html", "report.md", "r.json"}
    assert from_json((out / "r.json").read_text()).title == "Report"
    assert json.loads((out / "r.json").read_text())["sections"][0]["id"] == "measured"


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("iteration,value\n", [], "has no values"),
        ("iteration,time\n0,1\n", [], "no column 'value'"),
        ("iteration,value\n0,fast\n", [], "line 2: value is 'fast'"),
        ("iteration,value\n0.5,1\n", [], "line 2: iteration is '0.5'"),
        ("iteration,value\n0,1\n0,2\n", [], "line 3: start '1' has iteration 0 already"),
        ("iteration,value\n0,nan\n", [], "value is nan"),
        ("iteration,value,x\n0,1\n", [], "line 2: has 2 cells, the header 3"),
        ("iteration,value\n0,1\n", ["--arm", "backend"], "no column 'backend'"),
        ("iteration,value\n0,1\n", ["--size", "mb"], "no column 'mb'"),
        ("start,iteration,value\n0,0,1\n", ["--start", "server"], "no column 'server'"),
        ("start,iteration,value\n0,0,1\n", ["--block", "pair"], "named by --block"),
        ("iteration,value,arm\n0,1,a\n0,1,b\n", ["--base", "c"], "the base 'c' is no level of arm: a, b"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, text: str, options: list[str], said: str
) -> None:
    (tmp_path / "d.csv").write_text(text)
    done = CliRunner().invoke(
        main, ["lab", "report", str(tmp_path / "d.csv"), "--out", str(tmp_path / "o"), *options]
    )
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split()), done.output


def test_a_series_too_short_to_examine_is_shown_without_a_mean(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("iteration,value,backend\n0,1,a\n1,2,a\n0,in progress,b\n")
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    assert all(isinstance(c.estimate, Missing) for c in claims(made).values())


def test_metrics_of_whole_runs_are_compared_by_their_one_value_a_start(tmp_path: Path) -> None:
    """Throughput has no iterations, and starts are what is compared anyway."""
    rates = {"slow": [70.0, 71.0, 69.5, 70.4, 70.9], "fast": [100.0, 102.0, 99.5, 101.0, 100.7]}
    lines = ["start,block,iteration,value,unit,link"]
    for arm, row in rates.items():
        lines += [f"{arm}{block},{block},0,{rate},tokens/s,{arm}" for block, rate in enumerate(row)]
    path = tmp_path / "rate.csv"
    path.write_text("\n".join(lines) + "\n")
    rules = Rules(unit="tokens/s", base="slow", smaller_is_better=False)
    made = build_report(read([path], Choice(arm="link")), rules, "Rates")
    (claim,) = claims(made).values()
    assert claim.verdict is Verdict.SUPPORTED, claim
    layout = Layout.paired(5)
    judged = judge(np.log([[*rates["slow"], *rates["fast"]]]), layout)
    assert isinstance(claim.interval, Interval)
    assert (claim.interval.low, claim.interval.high) == pytest.approx(
        (float(np.exp(judged.low[0])), float(np.exp(judged.high[0])))
    )
    short = path.read_text().replace("slow1,1,0,71.0", "slow1,1,0,71.0,tokens/s,slow\nslow1,1,1,71.0")
    path.write_text(short)
    mixed = build_report(read([path], Choice(arm="link")), rules, "Rates")
    assert next(iter(claims(mixed).values())).verdict is Verdict.INSUFFICIENT


def test_a_column_of_many_levels_is_no_factor(tmp_path: Path) -> None:
    rows = [f"{i},1.0,{i}" for i in range(70)]
    (tmp_path / "d.csv").write_text("\n".join(["iteration,value,time", *rows]))
    with pytest.raises(LabError, match="--ignore time"):
        read([tmp_path / "d.csv"], Choice())
    assert read([tmp_path / "d.csv"], Choice(ignore=("time",))).others == ()


def three_starts(
    path: Path, odd: tuple[tuple[int, int], ...], lost: tuple[tuple[int, int], ...] = ()
) -> Path:
    """Three starts of each arm that all ran four sizes; they cross at 107 tokens. Some of the second arm's
    (start, size) are 60 % slower, some were not measured."""
    rng = np.random.default_rng(SEED)
    lines = ["start,iteration,value,link,tokens"]
    for arm, fixed, each in (("near", 1.0, 0.05), ("far", 5.0, 0.0125)):
        for start in range(3):
            for tokens in (32, 64, 128, 256):
                level = (fixed + each * tokens) * (1 + 0.01 * rng.standard_normal())
                level *= 1.6 if arm == "far" and (start, tokens) in odd else 1.0
                row = level * (1 + 0.01 * rng.standard_normal(10))
                if arm == "near" or (start, tokens) not in lost:
                    lines += [f"{arm}{start},{i},{v:.5f},{arm},{tokens}" for i, v in enumerate(row)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("odd", "lost"), [(((2, 256),), ()), ((), ((2, 256),))])
def test_a_start_that_is_odd_at_one_size_leaves_a_crossover(
    tmp_path: Path, odd: tuple[tuple[int, int], ...], lost: tuple[tuple[int, int], ...]
) -> None:
    """It is left out of the lines whole, and said to be."""
    said = "far2 is left out of the model: odd, or not measured, at a size"
    made = build_report(read([three_starts(tmp_path / "d.csv", odd, lost)], Choice()), Rules(), "r")
    claim = claims(made)["X1"]
    assert claim.verdict is Verdict.SUPPORTED, claim
    assert isinstance(claim.interval, Interval)
    assert (claim.interval.low or 0.0) < 106.7 < (claim.interval.high or 0.0), f"seed {SEED}"
    assert re.search(r"cross at \d{2,3} tokens \(99 %: \d{2,3} to \d{2,3} tokens\)", claim.sentence), claim
    assert said in claim.because
    if odd:
        kept = claims(made)["C4"].because
        assert re.search(r"left out as odd: far: far2; with all kept: -[\d.]+ % to \+[\d.]+ %", kept), kept
    assert said in " ".join(next(s for s in made.sections if s.id == "size").text)


def test_of_two_odd_starts_in_three_none_is_left_out_of_the_crossover(tmp_path: Path) -> None:
    """Each at a size of its own: both together are more than a third."""
    file = three_starts(tmp_path / "d.csv", ((1, 128), (2, 256)))
    claim = claims(build_report(read([file], Choice()), Rules(), "r"))["X1"]
    assert "start far1, far2 is odd at a size, and kept" in claim.because
    assert "far: the unit is the server start, of which there are 3" in claim.because


def test_a_journal_says_when_where_and_with_which_versions(tmp_path: Path) -> None:
    """From the records of runs through the table to the head of the page, with how many are in doubt."""
    doubts: dict[int, tuple[Gate, ...]] = {2: ("V9",), 3: ("V7", "V9")}
    values: list[int] = []
    facts: dict[str, JsonValue] = {"host": "n7", "cpu": "Some CPU", "cores_usable": 2, "kernel": "6.1"}
    for number in range(8):
        began = (1_800_000_000 + 60 * number) * 10**9
        one = record(
            number, levels={"arm": "ab"[number % 2]}, outcome="failed" if number == 7 else "completed",
            key=Key(configuration={}, code={} if number == 7 else {"kvik": "1.2.3", "vllm": "0.9"}),
            place=Place(order=number, start=f"s{number}"), nodes=(Node(name="local", facts=facts),),
            times=Times(began=began, ended=began + 30 * 10**9),
            verdict="suspect" if number in doubts else None if number == 7 else "valid",
            findings=tuple(Finding(gate=gate, status="suspect", what="w") for gate in doubts.get(number, ())),
        )  # fmt: skip
        append(tmp_path / "runs.jsonl", one)
        values.append(len(one.measured()))
    for command in (
        ["table", str(tmp_path / "runs.jsonl"), "--out", str(tmp_path / "t.csv")],
        ["report", str(tmp_path / "t.csv"), "--unit", "s", "--json", str(tmp_path / "r.json")],
    ):
        done = CliRunner().invoke(main, ["lab", *command])
        assert done.exit_code == 0, done.output
    made = from_json((tmp_path / "r.json").read_text())
    assert made.answer is not None
    told = dict(made.answer.facts)
    assert told["when"] == "2027-01-15 08:00 UTC to 2027-01-15 08:07 UTC"
    assert told["where"] == "n7 (Some CPU, 2 cores, Linux 6.1)"
    assert told["versions"] == "kvik 1.2.3, vllm 0.9"
    assert told["suspect"] == f"{values[2] + values[3]} of {sum(values[:7])} values, by V7, V9; they count"
    assert made.answer.question == "Which takes less time, a or b?"


def in_blocks(path: Path, lost: set[tuple[str, int]]) -> Path:
    """One start of each arm in each of six blocks, which differ by half; B takes 1.2 times A. Of the `lost`
    there is a word alone, as `kvik lab table` writes it."""
    rng = np.random.default_rng(SEED)
    lines = ["start,block,iteration,value,arm"]
    for block in range(1, 7):
        for arm, ratio in (("A", 1.0), ("B", 1.2)):
            start, level = f"s{block}{arm}", ratio * (1 + block / 12) * (1 + 0.01 * rng.standard_normal())
            row = level * (1 + 0.01 * rng.standard_normal(12))
            given_up = (arm, block) in lost
            said = ["failed"] if given_up else [f"{value:.5f}" for value in row]
            lines += [f"{start},{block},{i},{one},{arm}" for i, one in enumerate(said)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_files_have_the_factors_that_all_of_them_have(tmp_path: Path) -> None:
    """Also where the first one has none."""
    plain = "\n".join(["start,iteration,value", *(f"{s},{i},{9 + i % 3}" for s in "ab" for i in range(9))])
    more = "\n".join(f"{line},{'tokens' if not at else 8}" for at, line in enumerate(plain.split("\n")))
    for name, text in (("one", plain), ("two", more), ("three", more)):
        (tmp_path / f"{name}.csv").write_text(text)
    found = read([tmp_path / f"{name}.csv" for name in ("one", "two", "three")], Choice())
    assert (found.arms, found.others, dict(found.constant)) == (("one", "two", "three"), (), {})


def test_pairs_are_said_where_all_are_pairs(tmp_path: Path) -> None:
    """Short prompts ran in blocks, and long ones did not."""
    rng = np.random.default_rng(SEED)
    lines = ["start,block,iteration,value,arm,prompt"]
    for prompt in ("short", "long"):
        for block in range(1, 5):
            for arm, level in (("A", 1.0), ("B", 1.2)):
                row = level * (1 + 0.01 * rng.standard_normal() + 0.01 * rng.standard_normal(12))
                name = f"{prompt}{block}{arm},{block if prompt == 'short' else ''}"
                lines += [f"{name},{i},{value:.5f},{arm},{prompt}" for i, value in enumerate(row)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    made = build_report(read([tmp_path / "d.csv"], Choice()), Rules(), "r")
    assert made.answer is not None
    assert "Each rests on 4 starts an arm," in made.answer.sure


def test_a_start_that_was_given_up_costs_its_block_alone(tmp_path: Path) -> None:
    """The other blocks are compared in pairs, and the page says what it left out."""
    for lost, pairs in ((set[tuple[str, int]](), 6), ({("B", 3)}, 5), ({("B", 3), ("A", 5)}, 4)):
        made = build_report(read([in_blocks(tmp_path / "d.csv", lost)], Choice()), Rules(), "r")
        claim = claims(made)["C1"]
        assert isinstance(claim.interval, Interval), claim
        assert (claim.interval.low or 0.0) < 1.2 < (claim.interval.high or 0.0), f"seed {SEED}"
        assert claim.verdict is Verdict.SUPPORTED, claim
        assert made.answer is not None
        assert f"rests on {pairs} pairs of starts" in made.answer.sure
        said = "left out, as the other arm has no start in their block: "
        assert (said in claim.because) == bool(lost)
        for arm, block in lost:
            other = {"A": "B", "B": "A"}[arm]
            assert f"{other}: s{block}{other} (block {block})" in claim.because


def test_arms_that_share_no_block_are_not_compared(tmp_path: Path) -> None:
    lost = {("A", block) for block in (1, 2, 3)} | {("B", block) for block in (4, 5, 6)}
    made = build_report(read([in_blocks(tmp_path / "d.csv", lost)], Choice()), Rules(), "r")
    assert "no block has starts of A and B; run both in each block" in claims(made)["C1"].because
