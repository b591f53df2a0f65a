"""A journal in MLflow's own store: once, whatever is interrupted, and refused where it is wrong."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvik_lab.errors import LabError
from kvik_lab.records import append
from kvik_lab.tracking import deliver
from kvik_lab.tracking.deliver import AwayError, Sink, Target, alone, bring, connect, identity, target
from kvik_lab.tracking.form import Entry
from tests.lab.tracking.journals import deleted, expected, formed, journal, record, state


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a database of MLflow's, in which each test has experiments of its own."""
    return connect(f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


def sink(client: Any, experiment: str, turn: Callable[[], object] = lambda: None) -> Sink:
    """Of a journal called `j`."""
    return Sink(client, Target("sqlite:///of the test", experiment), "j", turn)


class CutError(OSError):
    """The connection is gone."""


class Cutting:
    """A client of which one call fails: before it is carried out, or after, when only its answer is lost."""

    def __init__(self, client: Any, at: int, *, after: bool) -> None:
        self.client, self.at, self.after = client, at, after
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, getattr(self.client, name))

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls != self.at:
            return method(*arguments, **named)
        if self.after:
            method(*arguments, **named)
        raise CutError("cut off")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [False, True])
def test_cut_at_any_request_it_is_completed_and_nothing_is_there_twice(
    client: Any, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """By the same sink, as beside a study, and by another one, as by a command later."""
    monkeypatch.setattr(deliver, "AT_ONCE", (30, 12, 15))
    wanted = formed(record(0))
    cuts = 0
    for at in range(1, 100):
        experiment = f"cut {at} {after}"
        cutting = Cutting(client, at, after=after)
        first = sink(cutting, experiment)
        if not _is_cut(first, wanted):
            break
        cuts += 1
        last = first if at % 2 else sink(client, experiment)
        last.bring(wanted, sure=True)
        assert state(client, experiment) == expected(wanted), f"cut at request {at}"
    assert cuts > 15, "every request was cut"
    assert state(client, experiment) == expected(wanted)


def _is_cut(first: Sink, wanted: list[Entry]) -> bool:
    try:
        first.bring(wanted, sure=True)
    except AwayError as error:
        return "cut off" in str(error)
    return False


class Late:
    """A client whose first run is made by the server after it was given up, and looked for in vain."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.given_up: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def create_run(self, *arguments: Any, **named: Any) -> Any:
        """As MLflow's."""
        make = functools.partial(self.client.create_run, *arguments, **named)
        if not self.given_up:
            self.given_up.append(make)
            raise CutError("no answer in time")
        if len(self.given_up) == 1:
            self.given_up.append(self.given_up[0])
            self.given_up[0]()
        return make()


def test_what_a_server_made_after_it_was_given_up_is_deleted(client: Any) -> None:
    """Of the two runs that there are then, the one stays that has something below it."""
    wanted = formed(record(0))
    late = sink(Late(client), "late")
    with pytest.raises(AwayError, match="no answer in time"):
        late.bring(wanted, sure=False)
    late.bring(wanted, sure=True)
    assert state(client, "late") == expected(wanted)
    assert deleted(client, "late") == 1


def test_a_second_time_nothing_is_written(client: Any) -> None:
    """And of what is added, only that."""
    wanted = formed(record(0), running=True)
    sink(client, "twice").bring(wanted, sure=True)
    written: list[int] = []
    sink(client, "twice", lambda: written.append(1)).bring(wanted, sure=True)
    assert written == []
    wanted = formed(record(0), record(1), running=True)
    sink(client, "twice", lambda: written.append(1)).bring(wanted, sure=True)
    assert len(written) == 1
    assert state(client, "twice") == expected(wanted)
    ended = formed(record(0), record(1))
    sink(client, "twice").bring(ended, sure=True)
    assert state(client, "twice") == expected(ended)
    assert deleted(client, "twice") == 0


def test_a_run_that_is_found_invalid_later_has_no_value_among_those_that_count(client: Any) -> None:
    """MLflow takes no value back, so the run is made anew."""
    sink(client, "judged").bring(formed(record(0)), sure=True)
    wanted = formed(record(0), record(0, verdict="invalid"))
    sink(client, "judged").bring(wanted, sure=True)
    assert state(client, "judged") == expected(wanted)
    assert deleted(client, "judged") == 1


def test_runs_whose_parent_somebody_deleted_get_the_new_one(client: Any) -> None:
    """Also where it was deleted behind the back of the sink that made it."""
    beside = sink(client, "parent")
    beside.bring(formed(record(0), running=True), sure=False)
    experiment = client.get_experiment_by_name("parent").experiment_id
    start = client.search_runs([experiment], "tags.`kvik.entry` = 'start s1'")[0]
    client.delete_run(start.info.run_id)
    wanted = formed(record(0), record(1))
    beside.bring(wanted, sure=False)
    assert "start s1" in beside.refused
    beside.bring(wanted, sure=True)
    assert beside.refused == {}
    assert state(client, "parent") == expected(wanted)


def test_what_is_refused_keeps_nothing_else_back(client: Any) -> None:
    """The server says that it is wrong, not that it is away: to say it again does not help."""
    wanted = formed(record(0), record(1))
    *others, last = wanted
    wrong = Entry(**{**vars(last), "id": "run wrong", "began": -1, "name": "x" * 10})
    there = sink(Refusing(client), "refused")
    there.bring([*others, wrong, last], sure=True)
    assert list(there.refused) == ["run wrong"]
    assert "it is wrong" in there.refused["run wrong"]
    assert state(client, "refused") == expected(wanted)


class Refusing:
    """A client that is told of a run which begins before the epoch that it is wrong."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def create_run(self, experiment: str, *, start_time: int, **named: Any) -> Any:
        """As MLflow's."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

        if start_time < 0:
            raise MlflowException("it is wrong", INVALID_PARAMETER_VALUE)
        return self.client.create_run(experiment, start_time=start_time, **named)


def test_where_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said, else the environment, else a database in the folder; and a password is not shown."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    assert target(tmp_path, None, "small").uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@192.0.2.1:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "nixl-efa-tai-phase-14")
    found = target(tmp_path, "", "small")
    assert (found.shown, found.experiment) == ("http://...@192.0.2.1:5000", "nixl-efa-tai-phase-14")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(LabError, match=r"pip install 'kvik-lab\[mlflow\]'"):
        target(tmp_path, None, "small")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sagemaker_mlflow" else name)
    with pytest.raises(LabError, match="pip install sagemaker-mlflow"):
        target(tmp_path, "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/x", "small")


def test_a_journal_is_itself_wherever_it_lies(tmp_path: Path) -> None:
    """And another one with the same ids is another one."""
    one = journal(tmp_path / "one", record(0))
    (moved := tmp_path / "moved").mkdir()
    (moved / "runs.jsonl").write_bytes((one / "runs.jsonl").read_bytes())
    append(moved / "runs.jsonl", record(1))
    other = journal(tmp_path / "other", record(0, began=2 * 10**18))
    first, second, third = (identity(folder / "runs.jsonl") for folder in (one, moved, other))
    assert first == second != third


def test_two_at_once_are_refused_and_a_folder_without_a_journal(tmp_path: Path) -> None:
    one = journal(tmp_path / "one", record(0))
    with (
        alone(one),
        pytest.raises(AwayError, match="brings it into MLflow now"),
    ):
        bring(one, f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(LabError, match=r"none/runs\.jsonl: cannot be read"):
        bring(tmp_path / "none", None)
    (empty := journal(tmp_path / "empty") / "runs.jsonl").touch()
    with pytest.raises(LabError, match="nothing to bring"):
        bring(empty.parent, None)


@pytest.mark.timeout(600)
def test_the_command(tmp_path: Path) -> None:
    """Into a database in the journal's folder; and status 1 where a server is away."""
    one = journal(tmp_path / "one", record(0), record(1, outcome="failed"))
    command = [sys.executable, "-m", "kvik.cli", "lab", "mlflow", str(one)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}

    def said(*more: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=240, env=environment, check=False
        )
        return done.returncode, done.stdout + done.stderr

    for _ in range(2):
        assert said() == (0, f"2 runs are in MLflow at sqlite:///{one / 'mlflow.db'}, experiment small\n")
    wanted = formed(record(0), record(1, outcome="failed"))
    assert state(connect(f"sqlite:///{one / 'mlflow.db'}"), "small") == expected(wanted)
    status, text = said("--to", "http://127.0.0.1:1")
    assert status == 1
    assert "MLflow at http://127.0.0.1:1: " in text
    assert "Connection refused" in text
    assert "say this command again" in text
