"""The sixty tables: which maker, in which format and language, derived from what, and with which error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.lab.corpus import latencies, plans, transfers
from tests.lab.corpus.drafting import Draft, Kind, Language, Maker
from tests.lab.corpus.inject import Injected, inject
from tests.lab.corpus.layout import Document, Format, write

Build = Callable[[Maker], Draft]

_PLAN: tuple[tuple[Build, tuple[Kind, Kind, Kind], tuple[Format, Format, Format]], ...] = (
    (transfers.sweep, ("digit", "unit", "swapped"), ("markdown", "bare", "csv")),
    (transfers.line_rate, ("unit", "column", "claim"), ("ragged", "html", "markdown")),
    (transfers.first_request, ("digit", "claim", "base"), ("markdown", "html", "bare")),
    (transfers.loads, ("time", "time", "unit"), ("markdown", "csv", "bare")),
    (latencies.two_arms, ("sign", "base", "rounding"), ("markdown", "ragged", "csv")),
    (latencies.to_baseline, ("column", "base", "swapped"), ("bare", "markdown", "html")),
    (latencies.first_token, ("sign", "unit", "column"), ("markdown", "bare", "html")),
    (latencies.elapsed, ("time", "time", "time"), ("markdown", "html", "ragged")),
    (latencies.stages, ("sum", "swapped", "digit"), ("markdown", "csv", "bare")),
    (latencies.composite, ("claim", "mean", "sign"), ("markdown", "html", "markdown")),
    (latencies.grouped, ("sign", "base", "swapped"), ("html", "markdown", "ragged")),
    (latencies.transposed, ("column", "swapped", "sign"), ("markdown", "bare", "csv")),
    (plans.grid, ("mean", "sum", "mean"), ("markdown", "html", "csv")),
    (plans.hits, ("count", "rounding", "count"), ("ragged", "markdown", "csv")),
    (plans.prices, ("sum", "sum", "digit"), ("markdown", "html", "csv")),
    (plans.scaling, ("column", "rounding", "base"), ("markdown", "bare", "html")),
    (plans.factors, ("count", "count", "claim"), ("markdown", "html", "bare")),
    (plans.layers, ("sum", "claim", "count"), ("markdown", "ragged", "html")),
    (plans.starts, ("mean", "rounding", "mean"), ("markdown", "csv", "bare")),
    (plans.kv_memory, ("unit", "digit", "rounding"), ("markdown", "html", "ragged")),
)

_LANGUAGES: tuple[Language, ...] = ("en", "ja", "en", "zh", "en")


@dataclass(frozen=True)
class Case:
    """A table as published, clean and with one error."""

    name: str
    document: Document
    draft: Draft
    text: str
    injected: Injected

    @property
    def kind(self) -> Literal["markdown", "html", "csv"]:
        """What `audit_text` calls the format."""
        match self.document.format:
            case "html" | "csv" as form:
                return form
            case _:
                return "markdown"


def corpus(seed: int = 6) -> list[Case]:
    """The sixty cases of a seed."""
    cases = []
    for at, (build, kinds, formats) in enumerate(_PLAN):
        for turn, (kind, form) in enumerate(zip(kinds, formats, strict=True)):
            rng = np.random.default_rng([seed, at, turn])
            language = _LANGUAGES[(3 * at + turn) % len(_LANGUAGES)]
            draft = build(Maker(rng, language, unrounded=(at + turn) % 3 == 1, turn=turn))
            document = Document(draft.blocks, form)
            injected = inject(document, draft, kind, rng)
            name = f"{build.__name__}-{turn}-{form}-{language}"
            cases.append(Case(name, document, draft, write(document), injected))
    return cases
