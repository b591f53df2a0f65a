"""Brings entries into MLflow: those that are not there, and what an interruption left half written.

Each run there has tags with the journal's identity, its entry, and, set after all else, the digest of what it
was made from: without that digest it is not whole, and with another one it is of an earlier state. So whoever
begins looks, and goes on from what is there. Nothing is sent again without a look: a request whose answer was
lost may have been carried out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvik_lab.errors import LabError
from kvik_lab.records import iterate
from kvik_lab.run.journal import RUNS, STUDY, is_running
from kvik_lab.tracking.form import Content, Entry, Point, entries, seen

JOURNAL, ENTRY, MADE_FROM, MADE_AS = "kvik.journal", "kvik.entry", "kvik.digest", "kvik.form"
PARENT = "mlflow.parentRunId"
DATABASE, LOCK = "mlflow.db", "mlflow.lock"
ROUNDS = 4  # looks, until one finds all there
ARN = "arn:"
AT_ONCE = (800, 100, 100)  # metrics, parameters and tags in one request; MLflow takes 1000 of all together
SETTINGS = {
    # Tried again by who can look first, and soon.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Of MLflow's client, unless the environment says otherwise."""


class AwayError(LabError):
    """Nothing, or not all, could be brought now; trying again may help."""


@dataclass(frozen=True)
class Target:
    """Where to: a tracking URI, and the name of the experiment there."""

    uri: str
    experiment: str
    artifacts: str | None = None

    @property
    def shown(self) -> str:
        """The URI without a password."""
        return re.sub(r"//[^/@]*@", "//...@", self.uri)


