"""A share of the tables of late writes."""

import pytest

from tests.faults.late_write import main

pytestmark = pytest.mark.timeout(1200)


def test_nothing_is_written_or_read_late() -> None:
    """The stopped side goes on after the running one has its pages back."""
    assert main(["--variant", "refill", "--runs", "3", "--processes", "2"]) == 0


def test_the_address_is_used_again() -> None:
    """The running side has other memory at the address by then."""
    assert main(["--variant", "remap", "--transport", "local", "--runs", "2"]) == 0
