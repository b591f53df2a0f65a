"""MLflow beside a study that runs: a thread that brings each record there while nothing is measured, and
never delays or fails the study."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from kvik_lab.records import RunRecord, iterate
from kvik_lab.run.journal import STUDY, Journal
from kvik_lab.tracking.deliver import Sink, Target, alone, check, connect, identity, target
from kvik_lab.tracking.form import entries, seen

AGAIN = (2.0, 30.0)  # seconds until a server that is away is tried again: at first, and at most
END_LIMIT = 10.0  # seconds that what is left may take when the study has ended

Around = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def beside(journal: Journal, study: str, uri: str | None, say: Callable[[str], None]) -> Iterator[Around]:
    """For as long as the block lasts, bring what the journal has and gets. Gives what is to be put around
    all that is measured, in which nothing is brought. `uri` None: there is no MLflow; empty: it is where
    `target` says. Raises `LabError` where a package is missing, before the block begins."""
    if uri is None:
        yield contextlib.nullcontext
        return
    bringer = Bringer(journal, target(journal.folder, uri, study))
    journal.listeners.append(bringer.tell)
    bringer.thread.start()
    try:
        yield bringer.measuring
    finally:
        say(bringer.finish())


class Bringer:
    """The thread, and what it has been told."""

    def __init__(self, journal: Journal, to: Target) -> None:
        self.journal, self.to = journal, to
        self.thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._seen = list(map(seen, iterate(journal.file))) if journal.file.exists() else []
        self._wake, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        self._until: float | None = None  # when the study has ended: the last moment to try
        self._wrong = "it was not reached in time"
        self._sink: Sink | None = None
        # Now, as it takes seconds of a processor: modules, and the tables of a new database.
        self._client: Any = None
        with contextlib.suppress(Exception):  # a database on another host may be away, as a server may
            self._client = connect(to.uri)

    def tell(self, record: RunRecord) -> None:
        """Of a record that is in the journal."""
        self._seen.append(seen(record))
        self._wake.set()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """No entry is begun in this time: it would take of the processors that are measured."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    def finish(self) -> str:
        """Wait for what is left, for a while. Returns what became of it, with what to do next."""
        self._until = time.monotonic() + END_LIMIT
        self._wake.set()
        self.thread.join(END_LIMIT)
        if not self.thread.is_alive() and not self._wrong:
            return f"MLflow: all is at {self.to.shown}, experiment {self.to.experiment}"
        why = self._wrong or "the end was not reached in time"
        later = f"kvik lab mlflow {shlex.quote(str(self.journal.folder))} --to {shlex.quote(self.to.shown)}"
        return f"MLflow: not all was brought: {why}. Bring it later with: {later}"

    def _work(self) -> None:
        again = AGAIN[0]
        while True:
            until = self._until
            try:
                self._bring(ended=until is not None)
                self._wrong, again = "", AGAIN[0]
            except Exception as error:  # whatever it is, the study goes on
                self._wrong = str(error) or type(error).__name__
            if until is not None and (not self._wrong or time.monotonic() > until):
                return
            self._wake.wait(None if not self._wrong else 1.0 if until is not None else again)
            self._wake.clear()
            again = min(2 * again, AGAIN[1])

    def _bring(self, *, ended: bool) -> None:
        told = list(self._seen)
        self._idle.wait()
        if self._client is None:
            self._client = connect(self.to.uri)
        if not told:
            return
        if self._sink is None:
            self._sink = Sink(self._client, self.to, identity(self.journal.file), self._idle.wait)
        with alone(self.journal.folder):
            study = (self.journal.folder / STUDY).read_text(encoding="utf-8")
            self._sink.bring(entries(told, study, running=not ended), sure=ended)
        if ended:
            check(self._sink)