def target(folder: Path, uri: str | None, study: str) -> Target:
    """Of a journal: `uri`, or `MLFLOW_TRACKING_URI`, or a database in its folder; the experiment is called as
    the study, or as `MLFLOW_EXPERIMENT_NAME` says. Raises `LabError` where a package is missing for it."""
    where = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / DATABASE}"
    local = where.startswith("sqlite:")
    needed = ["mlflow", *(["sqlalchemy", "alembic"] if local else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise LabError(f"MLflow takes {', '.join(missing)}, not installed: pip install 'kvik-lab[mlflow]'")
    if where.startswith(ARN) and importlib.util.find_spec("sagemaker_mlflow") is None:
        raise LabError(f"{where}: takes SageMaker's plug-in for MLflow: pip install sagemaker-mlflow")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or study
    return Target(where, name, (folder.resolve() / "mlartifacts").as_uri() if local else None)


def identity(journal: Path) -> str:
    """Of a journal, wherever it is moved: its first record is never changed."""
    with journal.open("rb") as file:
        return hashlib.sha256(file.readline()).hexdigest()[:16]


def connect(uri: str) -> Any:
    """MLflow's client. It is imported here, as it takes a second."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # of a database that is made it tells every step
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if uri.startswith(ARN):
        mlflow.set_tracking_uri(uri)  # where its plug-in looks when it signs a request
    return mlflow.MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One at a time brings a journal. Raises `AwayError` where another one is at it."""
    try:
        opened = (folder / LOCK).open("w")
    except OSError as error:
        raise LabError(f"{folder / LOCK}: cannot be written: {error.strerror}") from error
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AwayError(
                f"{folder}: its study, or another `kvik lab mlflow`, brings it into MLflow now; wait for it"
            ) from None
        yield


@dataclass
class Found:
    """A run that MLflow has."""

    run: str
    digest: str
    parent: str | None


class Sink:
    """A journal's place in MLflow."""

    def __init__(
        self, client: Any, to: Target, journal: str, turn: Callable[[], object] = lambda: None
    ) -> None:
        """`turn` returns when the next entry may be written."""
        self.client, self.to, self.journal, self.turn = client, to, journal, turn
        self._experiment: str | None = None
        self._known: dict[str, Found] | None = None
        self.refused: dict[str, str] = {}
        """What the server says is wrong, by entry; it is said again when the next one is to be sure."""

    def bring(self, entries: Sequence[Entry], *, sure: bool) -> None:
        """Returns when all are there; with `sure`, when a look has found them so, each once. Raises
        `AwayError`."""
        try:
            self._bring(entries, sure)
        except LabError:
            raise
        except Exception as error:  # of any library below MLflow: of HTTP, of a database, of a cloud
            self._known = None
            raise AwayError(f"MLflow at {self.to.shown}: {_said(error)}") from error

    def _bring(self, entries: Sequence[Entry], sure: bool) -> None:
        if sure:
            self._known, self.refused = None, {}
        for _ in range(ROUNDS):
            known = self._look(entries) if self._known is None else self._known
            todo = [one for one in entries if not _whole(one, known) and one.id not in self.refused]
            self._known = None  # unless all of it is written
            for entry in todo:
                self.turn()
                self._write(entry, known)
            if not todo or not sure:
                self._known = known
                return
        raise AwayError(f"MLflow at {self.to.shown} does not have what was written to it; try again later")

    def _look(self, entries: Sequence[Entry]) -> dict[str, Found]:
        """The runs of this journal by their entries. What is there twice, by a request whose answer was
        lost, or in a form that is no longer its own, is deleted."""
        wanted = {one.id: one.form for one in entries}
        found: dict[str, Found] = {}
        for run in sorted(self._runs(), key=lambda run: (MADE_FROM not in run.data.tags, run.info.run_id)):
            tags = run.data.tags
            key = tags[ENTRY]
            if key in found or wanted.get(key, tags.get(MADE_AS)) != tags.get(MADE_AS):
                self.client.delete_run(run.info.run_id)
            else:
                found[key] = Found(run.info.run_id, tags.get(MADE_FROM, ""), tags.get(PARENT))
        return found

    def _runs(self) -> Iterator[Any]:
        token = None
        while True:
            page = self.client.search_runs(
                [self._experiment_id()],
                f"tags.`{JOURNAL}` = '{self.journal}'",
                max_results=1000,
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def _experiment_id(self) -> str:
        if self._experiment is None:
            there = self.client.get_experiment_by_name(self.to.experiment)
            if there is not None and there.lifecycle_stage != "active":
                raise LabError(
                    f"MLflow at {self.to.shown}: the experiment {self.to.experiment!r} is deleted; restore "
                    "it, or name another one in MLFLOW_EXPERIMENT_NAME"
                )
            self._experiment = (
                self.client.create_experiment(self.to.experiment, artifact_location=self.to.artifacts)
                if there is None
                else there.experiment_id
            )
        return self._experiment

    def _write(self, entry: Entry, known: dict[str, Found]) -> None:
        """One entry, its digest last. What the server refuses as wrong is noted, and others go on."""
        if entry.parent in self.refused:
            self.refused[entry.id] = f"what it belongs to was refused: {self.refused[entry.parent]}"
            return
        content = entry.content()
        parent = None if entry.parent is None else known[entry.parent].run
        own = {**content.tags, **({PARENT: parent} if parent else {})}
        try:
            run, points = self._made(entry, known, content)
            for metrics, params, tags in zip_longest(
                _pieces(points, AT_ONCE[0]), _pieces(list(content.params.items()), AT_ONCE[1]),
                _pieces(list(own.items()), AT_ONCE[2]), fillvalue=(),
            ):  # fmt: skip
                self._log(run, metrics, params, tags)
            if entry.ended is None:
                self.client.update_run(run, status=entry.status)
            else:
                self.client.set_terminated(run, status=entry.status, end_time=entry.ended)
            self._log(run, tags=[(MADE_FROM, entry.digest)])
            known[entry.id] = Found(run, entry.digest, parent)
        except Exception as error:
            status = getattr(error, "get_http_status_code", lambda: None)()
            if status != 400:
                raise
            self.refused[entry.id] = _said(error)

    def _made(self, entry: Entry, known: dict[str, Found], content: Content) -> tuple[str, Sequence[Point]]:
        """The run of an entry, and the points that it has not yet."""
        if (there := known.get(entry.id)) is not None:
            keys = {point.key for point in content.points}
            has = {(key, one.step) for key in keys for one in self.client.get_metric_history(there.run, key)}
            return there.run, [point for point in content.points if (point.key, point.step) not in has]
        tags = {JOURNAL: self.journal, ENTRY: entry.id, MADE_AS: entry.form}
        run = self.client.create_run(
            self._experiment_id(), start_time=entry.began, tags=tags, run_name=entry.name
        )
        known[entry.id] = Found(run.info.run_id, "", None)
        return run.info.run_id, content.points

    def _log(
        self,
        run: str,
        points: Sequence[Point] = (),
        params: Sequence[tuple[str, str]] = (),
        tags: Sequence[tuple[str, str]] = (),
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            run,
            metrics=[Metric(one.key, one.value, one.at, one.step) for one in points],
            params=[Param(*one) for one in params],
            tags=[RunTag(*one) for one in tags],
        )


def bring(folder: Path, uri: str | None) -> tuple[Target, int]:
    """All that a journal has, whether its study runs or not. Returns where to, and how many runs. Raises
    `LabError`, and `AwayError` where trying again may help."""
    journal = [seen(record) for record in iterate(folder / RUNS)]
    if not journal:
        raise LabError(f"{folder / RUNS}: no run has ended yet; there is nothing to bring")
    copy = folder / STUDY
    study = copy.read_text(encoding="utf-8") if copy.exists() else ""
    to = target(folder, uri, journal[0].record.study)
    found = entries(journal, study, running=is_running(folder))
    with alone(folder):
        try:
            client = connect(to.uri)
        except Exception as error:
            raise AwayError(f"MLflow at {to.shown}: {_said(error)}") from error
        sink = Sink(client, to, identity(folder / RUNS))
        sink.bring(found, sure=True)
    check(sink)
    return to, sum(one.id.startswith("run ") for one in found)


def check(sink: Sink) -> None:
    """Raise `LabError` for what the server does not take."""
    if sink.refused:
        first, why = next(iter(sink.refused.items()))
        raise LabError(
            f"MLflow at {sink.to.shown} refuses {len(sink.refused)} entries, such as {first}: {why}"
        )


def _whole(entry: Entry, known: Mapping[str, Found]) -> bool:
    there, parent = known.get(entry.id), known.get(entry.parent or "")
    return there is not None and (there.digest, there.parent) == (entry.digest, parent and parent.run)


def _pieces(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for at in range(0, len(values), size):
        yield values[at : at + size]


def _said(error: Exception) -> str:
    """An error of MLflow in a line; it has the whole request in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text.rpartition("Caused by ")[2] if "Caused by " in text else text)[:300]
