"""`make test QUICK=1` leaves out only what it names, and names only what is there."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from kvikbuild import quick, targets  # noqa: E402


def test_every_stage_is_run_or_named() -> None:
    """Also one that is new: it has to be in one of both lists."""
    whole, small = set(targets.TARGETS["test"]), targets.TARGETS["test-quick"]
    run = {name.removesuffix("-quick") for name in small}
    assert whole == run | set(quick.STAGES)
    assert run & set(quick.STAGES) == {"rust"}  # in part
    assert set(small) <= set(targets.STAGES)


def test_what_is_left_out_is_there() -> None:
    """A file that was renamed would be run, and a test program that was renamed would not."""
    assert [name for name in quick.PYTHON if not (ROOT / name).exists()] == []
    for name in quick.RUST[3::2]:
        places = [f"{crate}/tests/{name}{end}" for crate in ("crates/*",) for end in (".rs", "/main.rs")]
        assert any(list(ROOT.glob(place)) for place in places), name
    assert set(quick.RUST[2::2]) == {"--test"}


def test_it_says_by_name_what_it_left_out() -> None:
    """Stages and files, each with what it would have shown."""
    named = dict(quick.LEFT_OUT)
    assert {*quick.STAGES, *(f"python: {name}" for name in quick.PYTHON)} == set(named)
    assert all(named.values())
