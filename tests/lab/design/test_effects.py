"""What was measured, by the model that was planned: against simulated truths, and against the plan itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy import stats

from kvik_lab.design.effects import Columns, Effect, Effects, fit_effects
from kvik_lab.design.effects_cli import effects_command, study_effects
from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.from_study import Options, plan_study, study_space
from kvik_lab.design.model import build_model
from kvik_lab.design.plan import Plan, default_contrasts, reachable_model
from kvik_lab.errors import LabError
from kvik_lab.infer.changes import ar1
from kvik_lab.study import load_study

SEED = 14
STUDY = Path(__file__).parents[3] / "lab" / "kvik_lab" / "study" / "examples" / "two-links.yaml"
BACKEND = Factor("backend", ("A", "B"), hard=True)
TOKENS = Factor("tokens", (2000, 4000), Scale.LOG2)
MODEL = build_model("log(ttft) ~ backend * tokens", (BACKEND, TOKENS))
B, SIZE, B_AT_4000 = "backend: B vs A", "tokens: 4000 vs 2000", "backend: B vs A at tokens=4000"


def runs(
    starts: int = 6, iterations: int = 10, between: float = 0.05, within: float = 0.02, seed: int = SEED
) -> pd.DataFrame:
    """Two backends on starts of their own, two sizes within each: B is 0.9 of A, size 4000 twice 2000, and B
    gains another 0.95 at 4000."""
    rng = np.random.default_rng(seed)
    rows = []
    for start in range(2 * starts):
        backend = "AB"[start % 2]
        level = between * rng.standard_normal()
        for i in range(iterations):
            tokens = 4000 if i % 2 else 2000
            log = math.log(100.0) + level + within * rng.standard_normal()
            log += math.log(0.9) * (backend == "B") + math.log(2) * (tokens == 4000)
            log += math.log(0.95) * (backend == "B" and tokens == 4000)
            rows.append((start, backend, tokens, math.exp(log)))
    return pd.DataFrame(rows, columns=["start", "backend", "tokens", "ttft"])


def get(found: Effects, contrast: str) -> Effect:
    return next(effect for effect in found.effects if effect.contrast == contrast)


def test_the_backend_is_judged_by_starts_and_the_size_by_runs() -> None:
    found = fit_effects(MODEL, runs(), ("backend@tokens=4000", "backend", "tokens"))
    backend, tokens = get(found, B), get(found, SIZE)
    assert (backend.df, backend.stratum) == (10, "starts")
    assert (tokens.df, tokens.stratum) == (120 - 12 - 2, "runs")
    assert 10 < get(found, B_AT_4000).df < 12  # mostly of starts
    assert get(found, B_AT_4000).value == pytest.approx(0.9 * 0.95, rel=0.08)
    # Sizes are compared within both backends, so half of B's gain at 4000 is in it.
    assert tokens.low < 2 * math.sqrt(0.95) < tokens.high
    assert math.log(backend.high / backend.low) > 3 * math.log(tokens.high / tokens.low)
    assert (found.runs, found.starts, found.notes) == (120, 12, ())


def test_intervals_with_starts_hold_a_backends_ratio_and_those_of_rows_alone_do_not() -> None:
    held = alone = 0
    truth = 0.9 * math.sqrt(0.95)
    for seed in range(200):
        data = runs(4, 6, seed=seed)
        effect = fit_effects(MODEL, data, ("backend",)).effects[0]
        plain = fit_effects(MODEL, data.drop(columns="start"), ("backend",)).effects[0]
        held += effect.low <= truth <= effect.high
        alone += plain.low <= truth <= plain.high
    assert 182 <= held <= 198  # of 200 at 95 %
    assert alone <= 130


def test_iterations_that_depend_on_each_other_make_no_effect_of_size() -> None:
    """Of no effect of size, iterations of AR(0.9) in each run: its interval holds 1 as often as it says."""
    rng, held = np.random.default_rng(SEED), 0
    model = build_model("log(ttft) ~ backend + tokens", (BACKEND, TOKENS))
    for _ in range(200):
        noise = ar1(24, 20, 0.9, rng) * 0.02 + rng.normal(0, 0.02, (12, 1)).repeat(2, axis=0)
        rows = [
            (run // 2, i, "AB"[run // 2 % 2], 2000 * (1 + run % 2), math.exp(value))
            for run, series in enumerate(noise)
            for i, value in enumerate(series)
        ]
        data = pd.DataFrame(rows, columns=["start", "iteration", "backend", "tokens", "ttft"])
        found = fit_effects(model, data, ("tokens",))
        assert (found.runs, found.starts) == (24, 12)
        effect = get(found, SIZE)
        held += effect.low <= 1 <= effect.high
    assert held >= 180, f"seed {SEED}: {held} of 200"


def test_intervals_of_several_effects_hold_together() -> None:
    one = fit_effects(MODEL, runs(), ("backend",)).effects[0]
    both = fit_effects(MODEL, runs(), ("backend", "tokens")).effects[0]
    wider = math.log(both.high / both.low) / math.log(one.high / one.low)
    assert wider == pytest.approx(stats.t.ppf(1 - 0.025 / 2, 10) / stats.t.ppf(0.975, 10))


def test_two_strata_give_the_t_test_of_start_means() -> None:
    data = runs(between=0.0, seed=3)
    effect = get(fit_effects(build_model("log(ttft) ~ backend", (BACKEND,)), data), B)
    means = np.log(data["ttft"]).groupby(data["start"]).mean().to_numpy()
    same = stats.ttest_ind(means[1::2], means[::2])
    assert effect.value == pytest.approx(math.exp(means[1::2].mean() - means[::2].mean()))
    assert effect.p == pytest.approx(same.pvalue)


def test_effects_of_independent_runs_are_ratios_or_differences() -> None:
    rng = np.random.default_rng(SEED)
    size = np.repeat([1, 2, 3], 20)
    data = pd.DataFrame({"size": size, "t": np.exp(0.3 * size + 0.05 * rng.standard_normal(60))})
    factor = Factor("size", (1, 2, 3), Scale.LINEAR)
    ratio = fit_effects(build_model("log(t) ~ size", (factor,)), data).effects[0]
    assert ratio.low < math.exp(0.6) < ratio.high
    assert (ratio.df, ratio.stratum) == (58, "runs")
    shift = fit_effects(build_model("t ~ size", (factor,)), data).effects[0]
    assert shift.value == pytest.approx(math.exp(0.9) - math.exp(0.3), rel=0.05)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_study(load_study(STUDY), Options())


def measured(plan: Plan, size: str = "tokens") -> pd.DataFrame:
    """The plan's runs, as if the new link took 0.8 of the time."""
    rng = np.random.default_rng(SEED)
    rows = []
    for number, start in enumerate(plan.schedule.starts):
        own = rng.normal(0, 0.02)
        for run in (run for run in start.runs if run in plan.rows.index):
            levels = plan.rows.loc[run].to_dict()
            log = 4 + 0.5 * math.log2(levels[size]) + math.log(0.8) * (levels["link"] == "new")
            value = math.exp(log + own + rng.normal(0, 0.03))
            rows.append({**levels, "start": number, "block": start.block, "ttft": value})
    return pd.DataFrame(rows)


