"""A share of the fault lab: each kind of fault a few times."""

import pytest

from kvik.roles.hosts import CannotError, two_hosts
from tests.faults.lab import main
from tests.faults.plan import OF_A_PROCESS, OF_MEMORY, OF_THE_WAY

pytestmark = pytest.mark.timeout(1200)


def test_faults_of_the_way_of_processes_and_of_memory() -> None:
    """Whatever happens: transfers end, nothing lands late, pages come back, the next transfer works."""
    faults = (*OF_THE_WAY, *OF_A_PROCESS, *OF_MEMORY)
    chosen = [word for fault in faults for word in ("--fault", fault)]
    assert main([*chosen, "--runs", str(3 * len(faults)), "--processes", "2"]) == 0


def test_a_cable_that_is_pulled_out() -> None:
    """Two hosts that hear nothing of each other any more, and then do again."""
    try:
        with two_hosts():
            pass
    except CannotError as cannot:
        pytest.skip(str(cannot))
    assert main(["--fault", "link", "--runs", "4", "--processes", "1"]) == 0
