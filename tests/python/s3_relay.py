"""What stands between kvik and an S3 server: passes requests on, counts them, and meddles as it is told."""

from __future__ import annotations

import http.client
import threading
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, cast

from kvik.roles.ports import LOOPBACK

Meddling = Literal["none", "fails", "slow", "cut", "short", "swapped"]
"""`fails`: a status of 500. `slow`: a kilobyte of an answer now and then. `cut`: the connection ends in the
middle of an answer. `short`: half of an object, as if it were whole. `swapped`: another object's bytes. The
last three are done to reads of objects alone."""
_END_TO_END = {"connection", "transfer-encoding", "content-length", "server", "date"}


class S3Relay(ThreadingHTTPServer):
    """Listens on a port of its own; `close` ends it and whatever waits in it."""

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__((LOOPBACK, 0), _Request)
        self.behind = urllib.parse.urlsplit(endpoint).netloc
        self.endpoint = f"http://{LOOPBACK}:{self.server_address[1]}"
        self.meddling: Meddling = "none"
        self.meddled = 0
        self.requests: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.objects: list[str] = []
        self.ending = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def count(self, method: str, received: int, sent: int) -> None:
        """One more request, with the bytes of its body and of its answer's."""
        with self._lock:
            self.requests[method] += 1
            self.received[method] += received
            self.sent[method] += sent

    def meddles(self, method: str, path: str) -> Meddling:
        """What is done to this request; remembers which objects there are."""
        with self._lock:
            if method == "PUT" and path not in self.objects:
                self.objects.append(path)
            kind = self.meddling
            if kind in ("cut", "short", "swapped") and (method != "GET" or path not in self.objects):
                kind = "none"
            self.meddled += kind != "none"
            return kind

    def other_than(self, path: str) -> str:
        """An object that was put after this one, or the first."""
        with self._lock:
            return self.objects[(self.objects.index(path) + 1) % len(self.objects)]

    def close(self) -> None:
        """End it."""
        self.ending.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _pass_on(self) -> None:
        relay = cast(S3Relay, self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.urlsplit(self.path).path
        kind = relay.meddles(self.command, path)
        if kind == "fails":
            self._answer(500, [], b"<Error><Code>InternalError</Code></Error>", kind)
            relay.count(self.command, len(body), 0)
            return
        asked = self.path if kind != "swapped" else relay.other_than(path)
        behind = http.client.HTTPConnection(relay.behind, timeout=30)
        try:
            behind.request(self.command, asked, body, dict(self.headers))
            answer = behind.getresponse()
            text = answer.read()
            self._answer(answer.status, answer.getheaders(), text, kind)
            relay.count(self.command, len(body), len(text))
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # as a server that has gone
        finally:
            behind.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], text: bytes, kind: Meddling) -> None:
        self.send_response(status)
        shown = text[: len(text) // 2] if kind == "short" else text
        for name, value in headers:
            if name.lower() not in _END_TO_END:
                self.send_header(name, value)
        if self.command == "HEAD":
            lengths = [value for name, value in headers if name.lower() == "content-length"]
            self.send_header("Content-Length", lengths[0] if lengths else "0")
        else:
            self.send_header("Content-Length", str(len(shown)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "cut":
            self.wfile.write(text[: len(text) // 2])
            self.close_connection = True
        elif kind == "slow":
            self._dribble(shown)
        else:
            self.wfile.write(shown)

    def _dribble(self, text: bytes) -> None:
        ending = cast(S3Relay, self.server).ending
        for first in range(0, len(text), 1024):
            self.wfile.write(text[first : first + 1024])
            if ending.wait(0.2):
                return

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - as http.server calls them
