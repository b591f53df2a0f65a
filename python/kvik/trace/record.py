"""Taking a recording from a running engine, over its UNIX socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from kvik.stat.engines import PROTOCOL, StatError, asking, find
from kvik.trace.file import LAST_LINE, TraceError

_LAST_LINES_SECONDS = 10.0
_LAST_LINE_BYTES = 256
"""The last line has fewer."""


def record(
    wanted: str,
    seconds: float,
    path: Path,
    say: Callable[[str], None],
    interrupt: socket.socket | None = None,
) -> None:
    """Write an engine's transfers of so many seconds to a file. It ends earlier once `interrupt` can be read.

    `wanted` is a process number, a name, or the beginning of an id. The lines are written as they come, so
    what was recorded is in the file whatever happens. Raises TraceError.
    """
    try:
        if path.exists():
            raise FileExistsError(path)
        about = find(wanted)
        # Made last: an engine that refuses leaves no file.
        with asking(about.engine, "trace") as question, path.open("xb", buffering=0) as out:
            say(f"recording engine {about.title} (pid {about.pid}) for {seconds:g} s; Ctrl-C ends it earlier")
            question.wait_until(time.monotonic() + seconds)
            last = b""
            try:
                while piece := question.receive(interrupt):
                    _keep(out, piece)
                    last = (last + piece)[-_LAST_LINE_BYTES:]
                say(_why_over(last))
                return
            except (TimeoutError, InterruptedError):
                pass
            question.say(f"{PROTOCOL} end".encode())
            question.wait_until(time.monotonic() + _LAST_LINES_SECONDS)
            while piece := question.receive():
                _keep(out, piece)
    except FileExistsError as error:
        raise TraceError(f"{path} exists; name another file or remove it") from error
    except (OSError, StatError) as error:
        raise TraceError(str(error)) from error


def _keep(out: FileIO, piece: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part, and the next one would be within a line."""
    left = memoryview(piece)
    try:
        while left:
            left = left[out.write(left) :]
    except OSError as error:
        raise TraceError(
            f"{out.name}: {error.strerror}; what was recorded until then is in it, and can be read"
        ) from error


def _why_over(last: bytes) -> str:
    """Why the engine says no more, by the last bytes that came: one that ends writes its last line."""
    if LAST_LINE in last:
        return "the engine has ended"
    return (
        "the recording was cut off: the engine was killed, or lines were left unread for some seconds; "
        "write to a faster disk"
    )
