"""The bounds of a house, and what is known to be beyond them: a list that may only become shorter.

`tools/house.toml` has the list: each circle above the bound by its number of files, each type above it by
its number of functions. What is not on the list fails, what has grown fails, and so does what is smaller by
now or gone: with `--shrink` the command writes the smaller figures, and it never writes larger ones.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvikhouse.figures import Figures

LINES = 42_700  # of crates/*/src, without generated files and those that are counted apart
CIRCLE = 3  # files
TYPE = 40  # functions

HEAD = """\
# What `tools/house.py` knows to be beyond its bounds. These figures may only become smaller: it fails where
# one is larger than here, and also where one is smaller, until `tools/house.py --shrink` has written that.

# Lines of crates/*/src; `apart` names files, by pattern, that are not among them, nor are generated ones.
[lines]
"""


@dataclass(frozen=True)
class Known:
    """The list: lines, files counted apart, circles and types by package."""

    lines: int
    apart: tuple[str, ...]  # patterns of files, from the repository's root
    circles: dict[str, list[int]]
    types: dict[str, int]

    @classmethod
    def read(cls, file: Path) -> "Known":
        """Read the list; `ValueError` and `KeyError` where it is not one."""
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        lines = found["lines"]
        return cls(lines["known"], tuple(lines["apart"]), found.get("circles", {}), found.get("types", {}))

    def write(self, file: Path) -> None:
        """Write the list."""
        apart = ", ".join(f'"{pattern}"' for pattern in self.apart)
        text = f"{HEAD}known = {self.lines}\napart = [{apart}]\n"
        text += f"\n# Files of each circle above {CIRCLE}.\n[circles]\n"
        text += "".join(f'"{name}" = {sizes}\n' for name, sizes in sorted(self.circles.items()))
        text += f"\n# Functions of each type above {TYPE}.\n[types]\n"
        text += "".join(f'"{name}" = {count}\n' for name, count in sorted(self.types.items()))
        file.write_text(text, encoding="utf-8")


def excesses(figures: Iterable[Figures], lines: int, apart: tuple[str, ...]) -> Known:
    """What is beyond the bounds now, as a list."""
    circles: dict[str, list[int]] = {}
    types: dict[str, int] = {}
    for package in figures:
        sizes = [len(circle) for circle in package.circles if len(circle) > CIRCLE]
        if sizes:
            circles[package.name] = sizes
        for kind in package.types:
            if kind.functions > TYPE:
                name = f"{package.name}::{kind.name}"
                types[name] = max(kind.functions, types.get(name, 0))
    return Known(lines, apart, circles, types)


def violations(known: Known, now: Known) -> tuple[list[str], list[str]]:
    """What is beyond the bounds and the list; and what is on the list and has become less."""
    worse, less, lines = [], [], now.lines
    if lines > known.lines:
        worse.append(f"crates/*/src: {lines:,} lines (known {known.lines:,})")
    elif lines <= LINES < known.lines:
        less.append(f"crates/*/src: {known.lines:,} lines are within the bound of {LINES:,}")
    for name, old, new in _circles(known, now):
        if new > old:
            allowed = f"known {old}" if old else f"bound {CIRCLE}"
            worse.append(f"{name}: a circle of {new} files ({allowed})")
        elif new < old:
            less.append(f"{name}: a circle of {old} files {_became(new)}")
    for name in sorted({*known.types, *now.types}):
        old, new = known.types.get(name, 0), now.types.get(name, 0)
        if new > old:
            allowed = f"known {old}" if old else f"bound {TYPE}"
            worse.append(f"{name}: {new} functions ({allowed})")
        elif new < old:
            less.append(f"{name}: a type of {old} functions {_became(new)}")
    return worse, less


def shrunk(known: Known, now: Known) -> Known:
    """The list with smaller figures where they are smaller, and nothing larger."""
    circles = {}
    for name, sizes in known.circles.items():
        kept = [min(pair) for pair in zip(sizes, now.circles.get(name, ()), strict=False)]
        if kept:
            circles[name] = kept
    types = {name: min(count, now.types[name]) for name, count in known.types.items() if name in now.types}
    return Known(max(LINES, min(known.lines, now.lines)), known.apart, circles, types)


def _circles(known: Known, now: Known) -> Iterator[tuple[str, int, int]]:
    """Package, known files, files now: the largest circle of a package against the largest one known."""
    for name in sorted({*known.circles, *now.circles}):
        old, new = known.circles.get(name, []), now.circles.get(name, [])
        for index in range(max(len(old), len(new))):
            yield name, _at(old, index), _at(new, index)


def _at(sizes: Sequence[int], index: int) -> int:
    return sizes[index] if index < len(sizes) else 0


def _became(new: int) -> str:
    return f"has become {new}" if new else "is gone or within the bound"
