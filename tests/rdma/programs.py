"""What can be run in the guest: test programs that cargo builds, Python with kvik, and pairs of processes."""

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rdma import pair
from tests.rdma.guest import Job

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)  # of the environment that the tests run in, which has the wheel
PORT = 18515  # over which perftest and the examples of libibverbs find each other, unless told otherwise
BUILD_LIMIT = 1200.0  # seconds
CHECKS = 19  # of the conformance suite, over one transport
# Of the whole workspace, so that cargo takes what the stage `rust` has built.
BUILD = ("cargo", "test", "--locked", "--workspace", "--no-run")


@functools.cache
def test_program(name: str) -> Path:
    """The test program NAME of a crate (`tests/NAME.rs` or `tests/NAME/main.rs`), built if it has to be."""
    argv = [*BUILD, "--test", name, "--message-format=json"]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT, check=False, errors="replace"
    )
    assert done.returncode == 0, f"`{' '.join(argv)}` ended with {done.returncode}:\n{done.stderr}"
    for line in done.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable") and message["target"]["name"] == name:
            return Path(message["executable"])
    raise AssertionError(f"cargo built no test program `{name}`:\n{done.stderr}")


def cargo_test(
    program: Path, *arguments: str, limit: float = 240.0, env: Mapping[str, str] | None = None
) -> Job:
    """A job that runs a test program of cargo's, with arguments as behind `cargo test ... --`.

    `passed` says how many tests it ran: one whose filter fits no test succeeds, too.
    """
    return Job(f"{program.name} {' '.join(arguments)}", [program, *arguments], limit, env or {})


def passed(output: str) -> int:
    """How many tests a test program of cargo's says have passed."""
    (line,) = [line for line in output.splitlines() if line.startswith("test result: ok. ")]
    return int(line.split()[3])


def python(name: str, *arguments: object, limit: float = 240.0, env: Mapping[str, str] | None = None) -> Job:
    """A job that runs Python with kvik and the tests' packages, from the checkout's root."""
    return Job(name, [PYTHON, *arguments], limit, env or {}, cwd=ROOT)


def two(
    name: str,
    server: Sequence[object],
    client: Sequence[object],
    limit: float = 300.0,
    port: int = PORT,
) -> Job:
    """A job of two processes: the client starts when the server listens on the port. Both have to succeed."""
    # Without the environment's packages: they take the guest seconds to find, and are not needed.
    argv = [PYTHON, "-I", "-S", pair.__file__, port, *server, pair.BETWEEN, *client]
    return Job(name, argv, limit)
