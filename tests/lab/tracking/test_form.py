"""What a journal comes to in MLflow."""

from __future__ import annotations

from kvik_lab.records import Figure
from kvik_lab.tracking.form import Content, Entry, Point
from tests.lab.tracking.journals import formed, record


def content(found: list[Entry], kind: str = "run") -> Content:
    """Of the first entry of a kind."""
    return next(one for one in found if one.id.startswith(kind)).content()


def test_study_start_and_run_are_nested() -> None:
    """Parents come first, and a parent spans its runs."""
    second = record(1, start="s2", began=2 * 10**18)
    found = formed(record(0), second)
    assert [(one.id.partition(" ")[0], one.parent) for one in found] == [
        ("study", None), ("start", "study"), ("start", "study"), ("run", "start s1"), ("run", "start s2"),
    ]  # fmt: skip
    assert (found[0].began, found[0].ended) == (10**12, 2 * 10**12 + 1000)
    assert {one.status for one in found} == {"FINISHED"}
    assert content(found, "study").params["factors.tokens.levels"] == "[64, 256]"
    assert content(found, "study").tags["mlflow.note.content"] == "What it is for."
    assert found[1].name == "s1 (link=old)"
    assert formed() == []


def test_series_have_the_iteration_as_step_and_sums_the_article_s_names() -> None:
    """In milliseconds; the warm-up is in neither."""
    found = content(formed(record(0, requests=40)))
    points = {(one.key, one.step): one for one in found.points}
    assert points["ttft_ms", 3] == Point("ttft_ms", 3.0, 10**12 + 4, 3)
    assert [one.step for one in found.points if one.key == "e2e_ms"] == list(range(1, 41))
    sums = {one.key: one.value for one in found.points if one.step == 0}
    assert sums["ttft_mean"] == 20.5
    assert sums["ttft_p50"] == 20.5
    assert {"ttft_stdev", "ttft_p95", "tpot_mean", "e2e_p50", "throughput_rps"} <= set(sums)
    assert "ttft_p99" not in sums, "which takes more values than 40"
    assert "ttft_ms" not in sums
    assert {
        "mode": "disaggregated", "backend": "tcp", "prefix_cache": "disabled", "prompt_tokens": "64",
        "max_tokens": "2", "measurement_iterations": "40", "concurrency": "2", "model": "tiny",
        "measurement_type": "online", "vllm_version": "0.32.0", "tokens": "64", "decode.tp": "2",
    }.items() <= found.params.items()  # fmt: skip
    assert found.tags["verdict"] == "valid"
    assert found.tags["fact.local.cpu"] == "A"
    assert formed(record(0))[-1].name == "disaggregated-tcp-nocache-pt64-c2-20010909-014640"


def test_what_does_not_count_is_failed_and_has_other_names() -> None:
    """So it is in no mean and in no chart of those that count."""
    invalid = formed(record(0, verdict="invalid"))[-1]
    assert invalid.status == "FAILED"
    found = invalid.content()
    assert (found.tags["verdict"], found.tags["reasons"]) == ("invalid", "V2: decode took in nothing")
    assert {one.key.partition("/")[0] for one in found.points} == {"excluded"}
    suspect = formed(record(0, verdict="suspect"))[-1]
    assert suspect.status == "FINISHED"
    assert suspect.form != invalid.form


def test_a_run_that_was_run_again_is_two_and_one_judged_again_is_one() -> None:
    """The attempt that failed is marked as superseded."""
    failed, again = record(0, outcome="failed"), record(0, start="s1", began=2 * 10**18)
    runs = [one for one in formed(failed, again) if one.id.startswith("run")]
    assert [(one.status, one.content().tags["superseded"]) for one in runs] == [
        ("FAILED", "true"), ("FINISHED", "false"),
    ]  # fmt: skip
    assert runs[0].content().tags["error"] == "decode ended"
    assert formed(failed)[0].status == "FAILED"
    assert formed(failed, again)[0].status == "FINISHED"
    judged = [one for one in formed(record(0), record(0, verdict="suspect")) if one.id.startswith("run")]
    assert [one.content().tags["verdict"] for one in judged] == ["suspect"]


def test_a_study_that_runs_is_changed_when_it_ends_alone() -> None:
    """Of a run that is added while it goes on, that run is written and no parent again."""
    one, two = formed(record(0), running=True), formed(record(0), record(1), running=True)
    assert [entry.digest for entry in one[:2]] == [entry.digest for entry in two[:2]]
    assert [(entry.status, entry.ended) for entry in two[:2]] == [("RUNNING", None)] * 2
    ended = formed(record(0), record(1))
    assert all(before.digest != after.digest for before, after in zip(two[:2], ended[:2], strict=True))
    assert ended[0].content().tags["runs.valid"] == "2"


def test_figures_of_a_load_are_series_too() -> None:
    """With their own iteration, and their levels in their names."""
    loads = [Figure(metric="load_time", unit="s", value=0.5 + n, iteration=n) for n in range(4)]
    size = Figure(metric="latency", unit="s", value=1e-6, statistic="p99", levels={"path": "a/b", "é": 4})
    whole = record(0, requests=0, figures=(*loads, size)).model_copy(update={"requests": ()})
    found = [(one.key, one.step, one.value) for one in content(formed(whole)).points]
    assert found[:4] == [("load_time_ms", n, 500.0 + 1000 * n) for n in range(4)]
    assert ("load_time_p50", 0, 2000.0) in found
    assert any(key == "latency_p99/path a_b/_ 4_ms" for key, _, _ in found)
