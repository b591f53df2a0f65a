"""One guest for all tests of this folder."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.guest import Guest, booted
from tests.rdma.initramfs import Kernel
from tests.rdma.programs import test_program as build_program
from tests.rdma.shown import HIDDEN

# Test programs of the crates that are run in the guest. The stage builds them before any test's time begins.
PROGRAMS = ("conform", "log", "ports", "store", "verbs")
LIMIT = 2400.0  # seconds that the guest may live, below the limit of the stage
FULL = bool(os.environ.get("KVIK_TEST_FULL"))


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    """The guest's kernel; the tests are skipped, by name, where the stage did not prepare one."""
    folder = os.environ.get("KVIK_TEST_RDMA_KERNEL")
    if not folder:
        pytest.skip("no kernel for a guest was named")
    return Kernel.of(Path(folder))


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """The test programs that run in the guest, by name."""
    return {name: build_program(name) for name in PROGRAMS}


@pytest.fixture(scope="session")
def beside() -> Iterator[Path]:
    """A folder with a program, where a clone may lie: below /tmp, beside others, with signs in its name."""
    with tempfile.TemporaryDirectory(prefix="kvik-beside-", dir=HIDDEN[0]) as above:
        folder = Path(above, "a clone, or:two")
        for each in (folder, Path(above, "other")):
            each.mkdir()
        program = folder / "a program"
        program.write_text('#!/bin/sh\necho "$1 in $PWD" | tee written\n')
        program.chmod(0o755)
        yield folder


@pytest.fixture(scope="session")
def guest(
    kernel: Kernel, programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, beside: Path
) -> Iterator[Guest]:
    """A guest that is up, and up to the end of the tests."""
    assert programs
    begun = time.monotonic()
    with booted(kernel, tmp_path_factory.mktemp("guest"), LIMIT, more=[beside]) as guest:
        took = time.monotonic() - begun
        print(f"\nthe guest was up after {took:.1f} s ({guest.boot_seconds:.1f} s of its own)")
        yield guest
    print(f"\nthe guest lived for {time.monotonic() - begun:.1f} s")
