"""A store of several server processes: under load while one is killed, one stops, one joins, one is back."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvik
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.tiers import Stop, Tiers
from tests.python.store_rig import NAMESPACE, Bytes, Served

DEADLINE = 6.0
"""Of each call: longer than it takes until a process that has stopped is noticed."""
LIMIT = 60.0
"""For what a test waits for."""
BLOCKS, RUN = 200, 512
PROMPTS = 24


class Client:
    """A client of several servers, with pages for a prompt; each block that it reads is compared."""

    def __init__(self, servers: Path | list[str], copies: int) -> None:
        self.engine = kvik.Engine()
        self.layout = kvik.Layout(BLOCKS, RUN)
        self.region = self.engine.allocate(self.layout.nbytes)
        self.bytes: Bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8).reshape(BLOCKS, RUN)
        self.store = kvik.Store.connect(
            self.engine, servers, NAMESPACE, self.layout, copies=copies, deadline=LIMIT
        )
        self.longest, self.calls, self.wrong = 0.0, 0, 0

    def keys(self, prompt: int) -> bytes:
        return self.store.keys([prompt] * (BLOCKS * NAMESPACE.block_tokens))

    def content(self, keys: bytes) -> Bytes:
        """Of each block bytes that are its own."""
        words = np.frombuffer(keys, dtype=np.uint8).reshape(-1, 32)
        return np.tile(words, (1, RUN // 32))

    def put(self, prompt: int) -> kvik.Stored:
        keys = self.keys(prompt)
        self.bytes[:] = self.content(keys)
        with self._timed():
            return self.store.put(
                keys, self.region.pages(self.layout, range(BLOCKS)), deadline=DEADLINE
            ).wait()

    def got(self, prompt: int) -> int:
        """How many blocks are read, asked for in two calls."""
        keys, there, half = self.keys(prompt), 0, random.Random(prompt).randrange(1, BLOCKS)
        self.bytes[:] = 0xEE
        for first, end in ((0, half), (half, BLOCKS)):
            pages = self.region.pages(self.layout, range(first, end))
            with self._timed():
                get = self.store.get(
                    keys[32 * first : 32 * end], pages, before=keys[: 32 * first], deadline=DEADLINE
                )
                there += get.wait()
            if there < end:
                break
        self.wrong += int((self.bytes[:there] != self.content(keys)[:there]).any(axis=1).sum())
        return there

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - began)
        self.calls += 1

    def up(self) -> int:
        return sum(member.up for member in self.store.members())

    def close(self) -> None:
        del self.bytes
        self.engine.close()


class Load:
    """Clients that read prompts, and put what they miss, until it ends."""

    def __init__(self, servers: Path, copies: int, clients: int) -> None:
        self.clients = [Client(servers, copies) for _ in range(clients)]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in self.clients]
        self._rounds = [0] * clients
        self._moved = threading.Condition()
        self.failures: list[BaseException] = []
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client) -> None:
        number = self.clients.index(client)
        chance = random.Random(number)
        try:
            while not self._ended.is_set():
                prompt = chance.randrange(PROMPTS)
                if client.got(prompt) < BLOCKS:
                    client.put(prompt)
                with self._moved:
                    self._rounds[number] += 1
                    self._moved.notify_all()
        except BaseException as error:
            self.failures.append(error)
            with self._moved:
                self._moved.notify_all()

    def goes_on(self, rounds: int = 5) -> None:
        """Waits until each client has come so much further."""
        with self._moved:
            aims = [done + rounds for done in self._rounds]
            assert self._moved.wait_for(
                lambda: self.failures or all(map(int.__ge__, self._rounds, aims)), LIMIT
            ), self._rounds
        assert not self.failures, self.failures

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(LIMIT)
        for client in self.clients:
            client.close()


def _becomes(so: object) -> None:
    until = time.monotonic() + LIMIT
    while not so():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)  # nobody tells a client's user when a server is there


@pytest.mark.parametrize("copies", [1, 2])
def test_servers_come_and_go_under_load(tmp_path: Path, copies: int) -> None:
    servers = tmp_path / "servers"
    with contextlib.ExitStack() as stack:
        one, two, three, four = (stack.enter_context(Served("--memory", "64MiB")) for _ in range(4))

        def listed(*members: Served) -> None:
            servers.write_text("".join(f"{member.address}\n" for member in members))

        listed(one, two, three)
        load = stack.enter_context(Load(servers, copies, 2))
        load.goes_on()
        one.kill()
        load.goes_on()
        with two.stopped():
            load.goes_on()
            listed(one, two, three, four)
            for client in load.clients:
                _becomes(lambda client=client: len(client.store.members()) == 4)
            load.goes_on()
        one.again()
        for client in load.clients:
            _becomes(lambda client=client: client.up() == 4)
        load.goes_on()
        listed(two, three, four)
        for client in load.clients:
            _becomes(lambda client=client: client.up() == 3)
        load.goes_on()
        for client in load.clients:
            print(
                f"{copies} copies: {client.calls} calls, {client.wrong} wrong, longest {client.longest:.2f} s"
            )
            print(client.store.members())
        assert sum(client.wrong for client in load.clients) == 0
        # One deadline in all: one for each server, or each copy, would be several of them.
        assert max(client.longest for client in load.clients) < 2 * DEADLINE


def _stat(address: str) -> dict[str, Any]:
    """What `kvik store stat --json` says."""
    command = [sys.executable, "-c", "from kvik.cli import main; main()", "store", "stat", address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_copy_is_read_while_its_server_is_down() -> None:
    with Served() as one, Served() as two, Served() as three:
        client = Client([one.address, two.address, three.address], 2)
        for prompt in range(PROMPTS):
            assert client.put(prompt).stored == BLOCKS
        two.kill()
        assert [client.got(prompt) for prompt in range(PROMPTS)] == [BLOCKS] * PROMPTS
        assert client.store.stat()["blocks"] > 0
        servers = _stat(",".join([one.address, two.address, three.address]))["servers"]
        assert {name: server["up"] for name, server in servers.items()} == {
            one.address: True, two.address: False, three.address: True,
        }  # fmt: skip
        assert sum(server["blocks"] for server in servers.values()) == client.store.stat()["blocks"]
        with pytest.raises(kvik.StoreUnavailable, match="ask again"):
            client.store.clear()
        one.kill()
        three.kill()
        _becomes(lambda: client.up() == 0)
        with pytest.raises(kvik.StoreUnavailable, match="none of the store's 3 servers"):
            client.got(0)
        assert client.store.choose(10, 1.0).reason == "unavailable"
        assert client.wrong == 0
        client.close()


def test_a_name_lists_the_servers() -> None:
    with Served() as one, kvik.Engine() as engine:
        host, port = one.address.split(":")
        layout = kvik.Layout(BLOCKS, RUN)
        store = kvik.Store.connect(engine, f"dns:localhost:{port}", NAMESPACE, layout)
        assert f"{host}:{port}" in [member.name for member in store.members() if member.up]


def test_a_serving_engine_reads_amid_a_prompt() -> None:
    with Served() as one, Served() as two, Served() as three, kvik.Engine() as engine:
        layout = kvik.Layout(BLOCKS, RUN)
        region = engine.allocate(layout.nbytes)
        pages: Bytes = np.frombuffer(memoryview(region), dtype=np.uint8).reshape(BLOCKS, RUN)
        config = CacheConfig(
            address=f"{one.address},{two.address},{three.address}", deadline=LIMIT, save_deadline=LIMIT
        )
        tiers = Tiers(kvik, config, engine, region, layout)
        tiers.set_namespace(NAMESPACE)
        content = np.random.default_rng(1).integers(0, 256, (BLOCKS, RUN), dtype=np.uint8)
        pages[:] = content
        links = b"".join(number.to_bytes(32, "little") for number in range(BLOCKS))
        until = time.monotonic() + LIMIT
        saved = tiers.save(links, range(BLOCKS), until, tiers.behind())
        assert saved.counts["remote_stored"] == BLOCKS
        assert tiers.look(links) == (BLOCKS, 0, {})
        tiers.prefetch(links, 0)
        for first in (0, 1, 63, 64, 100, BLOCKS - 1):
            pages[:] = 0xEE
            loaded = tiers.load(links, range(first, BLOCKS), until, Stop(), tiers.behind())
            assert (loaded.remote, loaded.failures) == (BLOCKS - first, {})
            assert (pages[first:] == content[first:]).all()
            assert (pages[:first] == 0xEE).all()
        tiers.close()
        del pages
