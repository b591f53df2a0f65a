"""Words for errors: what somebody meant, and a stranger's name on one line."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from kvik.config.schema import Option

_A_SLIP = 0.8  # of the likeness that difflib finds: a letter or two


def meant(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known word that somebody probably meant."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return near[0] if near else None


def slip(word: str, known: Iterable[str]) -> str | None:
    """The known word that differs by a slip of the finger."""
    return meant(word, known, _A_SLIP)


def option_meant(name: str, section: str, options: Collection[Option]) -> Option | None:
    """The option that somebody meant by a name: of another section, like one of this section, or of any."""
    every: dict[str, Option] = {}
    for option in options:
        every.setdefault(option.name, option)  # two sections may have the same name; the first one is meant
    own = {option.name: option for option in options if option.section == section}
    near = name if name in every else meant(name, own) or meant(name, every)
    return own.get(near, every[near]) if near else None


def shown(word: str, most: int = 60) -> str:
    """Text that somebody else chose, fit for one line of an error: `most` characters of it."""
    word = word if len(word) <= most else word[: most - 3] + "..."
    return word if word.isprintable() else ascii(word)
