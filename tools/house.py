"""What holds each crate and Python package together, in figures, and whether it keeps the bounds.

    python tools/house.py             # a table; status 1 where a bound or the list of excesses is broken
    python tools/house.py --circles   # and the files of each circle
    python tools/house.py --shrink    # write the figures that have become smaller into tools/house.toml

It takes the development environment (`make env`: .venv/dev/bin/python), and is part of `make lint`.
"""

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

from kvikhouse.code import Package, SourceError
from kvikhouse.figures import Figures, measure
from kvikhouse.limits import LINES, Known, excesses, shrunk, violations
from kvikhouse.python import read_packages
from kvikhouse.rust import is_generated, read_crate

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ("python/kvik", "lab/kvik_lab", "tools/kvikbuild", "tools/kvikhouse")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the table and what is wrong; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--circles", action="store_true", help="name the files of each circle")
    parser.add_argument("--shrink", action="store_true", help="write smaller figures into the list")
    options = parser.parse_args(arguments)
    listed = root / "tools" / "house.toml"
    try:
        known = Known.read(listed)
        crates = [read_crate(folder) for folder in sorted((root / "crates").iterdir()) if folder.is_dir()]
        figures = measure(crates)
        for folder in PYTHON:
            if (root / folder).is_dir():
                figures += measure(read_packages(root / folder))
    except (SourceError, OSError, ValueError, KeyError) as error:
        print(f"tools/house.py: {error!r}", file=sys.stderr)
        return 2
    _print_table(figures)
    if options.circles:
        _print_circles(figures, root)
    lines = _counted_lines(crates, known, root)
    print(f"\ncrates/*/src: {lines:,} lines (bound {LINES:,})")
    now = excesses(figures, lines, known.apart)
    worse, less = violations(known, now)
    if options.shrink and less:
        shrunk(known, now).write(listed)
        print("\nwritten into tools/house.toml:", *less, sep="\n  ")
        less = []
    if worse:
        print("\nbeyond the bounds and what tools/house.toml knows:", *worse, sep="\n  ")
    if less:
        print("\nsmaller than tools/house.toml says (`python tools/house.py --shrink`):", *less, sep="\n  ")
    return 1 if worse or less else 0


def _counted_lines(crates: Sequence[Package], known: Known, root: Path) -> int:
    """The lines of all crates, without generated files and those that are counted apart."""
    return sum(
        lines
        for crate in crates
        for file, lines in crate.files.items()
        if not is_generated(file)
        and not any(fnmatch.fnmatch(str(file.relative_to(root)), pattern) for pattern in known.apart)
    )


def _print_table(figures: Sequence[Figures]) -> None:
    print(f"{'package':<16} {'lines':>7} {'files':>6} {'in circles':>11} {'largest':>8}  largest type")
    for package in figures:
        inside = sum(len(circle) for circle in package.circles)
        largest = len(package.circles[0]) if package.circles else 0
        kind = package.types[0] if package.types else None
        said = f"{kind.name}: {kind.functions} functions in {kind.files} files" if kind else "-"
        print(f"{package.name:<16} {package.lines:>7,} {package.files:>6} {inside:>11} {largest:>8}  {said}")


def _print_circles(figures: Sequence[Figures], root: Path) -> None:
    for package in figures:
        for circle in package.circles:
            files = " ".join(str(file.relative_to(root)) for file in circle)
            print(f"\n{package.name}: a circle of {len(circle)} files: {files}")


if __name__ == "__main__":
    sys.exit(main())
