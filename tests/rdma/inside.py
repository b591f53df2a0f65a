"""Run a command in a guest of its own, and print what it says.

    python -m tests.rdma.inside -- python -m tests.faults.idle --nics verbs:rxe0 --nics-only

`python` is the one that runs this. The exit status is the command's.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.rdma.guest import Job, booted
from tests.rdma.initramfs import Kernel
from tests.rdma.programs import PYTHON, ROOT

LIMIT = 600.0  # seconds of the command, unless told otherwise
BOOT = 300.0  # seconds of the guest's life beyond its commands'


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """Let the command line name the guest's kernel."""
    parser.add_argument(
        "--kernel",
        type=Path,
        default=os.environ.get("KVIK_TEST_RDMA_KERNEL"),
        help="folder of the guest's kernel: `make test` keeps one as rdma/linux-image-* in kvik's cache",
    )


def kernel_of(parser: argparse.ArgumentParser, folder: Path | None) -> Kernel:
    """The kernel that was named; ends the program where none was."""
    if folder is None:
        parser.error("name a kernel for the guest: --kernel, or KVIK_TEST_RDMA_KERNEL")
    return Kernel.of(Path(folder))


def main(arguments: list[str] | None = None) -> int:
    """Run it; the status is the command's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_kernel(parser)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that the command may take")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    kernel = kernel_of(parser, options.kernel)
    argv = [PYTHON if word == "python" else word for word in options.command]
    with (
        tempfile.TemporaryDirectory(prefix="kvik-guest-") as folder,
        booted(kernel, Path(folder), options.limit + BOOT) as guest,
    ):
        result = guest.run(Job("the command", argv, options.limit, cwd=ROOT))
    print(result.output, end="")
    print(f"ended with {result.status} after {result.seconds:.1f} s of the guest", file=sys.stderr)
    return result.status


if __name__ == "__main__":
    sys.exit(main())
