"""Studies that run, and a real tracking server: killed in their midst, away, and as its page is seen."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvik_lab.records import iterate
from kvik_lab.run.journal import RUNS
from kvik_lab.tracking.deliver import Sink, Target, connect
from kvik_lab.tracking.form import Entry, entries, seen
from tests.lab.run.studies import PLAIN, SMALL, finish, records, wait_for, written
from tests.lab.tracking.journals import State, expected, formed, journal, record, state
from tests.lab.tracking.server import Server
from tests.python.peers import random_seed

PATIENT = """
from kvik.cli import main
from kvik_lab.tracking import beside
beside.END_LIMIT = 180.0
main()
"""
"""`kvik`, which waits for what is left about as long as a test does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that answers."""
    found = Server(tmp_path_factory.mktemp("server"))
    try:
        found.start()
        yield found
    finally:
        found.kill()


def start(
    study: Path, out: Path, uri: str, command: str = "run", *, patient: bool = True
) -> subprocess.Popen[str]:
    """`kvik lab run --mlflow`."""
    program = ["-c", PATIENT] if patient else ["-m", "kvik.cli"]
    arguments = [sys.executable, *program, "lab", command, str(study), "--out", str(out)]
    return subprocess.Popen(
        [*arguments, f"--mlflow={uri}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def wanted(out: Path) -> list[Entry]:
    """What a journal comes to when its study has ended."""
    journal = [seen(one) for one in iterate(out / RUNS)]
    return entries(journal, (out / "study.yaml").read_text(), running=False)


def there(client: Any, experiment: str) -> State:
    """What a server has, and nothing where it is away."""
    try:
        return state(client, experiment)
    except Exception:
        return {}


@pytest.mark.timeout(600)
def test_a_server_that_is_killed_in_the_midst_of_a_study_and_started_again(
    server: Server, tmp_path: Path
) -> None:
    """Every run and every point is there, once, and the study went on meanwhile."""
    seed = random_seed()
    study, out, client = written(tmp_path, SMALL), tmp_path / "out", connect(server.uri)
    controller = start(study, out, server.uri)
    try:
        wait_for(lambda: any(key.startswith("run") for key in there(client, "small")), "a run is there")
        time.sleep(
            random.Random(seed).uniform(0.0, 1.0)
        )  # the moment is drawn: there is no event to wait for
        server.kill()
        before = len(records(out))
        wait_for(lambda: len(records(out)) >= before + 2 or controller.poll() is not None, "it goes on")
        assert controller.poll() is None, f"seed {seed}: {finish(controller)}"
        controller.send_signal(signal.SIGSTOP)  # so that the server is back in the midst of the study
        try:
            server.start()
        finally:
            controller.send_signal(signal.SIGCONT)
    finally:
        status, said = finish(controller)
    assert status == 0, f"seed {seed}\n{said}"
    assert f"MLflow: all is at {server.uri}, experiment small" in said, f"seed {seed}\n{said}"
    found = wanted(out)
    assert len([one for one in found if one.id.startswith("run")]) == 8
    assert len([one for one in found if one.id.startswith("start")]) == 4
    assert state(client, "small") == expected(found), f"seed {seed}"


@pytest.mark.timeout(600)
def test_a_server_of_sagemaker_s_is_named_by_its_arn(server: Server, tmp_path: Path) -> None:
    """Its plug-in is asked, which signs each request; what it would reach at AWS is the server here."""
    folder = journal(tmp_path / "one", record(0))
    arn = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/x"
    aws = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "SAGEMAKER_MLFLOW_CUSTOM_ENDPOINT": server.uri,
    }
    environment = {**os.environ, **aws, "MLFLOW_EXPERIMENT_NAME": "arn"}
    command = [sys.executable, "-m", "kvik.cli", "lab", "mlflow", str(folder), "--to", arn]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.stdout == f"1 run is in MLflow at {arn}, experiment arn\n", done.stderr
    assert state(connect(server.uri), "arn") == expected(formed(record(0)))


@pytest.mark.timeout(600)
def test_its_page(server: Server, tmp_path: Path) -> None:
    """Below the study is a run, and in it are the series, the sums, the parameters and the verdict."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium")
    client = connect(server.uri)
    Sink(client, Target(server.uri, "page"), "j").bring(formed(record(0)), sure=True)
    experiment = client.get_experiment_by_name("page").experiment_id
    (run,) = client.search_runs([experiment], "params.tokens = '64'")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    command += ["--window-size=1500,1000", "--dump-dom", f"{server.uri}/#/experiments/{experiment}/runs"]
    environment = {**os.environ, "HOME": str(tmp_path)}

    def page(more: str) -> str:
        shown = [*command[:-1], command[-1] + more]
        done = subprocess.run(shown, capture_output=True, text=True, timeout=240, env=environment, check=True)
        return done.stdout

    assert "small" in page(""), "the study"
    found = page(f"/{run.info.run_id}")
    for text in (run.info.run_name, "ttft_ms", "ttft_p50", "prompt_tokens", "verdict"):
        assert text in found, f"{text} is not on the page"


@pytest.mark.timeout(600)
def test_a_server_that_is_away_fails_and_delays_no_study(tmp_path: Path) -> None:
    """What was not brought is said, and the command that is said brings it."""
    study, out = written(tmp_path, PLAIN), tmp_path / "out"
    away = "http://127.0.0.1:1"
    status, said = finish(start(study, out, away, patient=False))
    assert status == 0, said
    assert len(records(out)) == 2
    line = next(line for line in said.splitlines() if line.startswith("MLflow: not all was brought"))
    assert f"MLflow at {away}: " in line
    assert "Connection refused" in line
    words = shlex.split(line.partition("Bring it later with: kvik ")[2])
    assert words == ["lab", "mlflow", str(out), "--to", away]
    database = f"sqlite:///{tmp_path / 'mlflow.db'}"
    command = [sys.executable, "-m", "kvik.cli", *words[:-1], database]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == f"2 runs are in MLflow at {database}, experiment plain\n", done.stderr
    assert state(connect(database), "plain") == expected(wanted(out))


@pytest.mark.timeout(600)
def test_a_controller_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """What it left half written is completed, and what it left running ends."""
    study, out = written(tmp_path, PLAIN), tmp_path / "out"
    database = f"sqlite:///{tmp_path / 'mlflow.db'}"
    controller = start(study, out, database)
    wait_for(lambda: len(records(out)) >= 1 or controller.poll() is not None, "a run has ended")
    controller.send_signal(signal.SIGKILL)
    finish(controller)
    status, said = finish(start(study, out, database, "resume"))
    assert status == 0, said
    assert f"MLflow: all is at {database}, experiment plain" in said
    assert state(connect(database), "plain") == expected(wanted(out))


@pytest.mark.timeout(300)
def test_a_word_that_is_no_uri_is_not_taken_for_one(tmp_path: Path) -> None:
    """Where the study stands behind the option."""
    done = subprocess.run(
        [sys.executable, "-m", "kvik.cli", "lab", "run", "--mlflow", "study.yaml"], capture_output=True,
        text=True, timeout=240, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.search(r"'study\.yaml' is no URI; write --mlflow=URI", done.stderr)
