"""Fetch or recompute: what `Store.choose` says of a store that another process serves, and of one within."""

from __future__ import annotations

import pytest

import kvik
from kvik.store import Choice
from tests.python.store_rig import BLOCK, Rig, Served

NEVER, ALWAYS = 1e-9, 100.0  # seconds to compute: faster than any store, slower than any


def test_what_is_unknown_is_fetched_and_known_then() -> None:
    with Served() as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(64))
        rig.put(keys)
        assert rig.store.choose(16, NEVER) == Choice(True, "unknown", 16 * BLOCK, None, 0, NEVER)
        assert rig.got(keys) == 16
        choice = rig.store.choose(16, ALWAYS)
        assert (choice.fetch, choice.reason, choice.nbytes) == (True, "faster", 16 * BLOCK)
        assert choice.estimated is not None
        assert 0 < choice.estimated <= ALWAYS
        # Most choices against fetching are followed: all but the second, and ever fewer after it.
        reasons = [rig.store.choose(16, NEVER).reason for _ in range(10)]
        assert [at for at, reason in enumerate(reasons) if reason == "refresh"] == [1, 4, 9]
        assert set(reasons) == {"slower", "refresh"}
        counts = {"faster": 1, "unknown": 1, "slower": 7, "refresh": 3, "unavailable": 0}
        assert rig.store.choices() == counts
        del rig.bytes


def test_a_store_that_is_away_is_not_chosen() -> None:
    with Served() as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        keys = rig.store.keys(range(16))
        served.kill()
        with pytest.raises((kvik.StoreUnavailable, kvik.PeerLost, kvik.PeerRestarted)):
            rig.got(keys, 1.0)
        assert rig.store.choose(4, ALWAYS) == Choice(False, "unavailable", 4 * BLOCK, None, 0, ALWAYS)
        del rig.bytes


def test_a_store_within_the_process_is_always_chosen() -> None:
    with kvik.Engine() as engine:
        rig = Rig(engine, None)
        keys = rig.store.keys(range(16))
        rig.put(keys)
        assert rig.got(keys) == 4
        assert rig.store.choose(4, NEVER).reason == "unknown"
        with pytest.raises(kvik.InvalidArgument, match="recompute"):
            rig.store.choose(4, -1.0)
        del rig.bytes
