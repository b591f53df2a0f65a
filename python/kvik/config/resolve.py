"""Which value counts: one given directly, else the variable, else the configuration file, else the default.

Nothing is remembered: each call looks at the environment and the file as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvik.config import file as files
from kvik.config import variables
from kvik.config.schema import Entry, Option
from kvik.config.tables import all_options
from kvik.config.words import meant
from kvik.errors import InvalidArgument

DEFAULT = "default"
MISSING = "not set"
GIVEN = "given"


@dataclass(frozen=True)
class Setting:
    """An option, its value, and where the value comes from."""

    option: Option
    value: Any = field(repr=False)  # it may be a secret
    source: str
    """`given`, the name of the variable, `PATH:LINE` of the file, `default`, or `not set`: a required one."""


@dataclass(frozen=True)
class Surroundings:
    """What the environment and the configuration file say, before any entry point asks."""

    variables: Mapping[str, str] = field(repr=False)
    file: files.File | None
    problems: tuple[str, ...]

    @property
    def path(self) -> Path | None:
        """The configuration file."""
        return self.file.path if self.file else None


def look_around(env: Mapping[str, str] | None = None) -> Surroundings:
    """Read the variables and the file."""
    env = os.environ if env is None else env
    known = all_options()
    path = files.find(env)
    file = None if path is None else files.load(path, known)
    told = variables.given(env)
    problems = [*variables.unknown(told, known.values()), *(file.problems if file else ())]
    return Surroundings(told, file, tuple(problems))


def settings(
    entry: Entry, given: Mapping[str, Any] | None = None, around: Surroundings | None = None
) -> tuple[Setting, ...]:
    """Each option of an entry point with its value and source. `None` in `given` is as good as not given.

    What is given directly is not checked here: it comes from `given_values`, from a flag, or goes to the
    native side, which checks. Raises InvalidArgument with a line for everything that is wrong with the rest.
    """
    around = look_around() if around is None else around
    given = given or {}
    problems = list(around.problems)
    found = tuple(_setting(option, given.get(option.name), around, problems) for option in entry.options)
    if not problems and (wrong := entry.check({one.option.name: one.value for one in found})):
        problems.append(f"{entry.name}: {wrong}")
    if problems:
        raise InvalidArgument("\n".join(problems))
    return found


def values(
    entry: Entry, given: Mapping[str, Any] | None = None, around: Surroundings | None = None
) -> dict[str, Any]:
    """The value of each option of an entry point; errors as in `settings`, and for a missing required one."""
    found = settings(entry, given, around)
    missing = [one.option for one in found if one.option.required and one.value is None]
    if missing:
        raise InvalidArgument("\n".join(_missing(option) for option in missing))
    return {one.option.name: one.value for one in found}


def _setting(option: Option, given: Any, around: Surroundings, problems: list[str]) -> Setting:
    if given is not None:
        return Setting(option, given, GIVEN)
    text = around.variables.get(option.variable)
    if text is not None:
        try:
            return Setting(option, option.kind.from_text(text), option.variable)
        except ValueError:
            problems.append(f"{option.variable}: {option.refusal(text)}")
    elif around.file and option.key in around.file.values:
        return Setting(option, around.file.values[option.key], around.file.at(option.key))
    return Setting(option, option.default, MISSING if option.required else DEFAULT)


def _missing(option: Option) -> str:
    return (
        f"{option.name} is not set: give {option.flag}, the variable {option.variable}, "
        f"or {option.name} in [{option.section}] of the configuration file"
    )


def given_values(entry: Entry, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check typed values that were given directly, as JSON says them. `where` begins each error."""
    options = {option.name: option for option in entry.options}
    checked: dict[str, Any] = {}
    problems = []
    for name, value in given.items():
        if name not in options:
            problems.append(f"{where}: unknown key {name!r}{_advice(name, options)}")
        elif value is not None:
            kind = entry.direct.get(name, options[name].kind)
            try:
                checked[name] = kind.from_value(value)
            except ValueError as error:
                problems.append(f"{where}: {options[name].refusal(value, kind, error)}")
    if problems:
        raise InvalidArgument("\n".join(problems))
    return checked


def _advice(name: str, options: Mapping[str, Option]) -> str:
    near = meant(name, options)
    return f"; did you mean {near!r}?" if near else f"; known: {', '.join(options)}"
