"""Words for errors: what somebody meant, and a stranger's name on one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str | None:
    """The known word that somebody probably meant."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return near[0]
    # `engine.chanels` is far from `connector.channels`; but without the table they may be the same word.
    tails = {known.rpartition(".")[2]: known for known in reversed(words)}
    near = difflib.get_close_matches(word.rpartition(".")[2], tails, n=1)
    return tails[near[0]] if near else None


def shown(word: str) -> str:
    """A name that somebody else chose, fit for one line of an error."""
    word = word if len(word) <= 60 else word[:57] + "..."
    return word if word.isprintable() else ascii(word)
