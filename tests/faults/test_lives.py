"""Shares of the measurements of life and death: noticed in time, never invented, free while nothing moves."""

import pytest

from tests.faults import detection, false_deaths, idle

pytestmark = pytest.mark.timeout(1200)
TRIES = 3  # of a run that says nothing


def test_a_death_is_noticed_in_time() -> None:
    """Killed and stopped peers, and their return."""
    assert detection.main(["--kills", "6", "--stops", "6", "--peers", "6"]) == 0


def test_a_busy_peer_is_not_a_dead_one() -> None:
    """Every core is busy, locks are held, processes stop for a second.

    A run in which the machine made more of such a second says nothing, and is made again.
    """
    arguments = ["--minutes", "0.25", "--peers", "12", "--processes", "4"]
    ended = (false_deaths.main(arguments) for _ in range(TRIES))
    assert next((status for status in ended if status != false_deaths.SAYS_NOTHING), None) == 0


def test_an_idle_engine_costs_nothing() -> None:
    """Peers that are connected and move nothing. A run that says nothing is made again."""
    arguments = ["--peers", "20", "--processes", "2", "--seconds", "5"]
    ended = (idle.main(arguments) for _ in range(TRIES))
    assert next((status for status in ended if status != idle.SAYS_NOTHING), None) == 0
