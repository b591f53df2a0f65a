"""A client that may leave before its answer is over."""

import contextlib
import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

from kvik.demo import client


def ask_and_leave(
    url: str, prompt: list[int], tokens: int, after: float | threading.Event, **more: object
) -> tuple[client.Completion, bool]:
    """Stream a completion, and cut the connection after so many seconds, unless it is over by then; or when
    the caller sets an event, which it does in any case.

    Returns what came, and whether it was cut. Raises `client.RequestError`, `OSError` or `HTTPException`
    where the server did not answer, and this side had not left.
    """
    parts = urlsplit(url)
    seconds = 0.0 if isinstance(after, threading.Event) else after
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds + 60)
    result = client.Completion()
    left, over = threading.Event(), threading.Event()
    connection.connect()
    stream = connection.sock

    def leave() -> None:
        if isinstance(after, threading.Event):
            after.wait()
        else:
            over.wait(after)
        if not over.is_set():
            left.set()
            with contextlib.suppress(OSError):  # the server was first
                stream.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=leave, daemon=True).start()
    try:
        payload = client.body(prompt, tokens, stream=True, **more)
        start = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(payload), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise client.RequestError(response.status, response.read().decode(errors="replace"))
        client.read_stream(response, result, start)
    except (OSError, http.client.HTTPException, client.RequestError):
        if not left.is_set():
            raise
        return result, True
    finally:
        over.set()
        connection.close()
    return result, False
