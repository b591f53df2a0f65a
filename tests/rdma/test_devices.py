"""Both devices work, alone and across the cable, and can be taken away."""

import re

import pytest

from tests.rdma.conftest import FULL
from tests.rdma.devices import LEFT, RIGHT, V4_GID, V6_GID
from tests.rdma.guest import Guest, Job
from tests.rdma.perftest import Bandwidth, PingPong, bandwidths, ping_pongs
from tests.rdma.programs import two

pytestmark = pytest.mark.timeout(1200)
KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, MIB, *([4 * KIB, 8 * MIB] if FULL else [])]
MOVED = (64 if FULL else 2) * MIB  # in a test of bandwidth
PINGS = 1000 if FULL else 100
PING = 4096  # bytes; what the tool takes unless told otherwise


def ping_pong(gid: int = V4_GID, rounds: int = PINGS) -> Job:
    """Each device sends to the other one, in turn."""
    common = ["-g", gid, "-n", rounds, "-s", PING]
    server = ["ibv_rc_pingpong", "-d", LEFT.name, *common]
    client = ["ibv_rc_pingpong", "-d", RIGHT.name, *common, LEFT.v4]
    return two(f"ibv_rc_pingpong, GID {gid}", server, client)


def carried(guest: Guest) -> int:
    """The bytes that have gone through the cable, in both directions."""
    counters = [f"/sys/class/net/{RIGHT.end}/statistics/{way}_bytes" for way in ("rx", "tx")]
    return sum(int(line) for line in guest.run(Job("count bytes", ["cat", *counters])).checked().split())


def port_states(guest: Guest) -> dict[str, str]:
    """The state of each device's port."""
    said = guest.run(Job("port states", ["rdma", "link"])).checked()
    return dict(re.findall(r"^link (\w+)/1 state (\w+) ", said, re.MULTILINE))


def test_both_devices_are_up(guest: Guest) -> None:
    """Each is active, and has a RoCE v2 GID for each of its addresses, where `devices` says."""
    assert port_states(guest) == {LEFT.name: "ACTIVE", RIGHT.name: "ACTIVE"}
    for device in (LEFT, RIGHT):
        said = guest.run(Job("describe", ["ibv_devinfo", "-v", "-d", device.name])).checked()
        assert "PORT_ACTIVE" in said
        gids = dict(re.findall(r"GID\[\s*(\d+)\]:\s+(\S+), RoCE v2", said))
        print(device.name, gids)
        assert gids[str(V4_GID)] == f"::ffff:{device.v4}"
        assert gids[str(V6_GID)] == device.v6


@pytest.mark.parametrize("gid", [V4_GID, V6_GID])
def test_ping_pong(guest: Guest, gid: int) -> None:
    """Two processes, a device each: all bytes arrive, and go through the cable."""
    before = carried(guest)
    figures = ping_pongs(guest.run(ping_pong(gid)).checked())
    assert figures == [PingPong(2 * PING * PINGS, PINGS)] * 2
    assert carried(guest) - before >= 2 * PING * PINGS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tool", ["ib_write_bw", "ib_read_bw"])
def test_bandwidth(guest: Guest, tool: str, size: int) -> None:
    """One-sided writes and reads between two processes, a device each."""
    count = max(5, MOVED // size)  # fewer than five the tool refuses
    common = ["-x", V4_GID, "-s", size, "-n", count, "-F"]
    server = [tool, "-d", LEFT.name, *common]
    client = [tool, "-d", RIGHT.name, *common, LEFT.v4]
    before = carried(guest)
    result = guest.run(two(f"{tool} {size}", server, client))
    rows = bandwidths(result.checked())
    print(f"{count} messages of {size} bytes: {rows[0].average} MB/s, in a job of {result.seconds:.1f} s")
    assert rows[0] == Bandwidth(size, count, rows[0].average)
    assert rows[0].average > 0
    assert carried(guest) - before >= size * count


def test_a_link_that_goes_and_comes_back(guest: Guest) -> None:
    """With the network link the ports are down, and nothing passes; then all is as before."""
    guest.run(LEFT.link_down()).checked()
    try:
        assert port_states(guest) == {LEFT.name: "DOWN", RIGHT.name: "DOWN"}
        nothing = guest.run(ping_pong())
        print(nothing.output)
        assert nothing.status != 0
    finally:
        guest.run(LEFT.link_up()).checked()
    assert port_states(guest) == {LEFT.name: "ACTIVE", RIGHT.name: "ACTIVE"}
    for gid in (V4_GID, V6_GID):
        guest.run(ping_pong(gid)).checked()


def test_a_device_that_goes_and_comes_back(guest: Guest) -> None:
    """A device that was deleted is not there for anybody; made anew it works."""
    guest.run(RIGHT.remove()).checked()
    try:
        assert port_states(guest) == {LEFT.name: "ACTIVE"}
        gone = guest.run(Job("describe", ["ibv_devinfo", "-d", RIGHT.name]))
        assert gone.status != 0, gone.output
    finally:
        guest.run(RIGHT.add()).checked()
    assert port_states(guest) == {LEFT.name: "ACTIVE", RIGHT.name: "ACTIVE"}
    assert ping_pongs(guest.run(ping_pong()).checked()) == [PingPong(2 * PING * PINGS, PINGS)] * 2
