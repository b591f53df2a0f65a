"""Whole plans: what `kvik lab plan` says of the article's plan, and of others."""

import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from kvik_lab import cli
from kvik_lab.design.choose import Kind, Wish, choose_rows
from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.from_study import Options, plan_study, study_space
from kvik_lab.design.optimal import Search
from kvik_lab.design.plan import Plan, Setup, Space, compare_optimal, make_plan, reachable_model
from kvik_lab.errors import LabError
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import load_study
from tests.lab.design.spaces import FULL_MODEL, OFFLINE, article_space, nested_factors, nested_rows

EXAMPLES = Path(str(resources.files("kvik_lab.study"))) / "examples"
ARTICLE = EXAMPLES / "efa-vs-tcp.yaml"
LINKS = EXAMPLES / "two-links.yaml"
FEW = Search(2)


@pytest.fixture(scope="module")
def article() -> Plan:
    return plan_study(load_study(ARTICLE), Options(beginnings=3, compare=True, smaller=40))


def test_the_article_s_59_patterns_are_planned_by_name_and_the_one_that_cannot_run_is_named(
    article: Plan,
) -> None:
    names = [*article.rows.index, *article.impossible]
    assert len(names) == len(set(names)) == 59
    assert list(article.impossible) == ["p14-efa-20k"]
    assert "20,010 <= 16,384 does not hold" in article.impossible["p14-efa-20k"][0]
    assert article.sizes["rows"].value == 58


def test_the_article_s_duplicates_are_found(article: Plan) -> None:
    assert set(article.duplicates) == {
        *((f"p14-{b}-1k", f"p14-{b}-c1-1k") for b in ("unified", "tcp", "efa")),
        *((f"p14-{b}-4k", f"p14-{b}-online-4k") for b in ("unified", "tcp", "efa")),
        ("p14-efa-12k", "p14-efa-online-12k"),
    }
    assert article.sizes["distinct rows"].value == 51


def test_the_article_s_candidates_and_model_are_those_of_the_prototype(article: Plan) -> None:
    assert article.sizes["feasible"].value == 1728
    assert article.single.columns == 29
    assert [lost.alias.column for lost in article.unreachable] == ["concurrency:client[offline]"]
    assert article.unreachable[0].why.endswith("not (client == 'offline' and concurrency > 1)")


def test_the_article_s_plan_cannot_estimate_what_an_optimal_one_of_40_runs_can(article: Plan) -> None:
    lost = {alias.column for alias in article.single.aliases}
    assert {"concurrency:gmu", "concurrency:batch", "gmu:batch"} <= lost
    assert article.single.rank == 29 - len(lost) < 29
    same, smaller = article.rivals
    assert (same.runs, smaller.runs) == (58, 40)
    assert same.rank == smaller.rank == 29
    # The prototype of the same question had .204 for concurrency and .158 for gmu in the main-effects model.
    alone = {one.name: one.se for one in smaller.main_effects}
    assert alone["concurrency"] == pytest.approx(0.204, abs=0.01)
    assert alone["gmu"] == pytest.approx(0.158, abs=0.005)
    own = {one.name: one.se for one in article.main_effects}
    assert own["gmu"] is not None
    assert own["gmu"] > 2 * (alone["gmu"] or 9)


def test_each_size_has_a_formula_that_gives_it(article: Plan) -> None:
    shown = [f"{name} {figure.value:g}: {figure.formula}" for name, figure in article.sizes.items()]
    assert "product of levels 6480: 3 x 9 x 5 x 4 x 3 x 2 x 2" in shown
    assert "feasible 1728: 6480 - 4752 infeasible" in shown
    assert article.cost.hours is not None
    assert article.cost.hours.value == pytest.approx((14 * 10 + 58 * 16.3) / 60)


