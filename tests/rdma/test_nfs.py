"""The store's log on NFS: killed where it writes, without its server for a while, full, and read-only.

The guest has both ends: the kernel's server, and its client over the loopback network (`nfs.py`).
"""

from pathlib import Path

import pytest

from tests.rdma import nfs
from tests.rdma.conftest import FULL
from tests.rdma.guest import Guest, Job
from tests.rdma.initramfs import Kernel
from tests.rdma.programs import PYTHON, passed

pytestmark = pytest.mark.timeout(900)
MIB = 64  # of the file system that is served


def on_nfs(
    guest: Guest, kernel: Kernel, program: Path, *arguments: object, options: str = "hard", mib: int = MIB,
    kills: int = 2,
) -> str:  # fmt: skip
    """Run a test program of cargo's beside a server; its output."""
    argv = [PYTHON, "-I", "-S", nfs.__file__, kernel.image.parent, options, mib]
    env = {"KVIK_KILLS": str(kills * (20 if FULL else 1)), "RUST_BACKTRACE": "0"}
    limit = 800.0 if FULL else 600.0
    result = guest.run(Job(program.name, [*argv, program, "--nocapture", *arguments], limit, env))
    print(f"{result.seconds:.1f} s\n{result.output}")
    return result.checked()


def test_a_log_on_nfs_that_is_killed(guest: Guest, kernel: Kernel, programs: dict[str, Path]) -> None:
    """No block is wrong, none is lost that was durable; and one process has the lock."""
    output = on_nfs(guest, kernel, programs["log"], "crash::", "processes::")
    assert passed(output) == 3
    assert output.count(" kills at an operation, ") == 3


def test_a_server_with_its_log_on_nfs_that_is_killed(
    guest: Guest, kernel: Kernel, programs: dict[str, Path]
) -> None:
    """The same of a whole server."""
    output = on_nfs(guest, kernel, programs["store"], "crash::")
    assert passed(output) == 1
    assert "blocks had to be there" in output


@pytest.mark.parametrize("options", ["hard", *(["soft,timeo=10,retrans=1"] if FULL else [])])
def test_nfs_that_stops_and_goes_on(
    guest: Guest, kernel: Kernel, programs: dict[str, Path], options: str
) -> None:
    """Puts end by their deadline, memory goes on, and all that was durable is there again."""
    chosen = ("--ignored", "--exact", "stopped::a_disk_that_a_command_stops_keeps_nobody")
    assert passed(on_nfs(guest, kernel, programs["store"], *chosen, options=options)) == 1


def test_nfs_that_is_full_and_nfs_that_is_read_only(
    guest: Guest, kernel: Kernel, programs: dict[str, Path]
) -> None:
    """What is on it is served, and what cannot be written is refused by name."""
    chosen = ("--ignored", "--test-threads=1", "is_full_keeps", "becomes_read_only")
    assert passed(on_nfs(guest, kernel, programs["store"], *chosen, options="hard,actimeo=1", mib=6)) == 2
