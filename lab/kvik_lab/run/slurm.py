"""Nodes that Slurm gives: an allocation a node (`salloc`), and in it a step (`srun`) for every role and every
short command.

`salloc` runs here, under a keeper, and gives the allocation back when this process ends, in whatever way.
Where this host is gone as a whole, what beats in the allocation cancels it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvik.roles.node import COMMAND_LIMIT, NodeError
from kvik.roles.processes import Process, ProcessError
from kvik_lab.run.remote import Line, Way
from kvik_lab.run.spec import NodeSpec

STEP_LIMIT = 60.0  # seconds for the first step to begin in an allocation that is there
HOLD = (
    'scontrol show node --oneliner "$SLURM_JOB_NODELIST"; '
    'echo "kvik-lab holds $SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec sleep infinity'
)
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_HELD = re.compile(r"^kvik-lab holds (\d+) (\S+)$", re.MULTILINE)
_QUEUED = re.compile(r"^salloc: .*job allocation (\d+)", re.MULTILINE)
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


@contextlib.contextmanager
def slurm_ways(specs: Mapping[str, NodeSpec], logs: Path) -> Iterator[dict[str, Way]]:
    """An allocation for each, within the block. `NodeError` where Slurm does not give one in time."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(_allocated(name, spec, logs)) for name, spec in specs.items()}


@contextlib.contextmanager
def _allocated(name: str, spec: NodeSpec, logs: Path) -> Iterator[Way]:
    command = ["salloc", "--no-bell", f"--job-name=kvik-{name}", "--ntasks=1", "--kill-command=TERM"]
    log = logs / f"slurm-{name}.log"
    log.write_text("")  # of an allocation before, its number
    salloc = Process("salloc", [*_outside(), *command, *spec.options, "--nodes=1", "sh", "-c", HOLD], log)
    try:
        try:
            salloc.wait_until(lambda: _HELD.search(salloc.said()) is not None, time.monotonic() + spec.wait)
        except ProcessError as error:
            why = f"no allocation within {spec.wait:g} s (`wait`){_reason(salloc.said())}"
            raise NodeError(f"node {name}: Slurm gives {why}\n{error}") from error
        said = salloc.said()
        job, host = _HELD.findall(said)[0]
        line = Line(name, host, functools.partial(_step, job))
        beats = logs / f"slurm-{name}.beats"
        with line.pulse(spec.python or sys.executable, beats, STEP_LIMIT, "scancel $SLURM_JOB_ID"):
            yield Way(line, (_ADDRESS.findall(said) or [host])[0])
    finally:
        salloc.stop()


def _step(job: str, command: Sequence[str]) -> list[str]:
    """Beside the other steps, and with all that the allocation has."""
    srun = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none"]
    return [*_outside(), *srun, "--mpi=none", "--unbuffered", "--quiet", *command]


def _outside() -> list[str]:
    """As from outside of a job: this process may be in one, whose variables would be options."""
    inside = [name for name in os.environ if name.startswith("SLURM_") and name not in KEPT]
    return ["env", *(part for name in inside for part in ("-u", name))]


def _reason(said: str) -> str:
    """What Slurm says of a job that waits."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        for job in _QUEUED.findall(said)[-1:]:
            ask = ["squeue", "--noheader", f"--jobs={job}", "--format=%T, %r"]
            done = subprocess.run(ask, capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False)
            return f"; job {job} is {done.stdout.strip()}" if done.stdout.strip() else ""
    return ""