def test_what_is_fitted_is_what_was_planned(plan: Plan) -> None:
    """The contrasts, the strata and the degrees of freedom."""
    found = study_effects(load_study(STUDY), measured(plan))
    planned = {power.contrast: power for power in plan.powers}
    assert [effect.contrast for effect in found.effects] == list(planned)
    for effect in found.effects:
        power = planned[effect.contrast]
        assert effect.stratum == power.stratum
        if effect.stratum == "runs":
            assert effect.df == power.df
    link = get(found, "link: new vs old")
    assert link.low < 0.8 < link.high


@pytest.mark.parametrize("more", [", restart: true", ""])
def test_what_is_planned_of_starts_that_do_not_vary_is_judged_as_it_is_fitted(more: str) -> None:
    """By starts where a restart is what changes it: the fit does not know that they are alike."""
    text = (
        f"study: links\nunit: {{model: llama-3.1-8b}}\nfactors:\n  link: {{levels: [old, new]{more}}}\n"
        "  size: {levels: [1, 2]}\n"
        "model: log(ttft) ~ link + size\ndesign: {kind: full, starts: 12, blocks: 6}\n"
    )
    study = load_study(text)
    planned = plan_study(study, Options(ratio=0.0))
    found = study_effects(study, measured(planned, "size"))
    told = {one.contrast: (one.stratum, one.df) for one in planned.powers}
    assert {one.contrast: (one.stratum, one.df) for one in found.effects} == told
    assert told["link: new vs old"] == (("starts", 24 - 7) if more else ("runs", 34))


