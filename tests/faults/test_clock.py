"""The lab's clock: what a side stands still is not in it, and what a side takes is."""

import os
import signal
import time

import pytest

from tests.faults.clock import HANG, Clock
from tests.faults.side import Handle
from tests.python.peers import stop

pytestmark = pytest.mark.timeout(300)
STILL = 0.5  # seconds


def test_what_a_side_stands_still_is_left_out() -> None:
    side = Handle(name="side").ready()
    try:
        clock = Clock(side)
        stop(side.pid)
        time.sleep(STILL)
        os.kill(side.pid, signal.SIGCONT)
        stood, took = clock.stood(), time.monotonic() - clock.began
        assert stood > 0.9 * STILL
        assert clock.seconds() <= time.monotonic() - clock.began - stood
        assert took >= STILL
    finally:
        side.close()


def test_what_a_side_takes_is_not() -> None:
    """A transfer that waits for its deadline takes as long, less what the machine was busy with others."""
    sides = [Handle(name=name) for name in ("reader", "owner")]
    try:
        reader, owner = (side.ready() for side in sides)
        reader.ask("hold", name="m", nbytes=1 << 15)
        ticket = owner.ask("promise")["ticket"]
        clock = Clock(reader)
        reader.ask("begin_part", name="m", ticket=ticket, deadline=STILL)
        (end,) = reader.ask("ends", timeout=HANG, within=HANG + 30.0)["ends"]
        assert end["code"] == "grant_unknown"  # what was promised was not given
        took = end["at"] - clock.began
        assert took >= STILL / 2
        assert clock.seconds() >= took - clock.stood()
    finally:
        for side in sides:
            side.close()