def test_constraints_are_blamed_only_for_what_they_cost() -> None:
    space = article_space()
    basis = reachable_model(FULL_MODEL, space)
    assert [lost.why for lost in basis.unreachable] == [f"because of the constraint {OFFLINE}"]
    two = tuple(
        Factor(f.name, f.levels[::4], f.scale, hard=f.hard) if f.name == "concurrency" else f
        for f in space.factors
    )
    kept = space.candidates["concurrency"].isin([1, 16])
    small = Space(
        two, space.candidates[kept], space.infeasible[space.infeasible["concurrency"].isin([1, 16])]
    )
    reasons = {u.alias.column: u.why for u in reachable_model(FULL_MODEL, small).unreachable}
    assert "no constraint is the cause" in reasons["concurrency^2"]


def test_levels_that_are_never_feasible_do_not_stretch_the_range() -> None:
    factors = (Factor("tokens", (1000, 2000, 4000, 64000), Scale.LOG2),)
    rows = pd.DataFrame({"tokens": [1000, 2000, 4000]})
    infeasible = pd.DataFrame({"tokens": [64000], "constraint": ["tokens < 5000"], "only": [True]})
    basis = reachable_model("tokens", Space(factors, rows, infeasible))
    assert basis.coded[:, 1].tolist() == [-1, 0, 1]
    assert "64000" in basis.notes[0]


def test_replicates_and_blocks_enter_the_standard_errors() -> None:
    rows = nested_rows()
    space = Space(nested_factors(), rows, rows.iloc[:0].assign(constraint="", only=True))
    basis = reachable_model("mode/transport * (tokens + concurrency)", space)
    chosen = choose_rows(Wish(Kind.FULL), space.candidates, basis.coded, basis.model)
    plan = make_plan("x", space, basis, chosen, Setup(blocks=4, ratio=1.0))
    told = {c.name: c.se for c in plan.scheduled.coefficients}
    # As in the tests of power: an arm's 4 starts, each the mean of 9 runs; a coefficient is half of it.
    assert told["transport[efa]"] == pytest.approx(np.sqrt((1 + 1 / 9) / 2) / 2)
    power = {one.contrast: one for one in plan.powers}["transport: efa vs tcp"]
    assert power.df == 12 - 3 - 3  # 12 starts, 3 hard columns, 4 blocks
    assert compare_optimal(plan, space, basis, FEW).rivals[0].runs == 27


@pytest.mark.parametrize(
    "kind", [Kind.D_OPTIMAL, Kind.I_OPTIMAL, Kind.SPLIT_PLOT, Kind.FRACTIONAL, Kind.SCREENING]
)
def test_each_kind_gives_feasible_rows_with_ids_and_a_report(kind: Kind) -> None:
    space = article_space()
    basis = reachable_model("backend * (tokens + concurrency) + gmu + mbt + online", space)
    wish = Wish(kind, 24 if kind in (Kind.D_OPTIMAL, Kind.I_OPTIMAL, Kind.SPLIT_PLOT) else None, search=FEW)
    chosen = choose_rows(wish, space.candidates, basis.coded, basis.model)
    plan = make_plan("x", space, basis, chosen, Setup())
    assert plan.rows.index.is_unique
    assert (plan.rows["online"].astype(bool) | (plan.rows["concurrency"] == 1)).all()
    if wish.runs:
        assert len(plan.rows) == 24
        assert plan.single.rank == len(basis.model.columns)


ANCHORED = """\
study: links
unit: {model: llama-3.1-8b}
factors:
  mode: {levels: [together, apart], restart: true}
  link: {levels: [tcp, rdma], within: {mode: apart}, restart: true}
  size: {levels: [1, 2, 4, 8]}
constraints: [not (mode == 'together' and size > 4)]
model: log(ttft) ~ mode + link + size
design: {kind: full, anchors: {at: AT, every: 4}}
"""


