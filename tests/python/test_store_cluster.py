"""A store of several server processes: under load while one is killed, one stops, one joins, one is back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvik
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.tiers import Stop, Tiers
from tests.busy import Watch
from tests.python.store_load import BLOCKS, DEADLINE, LIMIT, PROMPTS, RUN, Client, Load, becomes
from tests.python.store_rig import NAMESPACE, Bytes, Served

pytestmark = pytest.mark.timeout(300)  # servers are waited for several times


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
            becomes(lambda: all(len(client.store.members()) == 4 for client in load.clients))
            load.goes_on()
        one.again()
        becomes(lambda: all(client.up() == 4 for client in load.clients))
        load.goes_on()
        listed(two, three, four)
        becomes(lambda: all(client.up() == 3 for client in load.clients))
        load.goes_on()
        for client in load.clients:
            calls = len(client.calls)
            print(f"{copies} copies: {calls} calls, {client.wrong} wrong, longest {client.longest:.2f} s")
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
        becomes(lambda: client.up() == 0)
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


def test_a_namespace_changes_while_the_server_is_away() -> None:
    links = b"".join(number.to_bytes(32, "little") for number in range(4))
    with Served() as served, kvik.Engine() as engine:
        layout = kvik.Layout(BLOCKS, RUN)
        config = CacheConfig(address=served.address, host_cache=1 << 20, deadline=1.0, save_deadline=LIMIT)
        tiers = Tiers(kvik, config, engine, engine.allocate(layout.nbytes), layout)

        def saved() -> dict[str, int]:
            return tiers.save(links, range(4), time.monotonic() + LIMIT, tiers.behind()).counts

        def changes(revision: str) -> None:
            watch = Watch()
            tiers.set_namespace(dataclasses.replace(NAMESPACE, revision=revision))
            assert watch.seconds() < 0.5, "a step of the serving engine waits for the store"

        changes("first")
        counts = saved()
        assert (counts["host_stored"], counts["remote_stored"]) == (4, 4)
        # It stands still, which nobody knows yet; then it has gone, which its client knows.
        with served.stopped():
            changes("second")
        becomes(lambda: saved().get("remote_known") == 4)
        served.kill()
        becomes(lambda: "remote" in tiers.look(links + b"\xff" * 32)[2])
        changes("third")
        assert saved().get("host_stored") == 4
        changes("fourth")
        served.again()
        becomes(lambda: saved().get("remote_known") == 4)
        assert saved().get("host_known") == 4
        assert tiers.look(links) == (4, 4, {})
        tiers.close()


def test_a_memory_that_cannot_be_had_keeps_nothing() -> None:
    with kvik.Engine() as engine:
        layout = kvik.Layout(BLOCKS, RUN)
        tiers = Tiers(kvik, CacheConfig(host_cache=1), engine, engine.allocate(layout.nbytes), layout)
        tiers.set_namespace(NAMESPACE)
        assert tiers.save(bytes(32), range(1), time.monotonic() + LIMIT, tiers.behind()).counts == {}
        assert tiers.look(bytes(32)) == (0, 0, {})


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
