"""The ways in which a benchmark ends badly, apart from kvik's own errors."""

from __future__ import annotations


class BenchError(Exception):
    """The run cannot go on: a peer that does not answer, options that do not fit together."""


class NoAnswerError(BenchError):
    """Nothing came from the other side in time."""


class CheckError(BenchError):
    """A transfer reported success, and its bytes, byte count or transport are not what was asked for."""