@pytest.mark.parametrize(
    ("at", "said"),
    [
        # Of rdma, in starts of tcp and in such that have no link.
        ("{link: rdma, size: 1}", "the anchor has no level of mode; give all hard factors a level, or none"),
        ("{mode: together, link: tcp, size: 1}", "a level of link, which does not exist in a start of mode"),
        ("{mode: apart, link: tcp}", "the anchor has no level of size, so it cannot be run"),
        ("{size: 8}", "the anchor cannot be run: not (mode == 'together' and size > 4)"),
    ],
)
def test_an_anchor_that_a_start_cannot_run_is_refused(at: str, said: str) -> None:
    with pytest.raises(LabError, match=re.escape(said)):
        plan_study(load_study(ANCHORED.replace("AT", at)), Options())


SMALL = """\
study: small
unit: {model: llama-3.1-8b}
factors:
  link: {levels: [old, new], restart: true}
  size: {levels: [1, 2, 4, 8]}
model: log(ttft) ~ link * (size + size^2)
design: {kind: KIND, runs: 8, starts: 4, blocks: 4}
"""


@pytest.mark.parametrize(
    ("kind", "said", "options"),
    [
        ("d-optimal", "runs: 10", Options(runs=10)),
        ("d-optimal", "focus: [link]", Options(focus=("link",))),
        ("d-optimal", "order: williams", Options(williams=True)),
        ("split-plot", "ratio: 2.9", Options(ratio=2.9)),
    ],
)
def test_what_runs_is_what_is_planned(kind: str, said: str, options: Options) -> None:
    """What changes rows or order can be written in the file; where it is not, the plan says so."""
    bare = SMALL.replace("KIND", kind)
    whole = load_study(bare.replace("runs: 8", said if "runs" in said else f"runs: 8, {said}"))
    plan, asked = plan_study(whole, Options()), plan_study(load_study(bare), options)
    pd.testing.assert_frame_equal(plan.rows, asked.rows)
    assert plan.schedule.starts == asked.schedule.starts
    assert plan.setup.ratio == asked.setup.ratio
    ran = [(start.group, tuple(slot.pattern for slot in start.slots)) for start in plan_slots(whole)]
    assert ran == [(str(start.block + 1), start.runs) for start in plan.schedule.starts]
    note = f"`kvik lab run` would not run this plan; write in the file's design: {said}"
    assert note in asked.notes
    assert not any("kvik lab run" in one for one in plan.notes)
    if said == "order: williams":
        arms = [start.levels["link"] for start in plan.schedule.starts]
        assert arms[:4] == [*arms[:2], *arms[1::-1]]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("full", Options(runs=4), "--runs says nothing of a full design"),
        ("full", Options(focus=("link",)), "--focus says nothing of a full design"),
        ("d-optimal", Options(focus=("link",), more=2, ran=pd.DataFrame()), "nothing of the rows to add"),
        ("full", Options(smaller=4), "--smaller is of what --compare-optimal puts beside the plan"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(kind: str, options: Options, said: str) -> None:
    study = load_study(
        SMALL.replace("KIND", kind).replace("runs: 8, ", "" if kind == "full" else "runs: 8, ")
    )
    with pytest.raises(LabError, match=said):
        plan_study(study, options)


def test_rows_that_are_added_twice_have_ids_of_their_own() -> None:
    """What is planned of the second addition is of its rows, whatever those of the first are called."""
    study = load_study(SMALL.replace("KIND", "d-optimal"))
    first = plan_study(study, Options(ran=plan_study(study, Options()).rows, more=4)).rows
    second = plan_study(study, Options(ran=first, more=4))
    assert second.rows.index.is_unique
    assert second.rows.index[-4:].tolist() == ["a05", "a06", "a07", "a08"]
    renamed = plan_study(study, Options(ran=first.set_axis([f"x{k}" for k in range(12)]), more=4))
    assert [c.se for c in second.scheduled.coefficients] == [c.se for c in renamed.scheduled.coefficients]
    with pytest.raises(LabError, match="two rows that ran have the id 'a01'"):
        plan_study(study, Options(ran=first.rename(index={"a02": "a01"}), more=4))


def test_rows_are_added_beside_a_block_of_rows_that_ran() -> None:
    """All of one link ran: rows of the other alone could not tell the link from what differs between then and
    now."""
    study = load_study(SMALL.replace("KIND", "d-optimal").replace("link * (size + size^2)", "link + size"))
    ran = pd.DataFrame({"link": ["old"] * 4, "size": [1, 2, 4, 8]}, index=list("wxyz"), dtype=object)
    plan = plan_study(study, Options(ran=ran, more=4))
    assert set(plan.rows["link"].iloc[4:]) == {"old", "new"}
    assert {one.contrast: one.se for one in plan.powers}["link: new vs old"] is not None
    assert not any(c.aliased_with for c in plan.scheduled.coefficients)
    with pytest.raises(LabError, match="take at least 2 runs"):
        plan_study(study, Options(ran=ran, more=1))


def test_rows_that_no_run_would_have_are_said_to_be_such() -> None:
    study = load_study(SMALL.replace("KIND", "d-optimal"))
    few = plan_study(study, Options(beginnings=2))
    assert "`kvik lab run` searches from 10 beginnings, and may find other rows" in few.notes
    ran = study.candidates().iloc[:4].set_axis(list("abcd"), axis=0)
    more = plan_study(study, Options(ran=ran, more=6))
    assert any("to run these, list them in a layered design" in one for one in more.notes)


def test_without_a_model_runs_or_candidates_there_is_no_plan() -> None:
    text = LINKS.read_text()
    assert "  runs: 36\n" in text
    with pytest.raises(LabError, match="needs a number of runs"):
        plan_study(load_study(text.replace("  runs: 36\n", "")), Options())
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("model:"))
    with pytest.raises(LabError, match="no model"):
        plan_study(load_study(bare), Options())
    rows = nested_rows()
    with pytest.raises(LabError, match="no combination"):
        reachable_model("mode", Space(nested_factors(), rows.iloc[:0], rows))


