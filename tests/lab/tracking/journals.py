"""Journals whose records are made here, and what MLflow has of a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.entities import ViewType

from kvik_lab.records import (
    Client,
    Figure,
    Finding,
    Key,
    Place,
    Request,
    Role,
    RunRecord,
    Stated,
    Times,
    append,
)
from kvik_lab.records.schema import Outcome, Verdict
from kvik_lab.tracking import deliver
from kvik_lab.tracking.deliver import ENTRY, JOURNAL, MADE_FROM, PARENT
from kvik_lab.tracking.form import Entry, entries, seen

STUDY = "study: small\nabout: What it is for.\nfactors:\n  tokens: {levels: [64, 256]}\n"
OWN = {
    JOURNAL,
    MADE_FROM,
    "mlflow.runName",
    PARENT,
}  # tags that differ with the place, or are looked at apart
State = dict[str, Any]


def record(
    number: int,
    *,
    start: str = "s1",
    requests: int = 4,
    began: int = 10**18,
    outcome: Outcome = "completed",
    verdict: Verdict | None = "valid",
    figures: tuple[Figure, ...] = (),
) -> RunRecord:
    """A run of 64 tokens, whose request N has its first token after N ms, and a second one 1 ms later."""
    done = outcome == "completed"
    wrong = (
        Finding(gate="V2", status="invalid", what="decode took in nothing") if verdict == "invalid" else None
    )
    return RunRecord(
        id=f"abc-{start}-r{number:02}",
        study="small",
        key=Key(configuration={"model": "tiny"}, code={"vllm": "0.32.0"}, facts={"local": {"cpu": "A"}}),
        levels={"tokens": 64, "link": None},
        place=Place(order=number, start=start, group="1", whole_plot="link=old", pattern="r02"),
        times=Times(began=began, ended=began + 10**9),
        outcome=outcome,
        error=None if done else "decode ended",
        stated=Stated(transport="tcp", prompt_tokens=64, output_tokens=2),
        client=Client(driver="builtin", load={"arrival": {"kind": "closed", "concurrency": 2}}),
        requests=tuple(request(n) for n in range(requests + 1)) if done else (),
        figures=figures,
        roles=(Role(name="decode", kind="decode", start=start, settings={"prefix_cache": False, "tp": 2}),),
        findings=(wrong,) if wrong else (),
        verdict=verdict if done else None,
    )


def request(number: int) -> Request:
    """The first one is the warm-up."""
    first = number * 1e-3
    return Request(
        id=f"q{number}", iteration=number, phase="warmup" if number == 0 else "measure", sent=0.0, status=200,
        tokens=(first, first + 1e-3), end=first + 1e-3,
    )  # fmt: skip


def formed(*records: RunRecord, running: bool = False) -> list[Entry]:
    """Their entries."""
    return entries([seen(one) for one in records], STUDY, running=running)


def journal(folder: Path, *records: RunRecord) -> Path:
    """A journal as a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(STUDY)
    for one in records:
        append(folder / "runs.jsonl", one)
    return folder


def state(client: Any, experiment: str) -> State:
    """What a person sees of an experiment: each entry with its parent's, and every point that was logged."""
    there = client.get_experiment_by_name(experiment)
    runs = [] if there is None else list(client.search_runs([there.experiment_id], max_results=1000))
    names = {run.info.run_id: run.data.tags[ENTRY] for run in runs}
    assert len(set(names.values())) == len(runs), f"made twice: {sorted(names.values())}"
    return {
        run.data.tags[ENTRY]: {
            "run": (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time),
            "parent": names.get(run.data.tags.get(PARENT)),
            "params": run.data.params,
            "tags": {name: value for name, value in run.data.tags.items() if name not in OWN},
            "points": sorted(
                (one.key, one.step, one.timestamp, one.value)
                for key in run.data.metrics
                for one in client.get_metric_history(run.info.run_id, key)
            ),
        }
        for run in runs
    }


def expected(wanted: list[Entry]) -> State:
    """What `state` is to be."""
    return {
        one.id: {
            "run": (one.name, one.status, one.began, one.ended),
            "parent": one.parent,
            "params": dict(one.content().params),
            "tags": {**one.content().tags, ENTRY: one.id, deliver.MADE_AS: one.form},
            "points": sorted(
                (point.key, point.step, point.at, point.value) for point in one.content().points
            ),
        }
        for one in wanted
    }


def deleted(client: Any, experiment: str) -> int:
    """Runs that were taken back."""
    there = client.get_experiment_by_name(experiment)
    return len(client.search_runs([there.experiment_id], run_view_type=ViewType.DELETED_ONLY))
