"""Another store, measured in the same rounds: a program that puts and gets blocks when it is told to.

It is started with ``--blocks N --block-bytes B --seed S``, writes a line ``{"ready": NAME}``, and answers a
line ``put``, ``get``, ``stream`` or ``check`` with ``{"seconds": S}``, ``{"seconds": null}`` for what it has
no way to do, or ``{"error": TEXT}``. ``get`` gives all blocks at once, ``stream`` one after the other. It
ends with its input. `bench/beside` of the sources has such programs.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import click

from kvik.store.bench.figures import Rounds

WORDS = ("put", "get", "stream")
_ENDS = 20.0  # seconds


class Beside:
    """One such program."""

    def __init__(self, command: str, process: subprocess.Popen[str]) -> None:
        self._command = command
        self._process = process
        self.name = str(self._answer().get("ready", command))

    @classmethod
    @contextlib.contextmanager
    def started(cls, command: str, blocks: int, block_bytes: int, seed: int) -> Iterator[Beside]:
        """Run it; raises ``click.ClickException`` where it does not start, or says that it cannot."""
        sizes = ["--blocks", str(blocks), "--block-bytes", str(block_bytes), "--seed", str(seed)]
        try:
            process = subprocess.Popen(
                [*shlex.split(command), *sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except (OSError, ValueError) as error:  # such as a quotation without its end
            raise click.ClickException(f"{command}: {error}") from None
        try:
            yield cls(command, process)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDS)
            process.kill()
            process.wait()

    def round(self, rounds: Rounds) -> None:
        """Have it put and get once."""
        for word in WORDS:
            if (value := self._ask(word)) is not None:
                rounds.add(f"{self.name} {word}", value)

    def check(self) -> None:
        """Have it compare what came back; raises ``click.ClickException`` for another byte."""
        self._ask("check")

    def _ask(self, word: str) -> float | None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{word}\n")
                self._process.stdin.flush()
        value = self._answer().get("seconds")
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise click.ClickException(f"{self._command}: it took {value!r} seconds, which is no time")
        return value

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        answer: dict[str, Any] = {"error": f"{line!r} is no answer: it is one JSON object a line"}
        with contextlib.suppress(ValueError):
            said = json.loads(line or '{"error": "it ended"}')
            answer = said if isinstance(said, dict) else answer
        if "error" in answer:
            raise click.ClickException(f"{self._command}: {answer['error']}")
        return answer
