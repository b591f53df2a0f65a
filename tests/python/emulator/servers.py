"""Emulated servers as processes: one alone, pairs, and a router before them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvik.demo import client
from kvik.demo.engines import start_router
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from kvik.shapes import ModelShape
from tests.python.peers import thread_states

START_LIMIT = 120.0
LIMIT = 60.0  # seconds that something which should take a moment may take on a busy machine
EXPIRY = 12.0
COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
USAGE = "vllm:kv_cache_usage_perc"
TINY = ModelShape.preset("tiny")
ASK_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One emulated server: its role, and its other options as they are on the command line."""

    name: str
    role: str = "both"
    options: tuple[str, ...] = ()
    report: Path | None = None
    expiry: float = EXPIRY

    def start(self, port: int, logs: Path) -> HttpServer:
        """Start it; it is up once `wait_ready` returns."""
        command = [
            sys.executable,
            "-m",
            "kvik.cli",
            "emulator",
            "serve",
            "--port",
            str(port),
            "--role",
            self.role,
        ]
        command += ["--kv-memory", "16MiB"]
        if self.report is not None:
            command += ["--report-file", str(self.report)]
        env = {"KVIK_CONNECTOR_EXPIRY": str(self.expiry)}
        return HttpServer(self.name, [*command, *self.options], port, logs / f"{self.name}.log", env)


@contextlib.contextmanager
def servers(folder: Path, *specs: Spec) -> Iterator[list[HttpServer]]:
    """Start them side by side, and stop them at the end."""
    with Fleet() as fleet:
        deadline = time.monotonic() + START_LIMIT
        started = [
            fleet.add(spec.start(port, folder))
            for spec, port in zip(specs, free_ports(len(specs)), strict=True)
        ]
        for server in started:
            server.wait_ready(deadline)
        yield started


@contextlib.contextmanager
def routed(folder: Path, prefill: Sequence[HttpServer], decode: Sequence[HttpServer]) -> Iterator[HttpServer]:
    """A router before them."""
    with Fleet() as fleet:
        (port,) = free_ports(1)
        first, second = ([server.url for server in role] for role in (prefill, decode))
        router = fleet.add(start_router(first, second, port, folder))
        router.wait_ready(time.monotonic() + START_LIMIT)
        yield router


def prompt_of(length: int, seed: int, vocab: int = TINY.vocab_size) -> list[int]:
    """A prompt of random tokens."""
    rng = random.Random(seed * 1_000_003 + length)
    return [rng.randrange(3, vocab) for _ in range(length)]


def tokens_of(server: HttpServer, prompt: Sequence[int], tokens: int, **more: object) -> list[int]:
    """What a server answers, not streamed."""
    return client.tokens_of(client.post(server.url, client.body(prompt, tokens, **more), LIMIT))


def prefill_by_hand(server: HttpServer, prompt: Sequence[int], **more: object) -> dict[str, Any]:
    """Let a server compute a prompt; the `kv_transfer_params` of its answer."""
    answer = client.post(server.url, client.body(prompt, 1, kv_transfer_params=ASK_PREFILL, **more), LIMIT)
    params = answer["kv_transfer_params"]
    assert isinstance(params, dict), answer
    return params


def metric(server: HttpServer, name: str) -> float:
    """One sample, summed over engines."""
    return client.metrics(server.url)[name]


def by_engine(server: HttpServer, name: str) -> dict[str, float]:
    """One metric of each data-parallel replica."""
    found = {}
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=LIMIT) as answer:  # noqa: S310  (this machine's)
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name}{{"):
                labels, value = line.rsplit(" ", 1)
                found[re.findall(r'engine="(\d+)"', labels)[0]] = float(value)
    return found


def wait_for(look: Callable[[], float], good: Callable[[float], bool], within: float = LIMIT) -> float:
    """Look again and again until the value is good or the time is up; returns the last value."""
    until = time.monotonic() + within
    value = look()
    while not good(value) and time.monotonic() < until:
        time.sleep(0.02)  # a gauge has no event to wait for
        value = look()
    return value


def wait_used(server: HttpServer, level: float, within: float = LIMIT) -> None:
    """Wait until a server uses no more KV pages than `level`."""
    last = wait_for(lambda: metric(server, USAGE), lambda value: value <= level + 1e-9, within)
    assert last <= level + 1e-9, (
        f"{server.name} uses {last:.4%} of its pages, {level:.4%} before\n{server.tail()}"
    )


def ask(
    url: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """One request by hand: status and JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT)
    try:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        answer = json.loads(response.read() or b"{}")
        return response.status, answer
    finally:
        connection.close()


def ask_and_leave(server: HttpServer, body: dict[str, object], when: Callable[[], bool]) -> None:
    """Send a request, and hang up once `when()` holds."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT)
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    assert wait_for(lambda: float(when()), bool)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert wait_for(lambda: float(not when()), bool)


def ranks_of(server: HttpServer | subprocess.Popen[str]) -> list[int]:
    """The process ids of a server's ranks, in the order in which they were started."""
    children: list[int] = []
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        children += [int(pid) for pid in (task / "children").read_text().split()]
    return sorted(pid for pid in children if b"kvik.emulator.rank" in _command_line(pid))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def kill(pid: int, number: int) -> None:
    """Send one process a signal."""
    os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal: no thread of it runs."""
    try:
        states = thread_states(pid)
    except FileNotFoundError:
        return False
    return bool(states) and all(state == "T" for state in states)
