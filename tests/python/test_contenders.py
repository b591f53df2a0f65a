"""The maker of contenders' environments: each is pinned, and what is no contender is refused."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import contenders  # noqa: E402


@pytest.mark.parametrize("name", sorted(contenders.CONTENDERS))
def test_every_package_of_a_contender_is_pinned_by_its_hash(name: str) -> None:
    """By version and hash, and what is wanted is among them."""
    locks = ROOT / "tools" / "locks"
    pins = (locks / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    for pin in pins:
        assert re.match(r"[\w.-]+==[\w.+!-]+ ", pin), pin
        assert "--hash=sha256:" in pin, pin
    wanted = [line for line in (locks / f"{name}.in").read_text().splitlines() if not line.startswith("#")]
    for want in wanted:
        assert any(pin.startswith(f"{want.partition('==')[0]}==") for pin in pins), want
    compile(contenders.CONTENDERS[name].check, name, "exec")


def test_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A list without a name; a name that is none is refused, and nothing is made."""
    assert contenders.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(contenders.CONTENDERS)
    assert contenders.main(["nixl", "nonesuch"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "nonesuch" in said.err