def test_the_power_that_is_promised_is_that_of_the_fit(plan: Plan) -> None:
    """Of an effect of the size that is to be seen in 80 % of experiments, so many are found."""
    study = load_study(STUDY)
    model = reachable_model(str(study.model), study_space(study)).model
    promised = next(power for power in plan.powers if power.contrast == "link: new vs old")
    texts = default_contrasts(model)
    data = measured(plan)
    rng = np.random.default_rng(SEED)
    assert promised.smallest is not None
    effect = promised.smallest * (data["link"] == "new")
    found = 0
    for _ in range(100):
        # Starts vary as much as runs do, as a plan without a pilot takes it.
        own = rng.standard_normal(data["start"].max() + 1)[data["start"]]
        data["ttft"] = np.exp(effect + own + rng.standard_normal(len(data)))
        link = get(fit_effects(model, data, texts), "link: new vs old")
        found += not link.low <= 1 <= link.high
    assert 68 <= found <= 92  # three standard errors


def test_the_command_prints_each_effect(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "measured.csv"
    measured(plan).to_csv(file, index=False)
    done = CliRunner().invoke(
        effects_command, [str(STUDY), str(file), "--effect", "link[new vs old]@tokens=1000"]
    )
    assert done.exit_code == 0, done.output
    assert "link: new vs old at tokens=1000" in done.output
    assert (
        "all intervals hold together in 95% of such experiments, each p is of its contrast alone"
        in " ".join(done.output.split())
    )
    told = CliRunner().invoke(effects_command, [str(STUDY), str(file), "--json"])
    assert len(json.loads(told.output)["effects"]) == len(plan.powers)


def test_one_start_an_arm_has_no_error_to_judge_a_backend_by() -> None:
    found = fit_effects(MODEL, runs(1))
    assert [effect.contrast for effect in found.effects] == [SIZE]
    assert any(note.startswith(f"{B}: no starts are left over") for note in found.notes)


def test_an_effect_that_rows_cannot_tell_from_others_is_named() -> None:
    data = runs().query("backend == 'A' and tokens == 2000 or backend == 'B' and tokens == 4000")
    found = fit_effects(MODEL, data)
    assert any(note.startswith(f"{B}: these rows cannot tell") for note in found.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.assign(ttft=[0.0, *data["ttft"][1:]]), "row 1: ttft .*no number above 0"),
        (lambda data: data.assign(ttft=["fast", *data["ttft"][1:]]), "row 1: ttft 'fast'"),
        (lambda data: data.rename(columns={"ttft": "tpot"}), "no column 'ttft'"),
        (lambda data: data.assign(start=[None, *data["start"][1:]]), "row 1: no start"),
        (lambda data: data.assign(backend="C"), "backend has no level 'C'"),
        (lambda data: data.drop(columns="tokens"), "no column 'tokens'"),
        (
            lambda data: data.rename(columns={"start": "server"}).assign(iteration=0),
            "no column 'start' says of which",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LabError, match=words):
        fit_effects(MODEL, change(runs()))


@pytest.mark.parametrize("columns", [Columns(start="server"), Columns(block="group")])
def test_a_column_that_was_named_is_there(columns: Columns) -> None:
    """Else every row would count as a start of its own."""
    with pytest.raises(LabError, match=r"no column '(server|group)', named by --(start|block)"):
        fit_effects(MODEL, runs(), columns=columns)


def test_rows_without_a_start_are_said_to_be_independent() -> None:
    found = fit_effects(MODEL, runs().drop(columns="start"), ("backend",))
    assert found.notes == ("there is no column 'start': each row counts as a start of its own",)
