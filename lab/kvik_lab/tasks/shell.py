"""One shell command in a process group of its own, as if all commands of a file ran in one shell."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvik_lab.errors import LabError
from kvik_lab.run import machine
from kvik_lab.tasks.state import Shell

MARK = "_KVIK_TASK"
"""The environment variable by which the processes of one command know each other. It does not begin with
KVIK_, or whatever a command starts of kvik would refuse it as an option that there is not."""

# allexport: what a command assigns is there for the next one, as in one shell. The trap also runs on `exit`.
_WRAPPER = """\
__kvik_left=$2; __kvik_command=$1; shift 2
trap '__kvik_status=$?; set +a; env -0 > "$__kvik_left"; exit $__kvik_status' EXIT
set -a; eval "$__kvik_command"
"""
_NOT_KEPT = ("_", "SHLVL", MARK, "__kvik_left", "__kvik_command", "__kvik_status")
_GRACE_S = 5.0
_KILLED_S = 60.0  # a bound for what cannot be ended
_LOOK_S = 0.05


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status (None: it ran past its time), and what it leaves."""

    status: int | None
    shell: Shell


def run_command(command: str, shell: Shell, log: Path, timeout_s: float | None, mark: str) -> Ended:
    """Run a command by bash, with its output in `log`.

    Its processes carry `mark`. A command that is past its time, or interrupted, is ended with all of them.
    Those that it leaves in the background go on: their output must not be waited for, so it goes to the file.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise LabError("bash is not on the PATH, and task files are written for it; install it")
    base = dict(os.environ)
    process: subprocess.Popen[bytes] | None = None
    with tempfile.TemporaryDirectory(prefix="kvik-task-") as folder, log.open("ab") as output:
        left = Path(folder) / "environment"
        try:
            process = subprocess.Popen(
                [bash, "-c", _WRAPPER, "bash", command, str(left)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=shell.folder,
                env={**shell.environment(base), MARK: mark}, start_new_session=True,
            )  # fmt: skip
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            _end(process, mark)
        except OSError as error:
            text = f"no command can be started there: {error.strerror or error}"
            raise LabError(f"{shell.folder}: {text}") from error
        except BaseException:
            _end(process, mark)
            raise
        return Ended(status, _left(left, base, shell))


def _end(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    end_marked(mark)
    if process is not None:
        if process.poll() is None:  # it has put off its mark (`exec env -i ...`); a child keeps its number
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _left(path: Path, base: Mapping[str, str], before: Shell) -> Shell:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # the command replaced the shell (`exec`), or its trap
        return before
    pairs = (one.partition(b"=") for one in raw.split(b"\0") if one)
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    kept = {name: value for name, value in found.items() if name not in _NOT_KEPT}
    own = {name: value for name, value in base.items() if name not in _NOT_KEPT}
    return Shell.after(kept, own, found.get("PWD", before.folder))


def groups_of(mark: str) -> set[int]:
    """The process groups in which processes carry a mark.

    A number alone would not do: once a group has ended, the system may give its number to a stranger's.
    """
    found = set()
    for pid in machine.marked(f"{MARK}={mark}"):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            state, _, group = machine.stat(Path(f"/proc/{pid}"))[:3]
            if state not in (b"Z", b"X"):
                found.add(int(group))
    return found


def end_marked(mark: str) -> list[int]:
    """End the process groups that carry a mark: first asked to, then made to. Their numbers."""
    ended = sorted(groups_of(mark))
    for way, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _KILLED_S)):
        until = time.monotonic() + patience
        for group in groups_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, way)
        while groups_of(mark) and time.monotonic() < until:
            time.sleep(_LOOK_S)
    return ended
