"""A machine without some libraries: this one, in a mount namespace whose library folders lack them.

    unshare --mount --propagation private python -m tests.packaging.machine FOLDER NAME... -- COMMAND...

Every folder that the dynamic linker knows and that has a file `NAME.so*` is shown through a folder of links,
made in FOLDER, which has all but those files. Nothing is written in the folders themselves, and nobody else
sees anything of it.
"""

import fnmatch
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Where vendors put libraries, besides what `ldconfig` tells.
VENDORS = ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib64")
# Programs of root are not always on the path of others.
ROOTS_PATH = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def folders() -> set[Path]:
    """Every folder that the dynamic linker finds libraries in, and the vendors'."""
    told = subprocess.run(
        ["ldconfig", "-p"], env=ROOTS_PATH, capture_output=True, text=True, check=True
    ).stdout
    files = [Path(line.rpartition("=> ")[2]) for line in told.splitlines() if "=> " in line]
    every = {file.parent for file in files} | {Path(vendor) for vendor in VENDORS}
    return {folder.resolve() for folder in every if folder.is_dir()}


def hidden(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """What of these libraries lies in a folder."""
    for entry in folder.iterdir():
        if any(fnmatch.fnmatch(entry.name, f"{name}.so*") for name in names):
            yield entry.name


def hide(folder: Path, names: Sequence[str], room: Path) -> None:
    """Show a folder without these libraries."""
    real, view = room / "real", room / "view"
    for made in (real, view):
        made.mkdir(parents=True)
    subprocess.run(["mount", "--bind", folder, real], env=ROOTS_PATH, check=True)
    without = set(hidden(folder, names))
    for entry in folder.iterdir():
        if entry.name not in without:
            (view / entry.name).symlink_to(real / entry.name)
    subprocess.run(["mount", "--bind", view, folder], env=ROOTS_PATH, check=True)


def main(arguments: Sequence[str]) -> None:
    """Hide what is named, and become the command."""
    split = arguments.index("--")
    room, names, command = Path(arguments[0]), arguments[1:split], arguments[split + 1 :]
    for number, folder in enumerate(sorted(folders())):
        if any(hidden(folder, names)):
            hide(folder, names, room / str(number))
    os.execvp(command[0], list(command))  # noqa: S606 (nothing here is for a shell)


if __name__ == "__main__":
    main(sys.argv[1:])
