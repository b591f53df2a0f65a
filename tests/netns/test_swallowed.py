"""Data channels that a path swallows, as a firewall does with connections that it has forgotten."""

from typing import Any

import pytest

import kvik
from tests.netns.children import LIMIT, SECRET, ask, own, reader
from tests.netns.hosts import Connection, Host
from tests.python.peers import Peer

PAGES, PAGE = 64, 128 * 1024  # 8 MiB
SIZE = {"pages": PAGES, "page_bytes": PAGE}
SHORT = 1.0  # seconds: the deadline of a read that may end by it
# Reads that may: what a channel may stay unheard, and some. Not seconds, which a machine may stand still.
MOST = 20

pytestmark = pytest.mark.timeout(600)


def test_swallowed_channels_are_replaced(hosts: tuple[Host, Host]) -> None:
    """Only the data channels are dead: control frames pass, so nobody is silent. Transfers end by their
    deadlines, and then move again by themselves, over new channels."""
    left, right = hosts
    with own(left, listen=f"{left.v4}:0", secret=SECRET, **SIZE) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        # Where the machine stands still before the first read, the kernel has found out until then.
        for _ in range(3):
            if codes := _ends(left, right, ticket):
                break
        assert codes
        assert set(codes) <= {kvik.DeadlineExceeded.code, kvik.PeerLost.code}


def _ends(left: Host, right: Host, ticket: str) -> list[str]:
    """How transfers of a reader ended that lost its channels, before they moved again."""
    with right.inside(), Peer(reader, secret=SECRET, channels=2, **SIZE) as peer:
        peer.hear(LIMIT)
        assert _read(peer, ticket, deadline=LIMIT)["same"] is True
        control, *channels = sorted(right.connections(), key=lambda one: one.received)
        assert len(channels) == 2
        for channel in channels:
            _swallow(left, right, channel)
        codes: list[str] = []
        while "same" not in (said := _read(peer, ticket)):
            codes.append(said["code"])
            assert len(codes) < MOST, codes
        print(f"moved again after transfers that ended with {codes}")
        assert said["same"] is True
        # The rules still hold: what moves now, moves over other connections. Old ones may still be there.
        before = {channel.local: channel.received for channel in channels}
        ports = before.keys()
        moved = {one.local: one.received - before.get(one.local, 0) for one in right.connections()}
        busy = {local for local, received in moved.items() if received > PAGES * PAGE / 3}
        assert busy
        assert ports.isdisjoint(busy)
        assert control.local not in ports
        return codes


def _read(peer: Peer, ticket: str, deadline: float = SHORT) -> dict[str, Any]:
    return ask(peer, do="read", ticket=ticket, seed=1, deadline=deadline)


def _swallow(left: Host, right: Host, channel: Connection) -> None:
    """From now on nothing of a connection passes, in either direction, and nobody is told."""
    port = channel.local.rpartition(":")[2]
    left.run("ip", "rule", "add", "ipproto", "tcp", "dport", port, "blackhole")
    right.run("ip", "rule", "add", "ipproto", "tcp", "sport", port, "blackhole")