def test_a_study_that_runs_is_augmented(tmp_path: Path) -> None:
    space = study_space(load_study(LINKS))
    ran = space.candidates.iloc[:6].copy()
    ran.insert(0, "id", [f"old{k}" for k in range(6)])
    path = tmp_path / "ran.csv"
    ran.to_csv(path, index=False)
    arguments = ["plan", str(LINKS), "--ran", str(path), "--add", "14", "--beginnings", "2", "--json"]
    result = CliRunner().invoke(cli.lab, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    ids = [row["id"] for row in told["rows"]]
    assert ids[:6] == [f"old{k}" for k in range(6)]
    assert len(ids) == 20
    assert told["single"]["rank"] == told["single"]["columns"]
    # Only what is added is still to run: 14 rows, started 4 times.
    assert not any(run.startswith("old") for start in told["schedule"]["starts"] for run in start["runs"])
    assert told["sizes"]["runs"]["value"] == 14 * 4


def test_the_command_prints_the_report_and_the_schedule() -> None:
    arguments = ["plan", str(LINKS), "--effect", "link@tokens=4000", "--beginnings", "2", "--schedule"]
    result = CliRunner().invoke(cli.lab, arguments)
    assert result.exit_code == 0, result.output
    for words in (
        "money, USD",
        "link: new vs old at tokens=4000",
        "mode[apart]",
        "start 1, block 1",
        "[anchor]",
    ):
        assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--effect", "speed"], "write factor"),
        (["--ran", str(LINKS)], "go together"),
        (["--runs", "3"], "cannot estimate"),
        (["--ran", str(LINKS), "--add", "2"], "cannot be read as CSV"),
        (["--focus", "speed"], "no column of the model"),
        (["--williams"], "2 to 4 arms"),
    ],
)
def test_options_that_make_no_sense_exit_2_with_the_reason(arguments: list[str], words: str) -> None:
    study = ARTICLE if "--williams" in arguments else LINKS
    if "--focus" in arguments:
        text = LINKS.read_text().replace("kind: split-plot", "kind: d-optimal")
        with pytest.raises(LabError, match=words):
            plan_study(load_study(text), Options(focus=("speed",), beginnings=1))
        return
    result = CliRunner().invoke(cli.lab, ["plan", str(study), "--beginnings", "1", *arguments])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
