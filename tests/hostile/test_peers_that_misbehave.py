"""A share of every attack, on one victim: it is not harmed, and its transfers with an honest peer go on."""

from collections.abc import Iterator

import pytest

from tests.hostile.attacks import ATTACKS, Dose
from tests.hostile.run import attacked, harm, row
from tests.hostile.scene import Scene

SHARE = Dose(connections=270, tickets=3000, seconds=0.5, seed=1)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene(quiet=0.2) as scene:
        yield scene


@pytest.mark.parametrize("attack", ATTACKS)
def test_does_no_harm(scene: Scene, attack: str) -> None:
    fared = attacked(scene, attack, SHARE)
    print(row(attack, fared))
    assert scene.alive
    assert harm(fared) is None
