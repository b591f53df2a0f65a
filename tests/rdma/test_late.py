"""Late writes over verbs: a stopped peer's device goes on without it, as hardware does."""

import pytest

from tests.rdma.conftest import FULL
from tests.rdma.guest import Guest
from tests.rdma.programs import python

pytestmark = pytest.mark.timeout(900)
TABLES = ("-m", "tests.faults.late_write", "--transport", "nics", "--variant", "refill")


@pytest.mark.skipif(not FULL, reason="FULL is not set")
def test_nothing_is_written_or_read_late(guest: Guest) -> None:
    """A stopped initiator and a stopped owner, beside ten engines that go on."""
    env = {"KVIK_TEST_NICS": "verbs:rxe0,rxe1"}
    result = guest.run(python("late writes", *TABLES, "--runs", "5", "--beside", "10", limit=800, env=env))
    print(f"{result.seconds:.1f} s\n{result.output}")
    assert "violations 0\n" in result.checked()
