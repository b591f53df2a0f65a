"""Reads facts of a tree, and keeps a list of those that it could not read."""

from __future__ import annotations

import re

from kvik.doctor.model import Missing
from kvik.doctor.tree import Tree, Unread

_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?(?![0-9])")


class Reader:
    """What is absent or refused becomes None or empty, and an entry of `missing`."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._missing: dict[str, str] = {}

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Every fact that was asked for in vain."""
        return tuple(Missing(path, reason) for path, reason in sorted(self._missing.items()))

    def miss(self, path: str, reason: str) -> None:
        """Note a fact that was not read."""
        self._missing[path] = reason

    def text(self, path: str, optional: bool = False) -> str | None:
        """The text of a file. `optional`: that it is absent says something itself, and is not noted."""
        try:
            return self.tree.read(path)
        except Unread as error:
            self._note(path, error, optional)
            return None

    def blob(self, path: str) -> bytes | None:
        """The bytes of a file."""
        try:
            return self.tree.blob(path)
        except Unread as error:
            self._note(path, error, False)
            return None

    def names(self, path: str, optional: bool = False) -> list[str]:
        """The names in a folder."""
        try:
            return self.tree.list(path)
        except Unread as error:
            self._note(path, error, optional)
            return []

    def target(self, path: str) -> str | None:
        """Where a link leads to; that there is none is not noted."""
        try:
            return self.tree.link(path)
        except Unread as error:
            self._note(path, error, True)
            return None

    def number(self, path: str, optional: bool = False) -> float | None:
        """The first number in a file: `16.0 GT/s PCIe` is 16.0."""
        said = self.text(path, optional)
        if said is None:
            return None
        found = _NUMBER.search(said)
        if found is None:
            self.miss(path, f"says {said[:40]!r}, which is no number")
            return None
        return float(found[0])

    def whole(self, path: str, optional: bool = False) -> int | None:
        """The first number in a file, as a whole one."""
        found = self.number(path, optional)
        return None if found is None else int(found)

    def hexadecimal(self, path: str) -> int:
        """A number such as 0x10de; 0 where it is not there."""
        said = self.text(path)
        try:
            return int(said, 16) if said else 0
        except ValueError:
            self.miss(path, f"says {said!r}, which is no number")
            return 0

    def _note(self, path: str, error: Unread, optional: bool) -> None:
        if not (optional and error.reason == "absent"):
            self.miss(path, error.reason)
