"""Servers of a store that enter themselves in etcd, clients that follow them, and an etcd that goes away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvik
from kvik.roles.ports import LOOPBACK, free_ports
from tests.python.etcd import Etcd
from tests.python.peers import stop
from tests.python.store_load import becomes
from tests.python.store_rig import NAMESPACE, Rig, Served

LIMIT = 60.0
"""For what a test waits for: a lease takes ten seconds to end, and more on a busy machine."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    program = Etcd.program()
    if program is None:
        pytest.skip("there is no etcd")
    running = Etcd(program, tmp_path)
    yield running
    running.kill()


def _met(engine: kvik.Engine, etcd: Etcd) -> Rig:
    """A client, as soon as some server is entered."""
    until = time.monotonic() + LIMIT
    while True:
        try:
            return Rig(engine, f"etcd:{etcd.url}")
        except kvik.StoreUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)  # a client that was not made has nothing to wait for


def _names(rig: Rig) -> set[str]:
    return {member.name for member in rig.store.members()}


def test_servers_come_and_go_in_etcd(etcd: Etcd) -> None:
    given = ("--etcd", etcd.url)
    with Served(*given) as one, Served(*given) as two, kvik.Engine() as engine:
        rig = _met(engine, etcd)
        becomes(lambda: _names(rig) == {one.address, two.address})
        with Served(*given) as three:
            becomes(lambda: _names(rig) == {one.address, two.address, three.address})
            keys = [rig.store.keys([prompt] * 64) for prompt in range(30)]
            becomes(lambda: all(rig.put(some).refused == 0 for some in keys))
            assert [rig.got(some) for some in keys] == [16] * 30
            # One that ends in order takes itself out; what it had is missed, and what others have is not.
            two.process.terminate()
            becomes(lambda: _names(rig) == {one.address, three.address})
            there = [rig.got(some) for some in keys]
            assert set(there) <= {0, 16}
            assert 16 in there
            # One that is killed goes with its lease.
            three.kill()
            becomes(lambda: _names(rig) == {one.address})
        assert all(rig.put(some).refused == 0 for some in keys)
        assert [rig.got(some) for some in keys] == [16] * 30
        del rig.bytes


def test_an_etcd_that_is_away_costs_nothing(etcd: Etcd) -> None:
    given = ("--etcd", etcd.url)
    with Served(*given) as one, Served(*given) as two, kvik.Engine() as engine:
        rig, both = _met(engine, etcd), {one.address, two.address}
        becomes(lambda: _names(rig) == both)
        keys = [rig.store.keys([prompt] * 64) for prompt in range(10)]
        assert [rig.put(some).stored for some in keys] == [16] * 10
        stop(etcd.process.pid)  # as if the network were cut
        assert [rig.got(some) for some in keys] == [16] * 10
        etcd.kill()
        assert [rig.got(some) for some in keys] == [16] * 10
        # It has forgotten all: the servers enter themselves again.
        etcd.again(empty=True)
        with kvik.Engine() as other:
            fresh = _met(other, etcd)
            becomes(lambda: _names(fresh) == both)
            assert [fresh.got(some) for some in keys] == [16] * 10
            del fresh.bytes
        becomes(lambda: _names(rig) == both)
        assert [rig.got(some) for some in keys] == [16] * 10
        # The first one follows again.
        with Served(*given) as three:
            becomes(lambda: _names(rig) == {*both, three.address})
        del rig.bytes


def test_without_an_etcd_there_is_no_client() -> None:
    with kvik.Engine() as engine:
        layout = kvik.Layout(2, 8192)
        nowhere = f"etcd:http://{LOOPBACK}:{free_ports(1)[0]}/kvik"
        with pytest.raises(kvik.StoreUnavailable, match="etcd at http"):
            kvik.Store.connect(engine, nowhere, NAMESPACE, layout)
        with pytest.raises(kvik.InvalidArgument, match="without TLS"):
            kvik.Store.connect(engine, "etcd:https://a:1/b", NAMESPACE, layout)
