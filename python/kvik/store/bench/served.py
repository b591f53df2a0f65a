"""A store in a process of its own, for as long as a measurement takes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import click

from kvik.config import variables

_READY = "kvik store serves on "
_ENDS = 30.0  # seconds


@contextlib.contextmanager
def served(arguments: Sequence[str]) -> Iterator[str]:
    """Run ``kvik store serve`` on loopback with these arguments, and give its address. The user's settings
    reach neither it nor engines that are made meanwhile: its log and its bucket are not to be measured."""
    command = [sys.executable, "-c", "from kvik.cli import main; main()", "store", "serve"]
    with variables.left_out():
        process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", "--log-level", "warning", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line.startswith(_READY):
                raise click.ClickException("the store that was to be measured did not start; see above")
            yield line.removeprefix(_READY).split()[0]
        finally:
            process.terminate()
            try:
                process.wait(timeout=_ENDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
