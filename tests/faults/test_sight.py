"""The lab sees what it looks for: here, it is shown what must not be."""

import dataclasses

import pytest

from tests.faults import sheets
from tests.faults.plan import Plan, draw
from tests.faults.scene import Scene
from tests.faults.sheets import BLANK, REFILL
from tests.faults.trial import Trial
from tests.python.peers import random_seed

pytestmark = pytest.mark.timeout(600)


def plan(seed: int, **changes: object) -> Plan:
    """A run over TCP that begins here."""
    drawn = draw(seed, 0, ("flip",))
    fixed = {"transport": "tcp", "initiator": "here", "op": "read", "transfers": 1, "early": False}
    return dataclasses.replace(drawn, **{**fixed, **changes})  # type: ignore[arg-type]


def test_a_wrong_byte_is_seen() -> None:
    """Without checksums a flipped bit gets through, and the lab says so."""
    seed = random_seed()
    scene = Scene()
    try:
        # The first slices have headers as well, and a damaged header is noticed.
        rules = {"which": "data", "flip": 3}
        found: list[str] = []
        for number in range(12):
            trial = Trial(scene, plan(seed + number, verify="off", rules=rules, part=0.4, deadline=3.0))
            found += trial.run()["wrong"]
        assert any("the bytes of" in text for text in found), found
    finally:
        scene.close()


def test_every_kind_of_byte_is_told_apart() -> None:
    """Old, new, blank and refilled memory never have a value in common."""
    nbytes = 1 << 16
    old, new = sheets.old(nbytes, 1), sheets.new(nbytes, 2)
    assert sheets.placed(old) == sheets.placed(new) == nbytes
    assert sheets.leaked(new) == nbytes
    assert sheets.leaked(old) == 0
    for value in (BLANK, REFILL):
        blank = old.copy()
        blank[:] = value
        assert sheets.leaked(blank) == 0
    assert sheets.late(blank) == 0
    blank[5] = BLANK
    assert sheets.late(blank) == 1
    assert new.tobytes().count(sheets.MARK) == nbytes // sheets.MARK_EVERY
