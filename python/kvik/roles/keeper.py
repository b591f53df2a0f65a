"""Keeps one child process, and lets nothing of it outlive us: `python keeper.py GRACE COMMAND...`.

A serving engine is several processes, some in sessions of their own, and its starter may be killed at any
moment. So each one gets a keeper between it and the starter. The keeper's stdin is a pipe whose other end
only the starter holds: when the starter closes it, or dies in whatever way, the keeper reads end-of-file
and stops the child: SIGTERM to its process group, SIGKILL after GRACE seconds. Descendants that are left
over become the keeper's children (it is a subreaper), and are killed too. The keeper ends with the
child's exit status.

On another machine the pipe is a connection, and a cable that is cut closes nothing. There the keeper is
started as `python -c SOURCE -`, and reads one line of JSON first: `command`, `grace`, `env` (added to its
own), `folder` and `lease`. It then takes its starter for dead as well when `lease` seconds have brought
no byte. This file needs nothing but the standard library, so that its text can be sent to a machine that
has no kvik.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SILENT = (
    "kvik: nothing was heard of who has started this for {:g} s, so it is ended: the starter has stood still "
    "(stopped, asleep, or without a turn on its processors), has ended, or cannot be reached from here.\n"
)
SWEEP_LIMIT = 5.0
LOOKS = 5  # parts of a lease
SWEEP_LEAST = 200  # processes; no server has so many


class Child(Protocol):
    """A process that was started and not waited for."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def wait(self) -> int:
        """Wait for its end; returns its exit status, or -n after signal n."""


def main(argv: list[str]) -> int:
    """Run the command until it ends or stdin does; returns the command's exit status (128 + n after signal
    n), and 127 where it cannot be started."""
    lease, errors = None, None
    grace, command = (0.0, argv[1:]) if argv[0] == "-" else (float(argv[0]), argv[1:])
    if argv[0] == "-":
        asked = json.loads(_first_line())
        os.environ.update(asked["env"])
        if asked["folder"] is not None:
            os.makedirs(asked["folder"], exist_ok=True)  # noqa: PTH103  (without pathlib it starts sooner)
            os.chdir(asked["folder"])
        grace, command, lease = float(asked["grace"]), asked["command"], asked["lease"]
        # Both go into one log, and two streams over a network arrive in any order.
        errors = subprocess.STDOUT
    try:
        return keep(
            grace,
            # This process has one thread, so code between fork and exec is safe here.
            lambda before: subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True, preexec_fn=before
            ),
            lease,
        )
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error}", file=sys.stderr)
        return 127


def _first_line() -> bytes:
    """The first line of stdin, and not a byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(127)  # the starter is gone already
        line += byte
    return line


def keep(grace: float, start: Callable[[Callable[[], None]], Child], lease: float | None = None) -> int:
    """Keep the child that `start` starts; what `start` is given has to be called in the child, first of all.

    This process may have one thread only. `lease`: seconds that may pass without a byte on stdin. Returns the
    child's exit status (128 + n after signal n).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the starter's to handle
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    child = start(lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    ended = os.pidfd_open(child.pid)
    if _wait(ended, wake, lease):
        _say(SILENT.format(lease))
    _signal_group(child.pid, signal.SIGTERM)
    select.select([ended], [], [], grace)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    _sweep()
    return status if status >= 0 else 128 - status


def _wait(ended: int, wake: int, lease: float | None) -> bool:
    """Until the child has ended, a signal came, or the starter is gone: whether its silence says so."""
    part = None if lease is None else lease / LOOKS
    silent = 0.0
    while lease is None or silent < lease:
        began = time.monotonic()
        ready, _, _ = select.select([0, wake, ended], [], [], part)
        took = time.monotonic() - began
        if ready == [0] and os.read(0, 4096):
            silent = 0.0
        elif ready:
            return False
        elif part is not None and took < 2 * part:
            # Else this machine stood still, and with it what brings the bytes.
            silent += took
    return True


def _say(text: str) -> None:
    """Into the child's log, where it can be read by somebody: what brings it there may be gone, and keeps
    nobody from ending the child."""
    with contextlib.suppress(OSError):
        if select.select([], [1], [], 0)[1]:
            os.write(1, text.encode())


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _sweep() -> None:
    """Kill and reap the descendants that were in other process groups; each killed one may hand us its
    own. One is reaped each time, and so many are however late this process gets its turns."""
    until = time.monotonic() + SWEEP_LIMIT
    reaped = 0
    while reaped < SWEEP_LEAST or time.monotonic() < until:
        reaped += 1
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
