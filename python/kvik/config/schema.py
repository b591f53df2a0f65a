"""What an option is, and what an entry point of kvik is: something that takes options.

An option belongs to one section, and has one variable and one key in the TOML file, whatever entry points
take it. The options themselves are in `kvik.config.tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvik.config.kinds import Kind, PartError, shortly

PREFIX = "KVIK_"
ENGINE_SECTION = "engine"
MOST_OPTIONS = 20
"""No entry point takes more: beyond it nobody knows them."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `reason` says why somebody would set it, and why the default is what it is."""

    name: str
    section: str
    kind: Kind
    default: Any
    help: str
    reason: str
    unset: str = "none"
    """What `None` means as a default, in words."""
    required: bool = False
    """Whether there is no default at all."""

    @property
    def variable(self) -> str:
        """KVIK_NAME for the engine's own, KVIK_SECTION_NAME for the others."""
        section = "" if self.section == ENGINE_SECTION else f"{self.section}_"
        return f"{PREFIX}{section}{self.name}".upper()

    @property
    def key(self) -> str:
        """Its key in the TOML file, with that of its table."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """Its flag, where it is an option of a command."""
        return "--" + self.name.replace("_", "-")

    def shown(self, value: Any) -> str:
        """A value as text for people; never a secret."""
        if value is None or value == "":
            return "(required)" if self.required else self.unset
        return self.kind.to_text(value) + self.kind.suffix

    def refusal(self, value: object, kind: Kind | None = None, error: ValueError | None = None) -> str:
        """What is wrong with a value that the kind, the option's own if none is given, did not accept."""
        kind = kind or self.kind
        if kind.secret:
            return f"{self.name} is {kind.accepts}; this is not (and is not shown)"
        if isinstance(error, PartError):
            return f"{self.name} {error}"
        return f"{self.name} is {kind.accepts}, not {shortly(value)}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry point: the options that it takes."""

    name: str
    title: str
    where: str
    """How options are given to it directly, for the reference."""
    options: tuple[Option, ...]
    check: Callable[[Mapping[str, Any]], str | None] = lambda _values: None
    """What is wrong with values that are each right."""
    direct: Mapping[str, Kind] = field(default_factory=dict, compare=False)
    """What options take where they are given directly, by name, if that is more than their variables take."""

    def __getitem__(self, name: str) -> Option:
        return next(option for option in self.options if option.name == name)

    def defaults(self) -> dict[str, Any]:
        """The default of each option."""
        return {option.name: option.default for option in self.options}
