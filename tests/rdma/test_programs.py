"""Programs of kvik run in the guest as they are: cargo's test programs, and Python with the wheel."""

import sys
from pathlib import Path

import pytest

import kvik
from tests.rdma.conftest import FULL
from tests.rdma.guest import Guest
from tests.rdma.programs import cargo_test, passed, python

pytestmark = pytest.mark.timeout(900)
# Of the transports' conformance suite, over tcp.
SOME = ["--exact", "tcp::a_grant_that_ended_before_serves_nothing"]
ALL = ["tcp::", "--skip", "faulty_tcp::"]


def test_a_test_program_of_cargo(guest: Guest, programs: dict[str, Path]) -> None:
    """The conformance suite: two engines that move pages and are refused."""
    program = programs["conform"]
    chosen = ALL if FULL else SOME
    count = guest.run(cargo_test(program, "--list", *chosen)).checked().count(": test\n")
    result = guest.run(cargo_test(program, *chosen, limit=800))
    print(f"{result.seconds:.1f} s\n{result.output}")
    assert passed(result.checked()) == count > 0


def test_python_with_the_wheel(guest: Guest) -> None:
    """The same interpreter as here, with the same kvik, and with the variables that it is given."""
    said = guest.run(python("version", "-c", "import sys; print(sys.version)")).checked()
    assert said == f"{sys.version}\n"
    script = "import kvik, os; print(kvik.__file__, os.environ['KVIK_TRANSPORT'])"
    result = guest.run(python("wheel", "-c", script, env={"KVIK_TRANSPORT": "tcp"}))
    print(f"{result.seconds:.1f} s")
    assert result.checked() == f"{kvik.__file__} tcp\n"
