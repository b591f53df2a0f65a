"""What is read from the sources of either language."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Names = tuple[str, ...]
"""A path of names: `crate::session::Session` is `("crate", "session", "Session")`."""


@dataclass(frozen=True)
class Use:
    """An import: the name that it makes, and what it names. A star makes every name of a module."""

    name: str  # "*" for a star
    path: Names
    public: bool = False


@dataclass(frozen=True)
class Function:
    """A function of a type: one of its methods, or a free one whose first parameter it is."""

    name: str
    owner: Names  # the type's path, as it is written


@dataclass
class Module:
    """A module: a file, or a part of one. Functions, mentions and paths are those of the module itself."""

    path: Names  # from the root, which is ()
    file: Path
    parent: "Module | None" = None
    children: dict[str, "Module"] = field(default_factory=dict)
    items: set[str] = field(default_factory=set)
    aliases: dict[str, Names] = field(default_factory=dict)  # names for other types
    uses: list[Use] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    mentions: set[str] = field(default_factory=set)  # single names, outside of imports
    paths: set[Names] = field(default_factory=set)  # names with a path before them, outside of imports

    def all(self) -> Iterator["Module"]:
        """This one and all below it."""
        yield self
        for child in self.children.values():
            yield from child.all()


@dataclass
class Package:
    """A crate, or a Python package: its files, and the modules that they make."""

    name: str
    files: dict[Path, int]  # and the lines of each
    roots: dict[str, Module]  # by the name with which paths of other packages begin


@dataclass(frozen=True)
class Definition:
    """Where something is defined."""

    file: Path
    name: str


class SourceError(Exception):
    """A source that cannot be read; the text has its place."""
