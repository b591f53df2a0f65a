"""What the checks of one study file share: its text with places, what is known by now, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from kvik_lab.design.factor import Factor, Level
from kvik_lab.study.expressions import Constant, Scope
from kvik_lab.study.problems import MistakeError, Path, Problem, did_you_mean, dotted
from kvik_lab.study.translate import check_form
from kvik_lab.study.yamlmap import Mapped


@dataclass
class Draft:
    """A study on its way: `declared` are the names of all factors, also of those with a mistake."""

    mapped: Mapped
    folder: FilePath = field(default_factory=FilePath)
    problems: list[Problem] = field(default_factory=list)
    factors: dict[str, Factor] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    declared: list[str] = field(default_factory=list)
    declared_constants: list[str] = field(default_factory=list)

    def wrong(
        self, path: Path, text: str, remedy: str, *, key: bool = False, offset: int | None = None
    ) -> None:
        """Note a mistake."""
        self.problems.append(self.mapped.problem(path, text, remedy, key=key, offset=offset))

    def wrong_inside(self, path: Path, error: MistakeError) -> None:
        """Note a mistake inside a text, or in a whole part."""
        self.wrong(path, error.text, error.remedy, offset=error.column)

    def form(self, annotation: Any, value: Any, path: Path) -> Any:
        """Validate a value's form; None where it is wrong, which is then noted."""
        result, problems = check_form(annotation, value, path, self.mapped)
        self.problems.extend(problems)
        return result

    def scope(self) -> Scope:
        """The names for expressions."""
        sound = {*self.factors, *self.constants}
        faulty = frozenset({*self.declared, *self.declared_constants} - sound)
        return Scope(self.factors, self.constants, faulty)

    def check_level(self, name: Any, level: Level, path: Path, *, key: Path | None = None) -> bool:
        """Whether a factor has a level; notes it where the factor or the level does not exist."""
        if name not in self.declared:
            remedy = did_you_mean(str(name), self.declared, what="factors")
            self.wrong(path if key is None else key, f"{name!r} is no factor", remedy, key=True)
            return False
        factor = self.factors.get(str(name))
        if factor is None:
            return False
        if not has_level(factor, level):
            remedy = did_you_mean(str(level), [str(one) for one in factor.levels], what="its levels")
            self.wrong(path, f"{name!r} has no level {level!r}", remedy)
            return False
        return True

    def check_levels(self, levels: Mapping[Any, Level], path: Path) -> bool:
        """`check_level` for each of a mapping."""
        sound = [self.check_level(name, level, (*path, name)) for name, level in levels.items()]
        return all(sound)  # every one is checked, so that every mistake is noted

    def unspoilt(self, already: list[Problem]) -> list[Problem]:
        """All problems, without those that only follow from what YAML itself could not say."""
        spoilt = {problem.path for problem in already if problem.path}
        return already + [one for one in self.problems if one.path not in spoilt]


def has_level(factor: Factor, level: Level) -> bool:
    """Whether a level is one of a factor's: `True` is not 1, and 1.0 is."""
    return any(level == one and isinstance(level, bool) == isinstance(one, bool) for one in factor.levels)


def empties(value: Any, path: Path, draft: Draft) -> None:
    """Note each key and each list entry with nothing behind it."""
    if value is None:
        known = {problem.path for problem in draft.mapped.problems}
        if dotted(path) not in known:
            name = next((repr(part) for part in reversed(path) if isinstance(part, str)), "the file")
            draft.wrong(path, f"{name} is empty", "give it a value, or leave the key out", key=True)
    elif isinstance(value, dict):
        for key, one in value.items():
            empties(one, (*path, key), draft)
    elif isinstance(value, list):
        for at, one in enumerate(value):
            empties(one, (*path, at), draft)
