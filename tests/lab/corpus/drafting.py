"""What the makers of tables share: a seeded source of noise, languages, drafts and their slips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.lab.corpus.figures import Number, Rule, Style, derived, given
from tests.lab.corpus.layout import Block

Language = Literal["en", "ja", "zh"]
Kind = Literal[
    "digit",
    "sign",
    "base",
    "column",
    "mean",
    "sum",
    "unit",
    "rounding",
    "count",
    "swapped",
    "time",
    "claim",
]
KINDS: tuple[Kind, ...] = (
    "digit",
    "sign",
    "base",
    "column",
    "mean",
    "sum",
    "unit",
    "rounding",
    "count",
    "swapped",
    "time",
    "claim",
)

MODELS = (
    "Qwen2.5-1.5B-Instruct",
    "Qwen2.5-7B-Instruct",
    "Qwen2.5-14B-Instruct",
    "Qwen2.5-32B-Instruct",
    "Llama-3.2-3B",
    "Llama-3.1-8B",
    "Mistral-7B-v0.3",
    "glm-4-9b-chat",
    "gemma-2-9b-it",
    "Phi-3-mini-4k",
)


@dataclass(frozen=True)
class Slip:
    """A mistake that an author makes: the number that it strikes, and what is printed in its place.

    `text` is given where the mistake lies in how the value is written.
    """

    number: Number
    wrong: float
    text: str | None = None


@dataclass(frozen=True)
class Draft:
    """The blocks of a document, and the slips that this table invites, by kind."""

    blocks: tuple[Block, ...]
    slips: dict[Kind, list[Slip]] = field(default_factory=dict)


@dataclass(frozen=True)
class Maker:
    """A source of noise, a language, whether values derive from unrounded inputs, and which variant it is."""

    rng: np.random.Generator
    language: Language
    unrounded: bool
    turn: int

    def pick(self, en: str, ja: str, zh: str) -> str:
        """The text in this maker's language."""
        return {"en": en, "ja": ja, "zh": zh}[self.language]

    def noise(self, spread: float = 0.02) -> float:
        """A factor near one."""
        return float(np.exp(self.rng.normal(0.0, spread)))

    def between(self, low: float, high: float) -> float:
        """A number from a range."""
        return float(self.rng.uniform(low, high))

    def choose(self, count: int, names: tuple[str, ...]) -> list[str]:
        """So many different names, in their order."""
        at = sorted(self.rng.choice(len(names), size=count, replace=False).tolist())
        return [names[i] for i in at]

    def given(self, value: float, style: Style) -> Number:
        """A measured number."""
        return given(value, style)

    def product(
        self, style: Style, *terms: tuple[Number, int], scale: float = 1.0, kin: tuple[Number, ...] = ()
    ) -> Number:
        """`scale` times the terms, each raised to its power."""
        inputs = tuple(n for n, _ in terms)
        rule = Rule("product", inputs, scale, tuple(power for _, power in terms), kin)
        return derived(rule, style, self.unrounded)

    def ratio(self, style: Style, top: Number, bottom: Number, scale: float = 1.0) -> Number:
        """`scale` times top over bottom."""
        return self.product(style, (top, 1), (bottom, -1), scale=scale)

    def difference(self, style: Style, first: Number, second: Number) -> Number:
        """First minus second."""
        return derived(Rule("difference", (first, second)), style, self.unrounded)

    def change(self, style: Style, new: Number, base: Number, scale: float = 1.0) -> Number:
        """By how many percent `new` differs from `base`; `scale` -1 for a reduction."""
        return derived(Rule("change", (new, base), scale), style, self.unrounded)

    def gathered(
        self,
        operation: Literal["sum", "mean", "max", "min"],
        style: Style,
        numbers: list[Number],
        scale: float = 1.0,
        kin: list[Number] | None = None,
    ) -> Number:
        """A sum, mean or extreme of numbers."""
        return derived(Rule(operation, tuple(numbers), scale, kin=tuple(kin or ())), style, self.unrounded)

    def count(self, value: int, unit: str = "", gap: str = "") -> Number:
        """How many of something the document lists."""
        return derived(Rule("count", (), value), Style(exact=True, unit=unit, gap=gap), False)


def slips(pairs: list[tuple[Number, Callable[[], float] | float]]) -> list[Slip]:
    """Slips that print another value."""
    return [Slip(n, wrong() if callable(wrong) else wrong) for n, wrong in pairs]
