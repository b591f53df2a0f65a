"""One request id runs through the logs of the router, both servers and the transfer between them."""

import contextlib
import json
import logging
import logging.config
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import kvik
from tests.python.peers import LIMIT, Peer, Pipe, until

PAGES, PAGE = 4, 4096
Answer = Callable[[dict[str, Any], str], dict[str, Any]]


def log_to(path: str) -> None:
    """What a server's logging configuration is: every record of kvik, and the server's own, as JSON."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": "kvik.JsonFormatter"}},
            "handlers": {"file": {"class": "logging.FileHandler", "filename": path, "formatter": "json"}},
            "loggers": {name: {"handlers": ["file"], "level": "DEBUG"} for name in ("kvik", "server")},
        }
    )
    kvik.refresh_logging()


def serve(pipe: Pipe, answer: Answer) -> None:
    """Answer completions over HTTP until the parent says that it is enough."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = json.dumps(answer(body, self.headers["X-Request-Id"])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True

    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.say(port=server.server_address[1])
    pipe.hear()
    server.shutdown()


def prefill(pipe: Pipe, log: str) -> None:
    """A server that grants pages for each request, under the id that came with it."""
    log_to(log)
    logger = logging.getLogger("server")
    with kvik.Engine(name="prefill") as engine:
        layout = kvik.Layout(PAGES, PAGE)
        region = engine.register(np.ones(layout.nbytes, np.uint8))
        grants = []

        def answer(body: dict[str, Any], request: str) -> dict[str, Any]:
            assert body["kv_transfer_params"]["do_remote_decode"]
            grants.append(engine.grant(region.pages(layout, range(PAGES)), tag=request))
            logger.info("prefilled", extra={"kvik_request": request, "kvik_grant": grants[-1].id})
            params = {"do_remote_prefill": True, "ticket": str(grants[-1].ticket)}
            return {"choices": [{"text": ""}], "kv_transfer_params": params}

        serve(pipe, answer)


def decode(pipe: Pipe, log: str) -> None:
    """A server that reads the pages of each request, under the id that came with it."""
    log_to(log)
    logger = logging.getLogger("server")
    with kvik.Engine(name="decode") as engine:
        layout = kvik.Layout(PAGES, PAGE)
        memory = np.zeros(layout.nbytes, np.uint8)
        region = engine.register(memory)

        def answer(body: dict[str, Any], request: str) -> dict[str, Any]:
            ticket = body["kv_transfer_params"]["ticket"]
            engine.read(region.pages(layout, range(PAGES)), ticket, tag=request).wait(LIMIT)
            logger.info("decoded", extra={"kvik_request": request})
            return {"choices": [{"text": str(int(memory.sum()))}]}

        serve(pipe, answer)


@contextlib.contextmanager
def router(prefill: int, decode: int, log: Path) -> Iterator[str]:
    """A router before both, as its command starts it."""
    argv = [sys.executable, "-m", "kvik.cli", "router", "serve", "--port", "0", "--log-format", "json"]
    argv += ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    with (
        log.open("w") as err,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT) == 0
        finally:
            process.kill()


def ask(address: str, request: str) -> str:
    """Complete a prompt under this id; the text."""
    told = urllib.request.Request(  # noqa: S310 - http, to this machine
        f"{address}/v1/completions",
        data=json.dumps({"model": "m", "prompt": "hello"}).encode(),
        headers={"Content-Type": "application/json", "X-Request-Id": request},
    )
    with urllib.request.urlopen(told, timeout=LIMIT) as answer:  # noqa: S310
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def records(path: Path, request: str) -> list[dict[str, str]]:
    """The lines of a log that are about a request."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line.get("request") == request]


def test_one_id_is_in_the_logs_of_all_who_took_part(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("router", "prefill", "decode")}
    ids = [f"req-{os.urandom(4).hex()}" for _ in range(2)]
    with Peer(prefill, log=str(logs["prefill"])) as one, Peer(decode, log=str(logs["decode"])) as two:
        with router(one.hear()["port"], two.hear()["port"], logs["router"]) as address:
            for request in ids:
                assert ask(address, request) == str(PAGES * PAGE)
        # The reader has confirmed, so the owner's grant ends; then the two may go.
        assert until(lambda: all(said(logs["prefill"], request, "consumed") for request in ids))
        for peer in (one, two):
            peer.say(end=True)
            assert peer.end() == 0
    for request in ids:
        mine = {name: records(path, request) for name, path in logs.items()}
        assert any("ok" in line["message"] and line["logger"] == "kvik.router" for line in mine["router"])
        assert [line["message"] for line in mine["prefill"] if line["logger"] == "server"] == ["prefilled"]
        grant = next(line["grant"] for line in mine["prefill"] if line["message"] == "prefilled")
        moved = next(line for line in mine["decode"] if line["message"].startswith("transfer done"))
        assert moved["logger"] == "kvik.engine"
        assert moved["grant"] == grant
        owner = next(line["engine"] for line in mine["prefill"] if line["message"].startswith("grant given"))
        assert moved["peer"] == owner
        assert moved["engine"] != owner
        assert [line["message"] for line in mine["decode"] if line["logger"] == "server"] == ["decoded"]
        assert all(line["level"] in ("debug", "info") for lines in mine.values() for line in lines)
        # In the order of what happened, by the clock that all of them share.
        steps = [
            next(line["time"] for line in mine["prefill"] if line["message"] == "prefilled"),
            moved["time"],
            next(line["time"] for line in mine["decode"] if line["message"] == "decoded"),
            next(line["time"] for line in mine["router"] if " ok " in line["message"]),
        ]
        assert steps == sorted(steps)
        others = [other for other in ids if other != request]
        assert not any(
            other in json.dumps(line) for other in others for lines in mine.values() for line in lines
        )


def said(path: Path, request: str, word: str) -> bool:
    return any(word in line["message"] for line in records(path, request))


def test_a_line_has_what_the_record_carries_and_no_more() -> None:
    record = logging.makeLogRecord(
        {
            "name": "kvik.engine",
            "levelno": 30,
            "levelname": "WARNING",
            "msg": 'two\nlines, "%s"',
            "args": ("é",),
        }
    )
    record.created, record.msecs = 1_700_000_000.25, 250.0
    plain = json.loads(kvik.JsonFormatter().format(record))
    assert plain == {
        "time": "2023-11-14T22:13:20.250Z", "level": "warning", "logger": "kvik.engine",
        "message": 'two\nlines, "é"',
    }  # fmt: skip
    record.kvik_request, record.kvik_transfer = "req-1", 7
    try:
        raise ValueError("inside")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = kvik.JsonFormatter().format(record)
    assert "\n" not in line
    full = json.loads(line)
    assert (full["request"], full["transfer"]) == ("req-1", "7")
    assert "ValueError: inside" in full["exception"]
    assert time.strptime(full["time"][:19], "%Y-%m-%dT%H:%M:%S")
