"""A task file run, task by task: it resumes where it stopped, and says how."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.roles.processes import last_lines
from kvik_lab.errors import LabError
from kvik_lab.study.problems import did_you_mean
from kvik_lab.tasks.form import Task, TaskFile, read_task_file
from kvik_lab.tasks.shell import Ended, end_marked, groups_of, run_command
from kvik_lab.tasks.state import DONE, Record, Shell, State, Status, load_state, locked, state_path

_TAIL_LINES = 20


@dataclass(frozen=True)
class RunOptions:
    """How a file is run. `start` is the id of the task to begin with; `reset` forgets what was done before.

    `timeout_s` is for each command; None waits for ever. `state` is the folder of states and logs.
    """

    start: str | None = None
    reset: bool = False
    timeout_s: float | None = 3600.0
    state: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `statuses` has each task's status, None for one that has not run. `failed` is the id of the task that
    stopped it, `text` what happened and how to go on. `running` are process groups with processes that are
    still there, by the task that started them.
    """

    statuses: dict[str, str | None]
    failed: str | None
    text: str
    running: dict[str, list[int]]
    log: Path


def run_task_file(
    path: str | os.PathLike[str], options: RunOptions | None = None, say: Callable[[str], None] = print
) -> Outcome:
    """Run the tasks of a file that have not succeeded yet, in order; stop at the first command that fails.

    Raises `StudyError` for a file with mistakes, `LabError` for an unknown task or a run that is under way
    already, and `KeyboardInterrupt` after it has ended the running command and noted the task as interrupted.
    """
    chosen = options or RunOptions()
    file = read_task_file(path)
    _place_of(path, file, chosen.start)
    place = state_path(chosen.state, file.digest)
    with locked(place):
        if chosen.reset:
            with contextlib.suppress(LabError):  # a damaged state does not say what it started
                _end_all(load_state(place, file.name), say)
            place.unlink(missing_ok=True)
        return _Run(Path(path), file, chosen, load_state(place, file.name), say).run()


def stop_task_file(path: str | os.PathLike[str], state: Path | None = None) -> dict[str, list[int]]:
    """End the processes that a file's tasks left running; (the groups that were ended, by task).

    Raises `LabError` for a damaged state: what runs is then not known.
    """
    file = read_task_file(path)
    place = state_path(state, file.digest)
    with locked(place):
        return _end_all(load_state(place, file.name), lambda _: None)


def command_line(command: str, path: Path, state: Path | None) -> str:
    """`kvik lab tasks COMMAND` for a file whose state is there."""
    return shlex.join(
        ["kvik", "lab", "tasks", command, str(path), *([] if state is None else ["--state", str(state)])]
    )


def _place_of(path: str | os.PathLike[str], file: TaskFile, start: str | None) -> int:
    """Where among its tasks a run is told to begin. Raises `LabError` for a task that it does not have."""
    ids = [task.id for task in file.tasks]
    if start is None:
        return 0
    if start not in ids:
        raise LabError(f"{path}: no task {start!r}; {did_you_mean(start, ids, what='its tasks')}")
    return ids.index(start)


def dry_run(path: str | os.PathLike[str], start: str | None = None) -> str:
    """What would be run from the task `start` on, with the variables' values in it. Raises as
    `run_task_file` does."""
    file, lines = read_task_file(path), []
    for task in file.tasks[_place_of(path, file, start) :]:
        lines.append(f"# {task.id}: {task.name}")
        if task.skip_if is not None:
            lines.append(f"# skipped if this succeeds: {file.expand(task.skip_if)}")
        lines += [file.expand(command) for command in task.commands]
    return "\n".join(lines)


def _end_all(state: State, say: Callable[[str], None]) -> dict[str, list[int]]:
    ended: dict[str, list[int]] = {}
    for name, record in state.tasks.items():
        for mark in record.marks:
            for group in end_marked(mark):
                ended.setdefault(name, []).append(group)
                say(f"ended process group {group} of {name}")
        record.marks = []
    if state.tasks:
        state.save()
    return ended


