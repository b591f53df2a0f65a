"""A stage is a named step of a target. Its output goes to `target/log/NAME.log` and is shown when it fails.

The runner prints each stage's name and time, stops at the first failure, and ends with a table of what ran,
what was skipped and why. Every command runs in its own process group with a deadline, so that nothing
outlives a stage.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from kvikbuild.paths import LOGS, ROOT

Output = Literal[
    "log", "both", "terminal"
]  # both: log and terminal; terminal: the terminal itself, for live tables
SKIPS_FILE = "KVIK_TEST_SKIPS_FILE"
SHOWN_ON_FAILURE = 400  # lines; the log file has all of them
SHOWN_LAST = 12  # lines of it once more at the very end, all that some readers of a long output see
GRACE = 10.0  # seconds between SIGTERM and SIGKILL for what a stage has started
ENDS = (signal.SIGTERM, signal.SIGHUP)


class StageError(Exception):
    """A stage failed; the text says what to do about it."""


@dataclass
class Context:
    """What a stage works with: its log, its clock, and where it reports what it left out."""

    name: str
    log: IO[bytes]
    output: Output
    deadline: float
    skips: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""

    def say(self, text: str) -> None:
        """Write a line to the log."""
        self.log.write(f"{text}\n".encode())
        self.log.flush()

    def run(self, argv: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
        """Run a command to its end; a failure ends the stage."""
        status = self.status(argv, env, cwd)
        if status != 0:
            raise StageError(f"`{_shown(argv)}` ended with status {status}")

    def status(self, argv: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> int:
        """Run a command to its end and return its status; its output goes to the log (and the screen)."""
        self.say(f"$ {_shown(argv)}")
        skips = LOGS / f"{self.name}.skips.jsonl"
        skips.unlink(missing_ok=True)
        full = {**os.environ, **(env or {}), SKIPS_FILE: str(skips)}
        out: IO[bytes] | int | None = self.log
        if self.output != "log":
            out = subprocess.PIPE if self.output == "both" else None
        err = subprocess.STDOUT if self.output == "both" else out
        process = subprocess.Popen(
            [str(a) for a in argv], cwd=cwd, env=full, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        copier = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        copier.start()
        try:
            return process.wait(timeout=max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StageError(f"`{_shown(argv)}` did not end within the stage's time limit") from None
        finally:
            _end_group(process)
            copier.join(timeout=10)
            self._collect_skips(skips)

    def capture(self, argv: Sequence[object], env: Mapping[str, str] | None = None) -> str:
        """Run a short command and return what it printed; a failure ends the stage."""
        full = {**os.environ, **(env or {})}
        done = subprocess.run(
            [str(a) for a in argv],
            cwd=ROOT,
            env=full,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise StageError(f"`{_shown(argv)}` ended with status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _copy(self, pipe: IO[bytes] | None) -> None:
        for line in pipe or ():
            self.log.write(line)
            self.log.flush()
            with contextlib.suppress(OSError):  # whoever read it has gone; the command must not wait for them
                sys.stdout.buffer.write(b"    " + line)
                sys.stdout.flush()

    def _collect_skips(self, file: Path) -> None:
        if file.exists():
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                self.skips.append((str(entry["name"]), str(entry["reason"])))


@contextlib.contextmanager
def beside(name: str, argv: Sequence[object], env: Mapping[str, str], deadline: float) -> Iterator[None]:
    """Run a command with what the block leaves of the processors, to its end; a failure ends the stage.

    The kernel gives it time only where nobody else wants any, so what the block measures is not disturbed.
    Its output goes to `target/log/NAME.log`. It is stopped where the block fails.
    """
    path = LOGS / f"{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            ["chrt", "--idle", "0", *(str(a) for a in argv)], cwd=ROOT, env={**os.environ, **env},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        # Where the kernel shares the processors out by sessions, this one would have as much as all others.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
        try:
            yield
            status = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StageError(f"`{_shown(argv)}` did not end within the stage's time limit") from None
        finally:
            _end_group(process)
    if status != 0:
        end = "\n".join(path.read_text(errors="replace").splitlines()[-SHOWN_LAST:])
        raise StageError(
            f"`{_shown(argv)}` ended with status {status}; {path.relative_to(ROOT)} ends with\n{end}"
        )


@dataclass(frozen=True)
class Stage:
    """A step: its name, what it does, where its output goes, and its time limit in seconds."""

    name: str
    body: Callable[[Context], None]
    output: Output = "log"
    limit: float = 1800.0


@dataclass
class Outcome:
    """How a stage ended."""

    name: str
    result: str
    seconds: float
    note: str
    skips: list[tuple[str, str]]


def run_stages(stages: Sequence[Stage], left_out: Sequence[tuple[str, str]] = ()) -> int:
    """Run the stages in order and print the summary; returns the exit status."""
    LOGS.mkdir(parents=True, exist_ok=True)
    # A stage's commands are in sessions of their own: an end from outside has to pass through their clean-up.
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    outcomes: list[Outcome] = []
    for stage in stages:
        outcome = _run_one(stage)
        outcomes.append(outcome)
        if outcome.result != "ok":
            break
    rest = [s.name for s in stages[len(outcomes) :]]
    _summary(outcomes, rest, left_out)
    return 0 if not rest and all(o.result == "ok" for o in outcomes) else 1


def _end(number: int, _frame: object) -> None:
    """Once: `timeout` sends its signal to `make`, which passes it on, and to all of its group. The second one
    would end the clean-up."""
    for one in ENDS:
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)


def _run_one(stage: Stage) -> Outcome:
    path = LOGS / f"{stage.name}.log"
    print(f"==> {stage.name}", flush=True)
    start = time.monotonic()
    result, note = "ok", ""
    with path.open("wb") as log:
        context = Context(stage.name, log, stage.output, start + stage.limit)
        try:
            stage.body(context)
            note = context.note
        except (StageError, OSError, subprocess.TimeoutExpired) as error:
            result, note = "failed", str(error)
        except KeyboardInterrupt:
            result, note = "failed", "interrupted"
        except Exception as error:  # a variable that is no number, say: the table is printed all the same
            context.say(traceback.format_exc())
            result, note = "failed", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if result != "ok":
        if stage.output == "log":
            _show_log(path)
        print(f"    {note}", file=sys.stderr)
    print(f"    {result} in {seconds:.1f} s{f' ({note})' if result == 'ok' and note else ''}", flush=True)
    return Outcome(stage.name, result, seconds, note, context.skips)


def _show_log(path: Path) -> None:
    lines = path.read_text(errors="replace").splitlines()
    if len(lines) > SHOWN_ON_FAILURE:
        print(f"    ... {len(lines) - SHOWN_ON_FAILURE} earlier lines are in {path.relative_to(ROOT)}")
    for line in lines[-SHOWN_ON_FAILURE:]:
        print(f"    {line}")


def _summary(outcomes: Sequence[Outcome], rest: Sequence[str], left_out: Sequence[tuple[str, str]]) -> None:
    print("\nstage            result    seconds")
    for outcome in outcomes:
        print(f"{outcome.name:<16} {outcome.result:<8} {outcome.seconds:>8.1f}  {outcome.note}".rstrip())
    for name in rest:
        print(f"{name:<16} {'not run':<8} {'':>8}  an earlier stage failed")
    print(f"{'total':<16} {'':<8} {sum(o.seconds for o in outcomes):>8.1f}")
    skips = [*left_out, *(skip for outcome in outcomes for skip in outcome.skips)]
    print("\nskipped: nothing" if not skips else "\nskipped:")
    for name, reason in skips:
        print(f"  {name}: {reason}")
    for outcome in outcomes:
        if outcome.result != "ok":
            _show_end(outcome)


def _show_end(outcome: Outcome) -> None:
    path = LOGS / f"{outcome.name}.log"
    print(f"\nthe stage `{outcome.name}` failed: {outcome.note}; {path.relative_to(ROOT)} ends with")
    for line in path.read_text(errors="replace").splitlines()[-SHOWN_LAST:]:
        print(f"  {line}")


def _shown(argv: Sequence[object]) -> str:
    return " ".join(str(a) for a in argv)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Stop whatever of the command's own process group is still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.poll()
