"""kvik over verbs, and over libfabric by verbs: the conformance suite, and ports that go down."""

from pathlib import Path

import pytest

from tests.rdma.conftest import FULL
from tests.rdma.guest import Guest, Job
from tests.rdma.programs import CHECKS, cargo_test, passed

pytestmark = pytest.mark.timeout(900)
# Queues that a soft-RoCE device has room for, and no registration that outlives its memory.
LIBFABRIC = {
    "FI_UNIVERSE_SIZE": "2",
    "FI_OFI_RXM_MSG_TX_SIZE": "128",
    "FI_OFI_RXM_MSG_RX_SIZE": "128",
    "FI_MR_CACHE_MAX_COUNT": "0",
}


def conform(guest: Guest, program: Path, nics: str, *some: str, env: dict[str, str] | None = None) -> int:
    """Run checks of the suite over these NICs, and count those that passed."""
    arguments = some or ("named::",)
    told = {"KVIK_TEST_NICS": nics, **(env or {})}
    result = guest.run(cargo_test(program, "--test-threads=2", *arguments, limit=700, env=told))
    print(f"{nics}: {result.seconds:.1f} s\n{result.output}")
    return passed(result.checked())


def test_conformance_over_verbs(guest: Guest, programs: dict[str, Path]) -> None:
    """Two devices, with a cable between them."""
    assert conform(guest, programs["conform"], "verbs:rxe0,rxe1") == CHECKS


def test_conformance_over_libfabric_verbs(guest: Guest, programs: dict[str, Path]) -> None:
    """The same devices, by libfabric."""
    some = () if FULL else ("named::every_byte", "named::a_killed_peer", "named::revoking")
    count = conform(guest, programs["conform"], "libfabric:verbs", *some, env=LIBFABRIC)
    assert count == (CHECKS if FULL else len(some))


def test_queue_pairs(guest: Guest, programs: dict[str, Path]) -> None:
    """The layer below: fences, order, events, on a device."""
    # Without those over the stand-in, which need no device.
    some = ("--skip", "over::") if FULL else ("failing::",)
    told = {"KVIK_TEST_VERBS": "rxe0", "KVIK_TEST_VERBS_DOWN": "rxe1"}
    result = guest.run(cargo_test(programs["verbs"], "--include-ignored", *some, limit=600, env=told))
    print(f"{result.seconds:.1f} s\n{result.output}")
    assert passed(result.checked()) > 0


# Each on a cable of its own, so that one can lose its link alone.
CABLES = """
for n in 0 1; do
    ip link add p$n type veth peer name q$n
    ip addr add 10.9$n.0.1/24 dev p$n
    ip link set q$n up
    ip link set p$n up
    rdma link add rxe1$n type rxe netdev p$n
done
"""
NO_CABLES = "for n in 0 1; do rdma link delete rxe1$n; ip link delete p$n; done"


def test_a_port_that_goes_down(guest: Guest, programs: dict[str, Path]) -> None:
    """In the middle of transfers over two devices: they end on the other one, or by name."""
    guest.run(Job("two cables", ["sh", "-ec", CABLES])).checked()
    told = {"KVIK_TEST_PORTS": "verbs:rxe10,rxe11 p0 p1", "KVIK_TEST_ROUNDS": "50" if FULL else "6"}
    name = "a_port_that_goes_down_leaves_its_work_to_the_others_and_comes_back"
    result = guest.run(cargo_test(programs["ports"], "--nocapture", name, limit=500, env=told))
    print(f"{result.seconds:.1f} s\n{result.output}")
    assert passed(result.checked()) == 1
    guest.run(Job("no cables", ["sh", "-c", NO_CABLES])).checked()