class _Run:
    def __init__(
        self, path: Path, file: TaskFile, options: RunOptions, state: State, say: Callable[[str], None]
    ) -> None:
        self.path, self.file, self.options, self.state, self.say = path, file, options, state, say
        self.log = state.path.with_suffix(".log")
        self.shell = Shell(str(Path.cwd()))
        self.output_from = 0

    def run(self) -> Outcome:
        begun = self.options.start is None
        for task in self.file.tasks:
            begun = begun or task.id == self.options.start
            record = self.state.tasks.get(task.id)
            done = record is not None and record.status in DONE
            if not begun or (done and self.options.start is None):
                self.say(f"{task.id}: {record.status + ' before' if record else 'left out'}")
                if record is not None and record.shell is not None:
                    self.shell = record.shell
                continue
            self._end_leftovers(task)
            failed = self._task(task)
            if failed is not None:
                return self._outcome(task.id, failed)
        return self._outcome(None, "")

    def _end_leftovers(self, task: Task) -> None:
        """What an earlier run of the task left: it is about to be started again."""
        record = self.state.tasks.get(task.id)
        for mark in record.marks if record else ():
            for group in end_marked(mark):
                self.say(f"{task.id}: ended process group {group}, which an earlier run of it had left")

    def _task(self, task: Task) -> str | None:
        """Run one task; None, or what went wrong."""
        record = Record("running", time.time())
        self.state.tasks[task.id] = record
        self.state.save()
        try:
            if task.skip_if is not None:
                self.say(f"{task.id}: {task.name}: is it done already?")
                ended = self._command(task.skip_if, record)
                if ended.status == 0:
                    self._close(record, "skipped", f"{task.id}: skipped, its condition holds")
                    return None
            self.say(f"{task.id}: {task.name}")
            for number, command in enumerate(task.commands, 1):
                ended = self._command(command, record)
                self.shell = ended.shell
                if ended.status != 0:
                    self._close(record, "timeout" if ended.status is None else "failed")
                    return self._failure(task, number, ended)
        except KeyboardInterrupt:
            self._close(record, "interrupted")
            raise
        self._close(record, "success", f"{task.id}: success")
        return None

    def _command(self, command: str, record: Record) -> Ended:
        text = self.file.expand(command)
        mark = uuid.uuid4().hex
        record.marks.append(mark)
        self.state.save()  # before it starts: a run that is killed leaves a trace of it
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            log.write(f"+ {text}\n".encode())
            self.output_from = log.tell()
        ended = run_command(text, self.shell, self.log, self.options.timeout_s, mark)
        if not groups_of(mark):
            record.marks.remove(mark)
        return ended

    def _close(self, record: Record, status: Status, text: str = "") -> None:
        record.status, record.at = status, time.time()
        record.shell = replace(self.shell)
        self.state.save()
        if text:
            self.say(text)

    def _failure(self, task: Task, number: int, ended: Ended) -> str:
        how = (
            f"ran longer than {self.options.timeout_s:g} s and was ended with its process group"
            if ended.status is None
            else f"ended with status {ended.status}"
            if ended.status >= 0
            else f"was ended by signal {-ended.status}"
        )
        command = self.file.expand(task.commands[number - 1])
        tail = last_lines(self.log, self.output_from, _TAIL_LINES) or ["(none)"]
        again = command_line("run", self.path, self.options.state)
        return "\n".join(
            [
                f"{task.id}: command {number} of {len(task.commands)} {how}:",
                *(f"  {line}" for line in command.splitlines()),
                "its output:",
                *(f"  {line}" for line in tail),
                f"all output: {self.log}",
                f"to go on with this task: {again}",
                "to go on elsewhere: add --from ID; to begin anew: add --reset",
            ]
        )

    def _outcome(self, failed: str | None, text: str) -> Outcome:
        statuses: dict[str, str | None] = {}
        running: dict[str, list[int]] = {}
        for task in self.file.tasks:
            record = self.state.tasks.get(task.id)
            statuses[task.id] = record.status if record else None
            alive = sorted(group for mark in (record.marks if record else ()) for group in groups_of(mark))
            if alive:
                running[task.id] = alive
        return Outcome(statuses, failed, text, running, self.log)
