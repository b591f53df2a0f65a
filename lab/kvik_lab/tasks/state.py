"""What a run of a task file has done: kept by the file's content, so that two files never share a state.

One JSON file a task file, named by the SHA-256 of what the file says: a file that was changed begins anew. It
holds the shell's exported variables, which may be secrets: it is readable by its owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvik_lab.errors import LabError
from kvik_lab.records import write_whole

Status = Literal["running", "success", "skipped", "failed", "timeout", "interrupted"]
DONE: tuple[Status, ...] = ("success", "skipped")


@dataclass
class Shell:
    """What one command leaves for the next: where it was, and what it changed in the environment."""

    folder: str
    changed: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the next command."""
        kept = {name: value for name, value in base.items() if name not in self.removed}
        return {**kept, **self.changed}

    @classmethod
    def after(cls, found: Mapping[str, str], base: Mapping[str, str], folder: str) -> Shell:
        """The difference between the environment that a command left and the one that the run began with."""
        changed = {name: value for name, value in found.items() if base.get(name) != value}
        return cls(folder, changed, [name for name in base if name not in found])


@dataclass
class Record:
    """One task: how it ended, when (seconds since 1970), and the shell that it left.

    `marks` are those of its commands that may have processes still: each command's processes carry a mark of
    their own in their environment.
    """

    status: Status
    at: float
    shell: Shell | None = None
    marks: list[str] = field(default_factory=list)


@dataclass
class State:
    """The records of a task file's tasks."""

    path: Path
    name: str
    tasks: dict[str, Record] = field(default_factory=dict)

    def save(self) -> None:
        """Write in one step; what was there before stays whole if this fails."""
        text = json.dumps({"name": self.name, "tasks": {key: asdict(one) for key, one in self.tasks.items()}})
        write_whole(self.path, text, 0o600)


def load_state(path: Path, name: str) -> State:
    """The state of a task file; an empty one where there is none. `LabError` for one that is damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tasks = {key: _record(one) for key, one in raw["tasks"].items()}
    except FileNotFoundError:
        return State(path, name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path}: no state of a task file ({error}); begin anew with --reset") from error
    return State(path, name, tasks)


def _record(raw: dict[str, Any]) -> Record:
    shell = raw.pop("shell")
    return Record(**raw, shell=None if shell is None else Shell(**shell))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a state for one run. Raises `LabError` while another has it, and where none can be kept."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = path.with_suffix(".lock").open("w")
    except OSError as error:
        why = error.strerror or error
        raise LabError(f"{path.parent}: no state can be kept here: {why}; give another --state") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = "another run of this task file is under way; wait for its end"
            raise LabError(f"{path.with_suffix('.lock')}: {text}") from error
        yield


def state_path(folder: Path | None, digest: str) -> Path:
    """Where the state of a file with this content lies: in `folder`, else where the user keeps states."""
    if folder is None:
        try:
            base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        except RuntimeError as error:
            raise LabError("there is no home folder to keep the state in; give one by --state") from error
        folder = Path(base) / "kvik" / "tasks"
    return folder / f"{digest[:16]}.json"
