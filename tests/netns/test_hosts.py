"""The two hosts are apart from this one, and nothing of them stays."""

import subprocess
from pathlib import Path

import pytest

from kvik.roles.hosts import LIMIT, OWN
from tests.netns.hosts import Host, two_hosts


def links() -> str:
    """The network interfaces of the calling thread's namespace, by number and name."""
    lines = subprocess.check_output(["ip", "-o", "link"], text=True, timeout=LIMIT).splitlines()
    return "\n".join(" ".join(line.split()[:2]) for line in lines)


def namespace() -> int:
    """The network namespace of the calling thread."""
    return Path(OWN).stat().st_ino


def test_each_has_its_own_loopback_and_addresses(hosts: tuple[Host, Host]) -> None:
    """Three namespaces, and each host has its end of the cable."""
    seen = {namespace()}
    for host in hosts:
        with host.inside():
            seen.add(namespace())
            assert "eth0@" in links()
        shown = host.run("ip", "-brief", "address")
        assert f" {host.v4}/24 " in shown
        assert f" {host.v6}/64 " in shown
    assert len(seen) == 3


def test_a_failure_leaves_nothing(hosts: tuple[Host, Host]) -> None:
    """Also where a test fails while it is inside: the thread is back, the cable is gone."""
    assert hosts
    before = namespace(), links()
    with pytest.raises(ZeroDivisionError):
        fail_inside(before[0])
    assert (namespace(), links()) == before


def fail_inside(outside: int) -> None:
    """Fail on one of two fresh hosts."""
    with two_hosts() as (left, right), left.inside(), right.inside():
        assert namespace() != outside
        raise ZeroDivisionError
