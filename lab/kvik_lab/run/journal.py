"""The journal: a folder with the records of runs, which a controller that was killed leaves as good as it
was.

`runs.jsonl` has a record for each run that has ended, written and on the disk before the next one begins.
What a controller was killed in the midst of has none, and is run again. One controller at a time has the
folder: it holds a lock on `lock`, which the kernel lets go of when the controller ends in whatever way. The
lock is of the kind that others can ask about without taking it (`F_OFD_GETLK`): a look at the journal keeps
no controller from its work.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvik_lab.errors import LabError
from kvik_lab.records import RunRecord, append, mend, read, write_whole

RUNS, LOCK, STUDY = "runs.jsonl", "lock", "study.yaml"
_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, process


class Journal:
    """The records of one study's runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / RUNS
        self.records: dict[str, RunRecord] = {}
        self.listeners: list[Callable[[RunRecord], None]] = []
        """Told of each record that was added."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, text: str, *, resume: bool) -> Iterator[Journal]:
        """The journal for a study with this text, with the lock held. Raises `LabError` where another
        controller has it, where it is of another text, where it is not there and `resume`, has runs and not
        `resume`, or cannot be written."""
        journal = cls(folder)
        if resume and not (folder / STUDY).is_file():
            raise LabError(f"{folder}: no study was begun here; begin it with `kvik lab run`")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            opened = (folder / LOCK).open("w")
        except OSError as error:
            raise LabError(f"{folder}: no journal can be kept here: {error}; give another --out") from error
        with opened as lock:
            try:
                fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _whole(fcntl.F_WRLCK))
            except BlockingIOError:
                raise LabError(
                    f"{folder}: another `kvik lab run` is at work here; wait for it, or end it"
                ) from None
            journal._take_up(text, resume)
            yield journal

    def _take_up(self, text: str, resume: bool) -> None:
        copy = self.folder / STUDY
        same = copy.exists() and copy.read_text(encoding="utf-8") == text
        if copy.exists() and not same and self.file.exists():
            raise LabError(
                f"{self.folder}: its runs are of another text of the study ({copy}); "
                "give a new folder with --out, or take the change back"
            )
        if self.file.exists() and not resume:
            raise LabError(
                f"{self.folder}: has runs already; go on with `kvik lab resume`, or give a new folder "
                "with --out"
            )
        if not same:
            _write(copy, text)
        mend(self.file)
        self.load()

    def load(self) -> None:
        """Read what is there."""
        self.records = {one.id: one for one in read([self.file])} if self.file.exists() else {}

    def done(self, slot: str) -> bool:
        """Whether a planned run has been completed; one that failed is run again."""
        record = self.records.get(slot)
        return record is not None and record.outcome == "completed"

    def add(self, record: RunRecord) -> None:
        """Write a record; it is on the disk when this returns. Raises `OSError` where it cannot be."""
        append(self.file, record)
        self.records[record.id] = record
        for tell in self.listeners:
            tell(record)


def _write(path: Path, text: str) -> None:
    """What was there stays whole if this fails. Raises `LabError`."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise LabError(
            f"{path}: cannot be written: {error.strerror}; make room, or give another --out"
        ) from error


def is_running(folder: Path) -> bool:
    """Whether a controller is at work in the folder. Nothing is locked for the question, so that one which
    begins at this moment is not refused for it. Raises `LabError` where it cannot be seen."""
    try:
        with (folder / LOCK).open("rb") as lock:
            found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _whole(fcntl.F_RDLCK))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LabError(
            f"{folder / LOCK}: whether a study runs here cannot be seen: {error.strerror}; ask as the user "
            "who runs it"
        ) from error
    kind: int = struct.unpack(_FLOCK, found)[0]
    return kind != fcntl.F_UNLCK


def _whole(kind: int) -> bytes:
    """A lock of a whole file, as fcntl(2) takes it."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
