"""The provider `tcp` of a libfabric of the 2.x line, as EFA's installer and newer systems have it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rdma.programs import CHECKS, ROOT, passed
from tests.rdma.programs import test_program as build_program

pytestmark = pytest.mark.timeout(900)
LIMIT = 300.0  # seconds of a command


@pytest.fixture(scope="module")
def library() -> str:
    """The library; the tests are skipped, by name, where the stage found none."""
    named = os.environ.get("KVIK_TEST_LIBFABRIC")
    if not named:
        pytest.skip("no libfabric was named")
    return named


@pytest.fixture(scope="module")
def conform() -> Path:
    """The conformance suite. The stage has built it."""
    return build_program("conform")


def ran(library: str, nics: str, *argv: object) -> tuple[int, str]:
    """The status of a command that takes these NICs by this library, and all that it wrote."""
    told = {**os.environ, "KVIK_NIC_LIBRARY": library, "KVIK_TEST_NICS": nics}
    words = [str(word) for word in argv]
    done = subprocess.run(
        words, env=told, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    print(done.stdout + done.stderr)
    return done.returncode, done.stdout + done.stderr


def test_conformance_over_tcp(library: str, conform: Path) -> None:
    """What every transport keeps."""
    status, output = ran(library, "libfabric:tcp", conform, "named::", "--test-threads=2")
    assert status == 0
    assert passed(output) == CHECKS


def test_nothing_is_written_or_read_late(library: str) -> None:
    """A stopped initiator and a stopped owner, beside engines that go on."""
    late = ("-m", "tests.faults.late_write", "--transport", "nics", "--variant", "refill", "--runs", "3")
    status, output = ran(library, "libfabric:tcp", sys.executable, *late, "--beside", "3")
    assert status == 0
    assert "violations 0\n" in output


def test_it_is_the_library_that_was_named(library: str) -> None:
    """And `shm` is refused by it, too."""
    program = "import kvik; kvik.Engine(transport='nics', nics='libfabric:{}')"
    status, output = ran(library, "", sys.executable, "-c", program.format("no-such-provider"))
    assert status != 0
    assert library in output
    status, output = ran(library, "", sys.executable, "-c", program.format("shm"))
    assert status != 0
    assert "TransportUnavailable" in output
    assert "local" in output
