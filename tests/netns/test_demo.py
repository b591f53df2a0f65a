"""`kvik demo --link-rate`: the prefill engine on a host of its own, behind a cable of a stated rate."""

import json
import re
import socket
from pathlib import Path

import pytest

from kvik.roles.hosts import CABLE, CannotError, Rate, two_hosts
from tests.netns.hosts import Host
from tests.python.demo_runs import COLUMNS, running

LIMIT = 300.0  # seconds for one run
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "ms": 1e-3, "s": 1.0}
pytestmark = pytest.mark.timeout(600)


def value(number: str, unit: str) -> float:
    """In bytes or seconds."""
    return float(number.replace(",", "")) * UNITS[unit]


def test_the_link_bounds_the_transfer(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """All KV goes through the cable by tcp, and none of it faster than the cable's rate allows."""
    assert hosts  # skipped by name where there can be none
    rate = Rate.parse("200mbit")
    lengths = (100, 1000, 3000)
    options = ("--model-shape", "tiny", "--lengths", ",".join(map(str, lengths)), "--link-rate", str(rate))
    with running(*options, "--logs", str(tmp_path)) as run:
        ended = run.end(LIMIT)
    print(ended.said)
    assert ended.status == 0
    assert ended.left == []
    assert not [line for line in ended.plain() if len(line) > COLUMNS and str(tmp_path) not in line]
    assert "…" not in ended.said, "a cell was cut"
    total = 0.0
    for length in lengths:
        # prompt tokens, KV moved, TTFT alone, TTFT handed over, KV transfer, GB/s, link floor, over, tokens
        words = ended.row(length).split()
        assert words[-2:] == ["tcp", "equal"]
        moved, taken, floor = (value(*words[at : at + 2]) for at in (1, 7, 10))
        assert floor == pytest.approx(rate.floor(int(moved)), rel=0.01)
        assert taken >= floor * 0.99, "faster than the link"  # three digits are shown
        total += moved
    carried = re.search(r"The cable of 200mbit carried ([\d.]+) (\w+)", ended.said)
    assert carried
    assert value(carried[1], carried[2]) >= total


def test_a_cable_can_be_shaped_anew(hosts: tuple[Host, Host]) -> None:
    """The rate that was named last is the one that holds."""
    assert hosts
    with two_hosts() as (left, _):
        for megabits in (100, 1000):
            left.shape(Rate.parse(f"{megabits}mbit"))
            (shaper,) = json.loads(left.run("tc", "-json", "qdisc", "show", "dev", CABLE))
            assert shaper["options"]["rate"] == megabits * 1_000_000 / 8


def test_the_cable_has_the_congestion_control_of_most_machines(hosts: tuple[Host, Host]) -> None:
    """Whatever this machine's own is."""
    assert hosts
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "cubic" not in available:
        pytest.skip(f"this kernel has {', '.join(available)}, not cubic")
    with two_hosts() as (left, right):
        for family, source, target in (
            (socket.AF_INET, left.v4, right.v4),
            (socket.AF_INET6, left.v6, right.v6),
        ):
            with right.inside(), socket.create_server((target, 0), family=family) as server:
                port = server.getsockname()[1]
                with left.inside():
                    client = socket.create_connection((target, port), timeout=60, source_address=(source, 0))
                used = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                client.close()
            assert used.rstrip(b"\0") == b"cubic"


def test_a_cable_without_the_shaper_is_refused(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[Host, Host]
) -> None:
    """What the kernel or the installation lacks is named."""
    assert hosts
    with two_hosts() as (left, _):
        left.run("ip", "link", "delete", CABLE)
        with pytest.raises(CannotError, match="shapes no link here"):
            left.shape(Rate.parse("1gbit"))
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(CannotError, match=r"`tc` .* is not installed"):
            left.shape(Rate.parse("1gbit"))
    with pytest.raises(CannotError, match=r"`ip` .* is not installed"), two_hosts():
        pass
