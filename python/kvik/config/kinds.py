"""What the value of an option can be.

A kind reads a value as text (a variable, a flag of a command) and as a typed value (TOML, JSON), says in
words what it accepts, and writes a value as text that it would read again. Typed values are taken as they
are: `"4"` is no number. A value that a kind does not accept raises `ValueError`; whoever asked knows where
the value came from and words the error with `accepts`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kvik._native import parse_size
from kvik.errors import KvikError
from kvik.store.tenants import Tenant

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))
_MOST_CPUS = 65_536


class PartError(ValueError):
    """What is wrong with one part of a value; the text goes on after the option's name."""


def shortly(value: object) -> str:
    """A value that was refused, for a line of an error."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        text = "a very long number"
    return text if len(text) <= 60 else text[:57] + "..."


class Kind(ABC):
    """One kind of value."""

    metavar: ClassVar[str] = "TEXT"
    """What `--help` shows for a value."""
    unit: ClassVar[str] = ""
    """The unit of a number; empty where there is none."""
    suffix: ClassVar[str] = ""
    """The unit as it is shown after a number that does not show it by itself."""
    several: ClassVar[bool] = False
    """Whether a value is a tuple of parts; as text they are separated by commas."""
    secret: ClassVar[bool] = False
    """Whether a value must never be shown."""

    @property
    @abstractmethod
    def accepts(self) -> str:
        """What is accepted, as the end of "NAME is ..."."""

    @abstractmethod
    def from_text(self, text: str) -> Any:
        """The value that `text` says. Raises ValueError."""

    @abstractmethod
    def from_value(self, value: object) -> Any:
        """The value that TOML or JSON says. Raises ValueError."""

    def to_text(self, value: Any) -> str:
        """The text of a value."""
        return str(value)


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    metavar: ClassVar[str] = "BOOL"
    accepts: ClassVar[str] = "true or false"

    def from_text(self, text: str) -> bool:
        """`true`, `yes`, `on`, `1`, and their opposites."""
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError
        return word in _TRUE

    def from_value(self, value: object) -> bool:
        """A boolean only."""
        if not isinstance(value, bool):
            raise ValueError
        return value

    def to_text(self, value: Any) -> str:
        """`true` or `false`."""
        return "true" if value else "false"


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number between two bounds, which belong to it."""

    least: int
    most: int
    metavar: ClassVar[str] = "N"

    @property
    def accepts(self) -> str:
        """The bounds."""
        return f"a whole number from {self.least} to {self.most}"

    def from_text(self, text: str) -> int:
        """Decimal digits."""
        return self.from_value(int(text.strip()))

    def from_value(self, value: object) -> int:
        """An integer; `4.0` is none."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise ValueError
        return value


@dataclass(frozen=True)
class Seconds(Kind):
    """A time in seconds, above 0 and at most a day: more than that is a mistake of units."""

    most: float = 86_400.0
    metavar: ClassVar[str] = "SECONDS"
    unit: ClassVar[str] = "seconds"
    suffix: ClassVar[str] = " s"

    @property
    def accepts(self) -> str:
        """The bounds."""
        return f"a number of seconds above 0 and at most {self.most:.15g}"

    def from_text(self, text: str) -> float:
        """A decimal number."""
        return self.from_value(float(text.strip()))

    def from_value(self, value: object) -> float:
        """An integer or a float; not infinity and not NaN."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not 0 < value <= self.most:
            raise ValueError
        return float(value)

    def to_text(self, value: Any) -> str:
        """Without a needless `.0`."""
        return f"{value:.15g}"


@dataclass(frozen=True)
class Rate(Kind):
    """Tokens a second, above 0 and at most `most`; or one of a few words in place of a number."""

    words: tuple[str, ...]
    most: float = 1e12
    metavar: ClassVar[str] = "RATE"
    unit: ClassVar[str] = "tokens a second"

    @property
    def accepts(self) -> str:
        """The number and the words."""
        words = " or ".join(f'"{word}"' for word in self.words)
        return f"a number of tokens a second above 0 and at most {self.most:.15g}, {words}"

    def from_text(self, text: str) -> float | str:
        """A decimal number, or a word."""
        word = text.strip()
        return word if word in self.words else self.from_value(float(word))

    def from_value(self, value: object) -> float | str:
        """An integer or a float, not NaN; or a word."""
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not 0 < value <= self.most:
            raise ValueError
        return float(value)

    def to_text(self, value: Any) -> str:
        """The word, or the number without a needless `.0`."""
        return value if isinstance(value, str) else f"{value:.15g}"


@dataclass(frozen=True)
class Size(Kind):
    """Bytes."""

    least: int = 1
    metavar: ClassVar[str] = "SIZE"
    unit: ClassVar[str] = "bytes"

    @property
    def accepts(self) -> str:
        """The forms and the bound."""
        return f'a number of bytes, or text such as "256MiB", at least {self.to_text(self.least)}'

    def from_text(self, text: str) -> int:
        """As `kvik.parse_size`: "16KiB" counts by 1,024, "16kB" by 1,000."""
        try:
            return self.from_value(parse_size(text.strip()))
        except KvikError as error:
            raise ValueError from error

    def from_value(self, value: object) -> int:
        """Bytes, or text."""
        if isinstance(value, str):
            return self.from_text(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value < 1 << 63:
            raise ValueError
        return value

    def to_text(self, value: Any) -> str:
        """In the largest binary unit that gives a whole number."""
        for unit, power in _UNITS:
            if value and value % (1 << power) == 0:
                return f"{value >> power}{unit}"
        return str(value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]
    metavar: ClassVar[str] = "WORD"

    @property
    def accepts(self) -> str:
        """All words."""
        *most, last = (f'"{word}"' for word in self.words)
        return f"{', '.join(most)} or {last}" if most else last

    def from_text(self, text: str) -> str:
        """The word itself."""
        return self.from_value(text.strip())

    def from_value(self, value: object) -> str:
        """The word itself."""
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value


@dataclass(frozen=True)
class Text(Kind):
    """Any text of at least one and at most `most` bytes (UTF-8)."""

    most: int = 4096
    what: str = "text"

    @property
    def accepts(self) -> str:
        """The bound."""
        return f"{self.what} of 1 to {self.most} bytes"

    def from_text(self, text: str) -> str:
        """The text itself."""
        return self.from_value(text)

    def from_value(self, value: object) -> str:
        """A string. Text that is no UTF-8 raises, too: `UnicodeError` is a ValueError."""
        if not isinstance(value, str) or "\0" in value or not 1 <= len(value.encode()) <= self.most:
            raise ValueError
        return value


@dataclass(frozen=True)
class Path(Text):
    """The path of a file."""

    what: str = "the path of a file"
    metavar: ClassVar[str] = "PATH"


@dataclass(frozen=True)
class Secret(Kind):
    """Text that proves who somebody is. It is never shown, and has at least `least` bytes."""

    least: int
    secret: ClassVar[bool] = True

    @property
    def accepts(self) -> str:
        """The bound."""
        return f"text of at least {self.least} bytes"

    def from_text(self, text: str) -> str:
        """The text itself."""
        return self.from_value(text)

    def from_value(self, value: object) -> str:
        """A string."""
        if not isinstance(value, str) or len(value.encode()) < self.least:
            raise ValueError
        return value

    def to_text(self, value: Any) -> str:  # noqa: ARG002 - the point is that it is not looked at
        """Only that there is one."""
        return "(set, not shown)"


class _Several(Kind):
    """A tuple of parts."""

    several: ClassVar[bool] = True

    @abstractmethod
    def part(self, text: str) -> Any:
        """One part. Raises ValueError."""

    def from_text(self, text: str) -> tuple[Any, ...]:
        """Parts between commas."""
        return self._checked([self.part(part.strip()) for part in text.split(",")])

    def from_value(self, value: object) -> tuple[Any, ...]:
        """One text, or a list of texts."""
        if isinstance(value, str):
            return self.from_text(value)
        if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
            raise ValueError
        return self._checked([self.part(part.strip()) for part in value])

    def to_text(self, value: Any) -> str:
        """Parts between commas."""
        return ",".join(map(str, value))

    def _checked(self, parts: list[Any]) -> tuple[Any, ...]:
        if not parts:
            raise ValueError
        self.to_text(parts).encode()  # as in Text
        return tuple(parts)


_PORTED = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:/,]+):(\d{1,5})")
_BARE = re.compile(r"\[?[0-9A-Fa-f:.]+\]?|[^\s\[\]:/,]+")


@dataclass(frozen=True)
class Addresses(_Several):
    """Network addresses; `bare` says whether the port may be missing."""

    bare: bool = False
    metavar: ClassVar[str] = "ADDRESS"

    @property
    def accepts(self) -> str:
        """The forms."""
        one = "HOST, HOST:PORT or [IPV6]:PORT" if self.bare else "HOST:PORT or [IPV6]:PORT"
        return f"{one}, or several of them"

    def part(self, text: str) -> str:
        """One address, as it was written: a name is resolved where it is used."""
        ported = _PORTED.fullmatch(text)
        if ported is not None and int(ported[2]) < 1 << 16:
            return text
        if ported is None and self.bare and _BARE.fullmatch(text):
            return text
        raise ValueError


@dataclass(frozen=True)
class Urls(_Several):
    """Addresses of HTTP servers."""

    metavar: ClassVar[str] = "URL"
    accepts: ClassVar[str] = "http://HOST:PORT, or several of them"

    def part(self, text: str) -> str:
        """One URL; the router checks the rest of it."""
        if not text.startswith("http://") or len(text) == len("http://"):
            raise ValueError
        return text


@dataclass(frozen=True)
class Texts(_Several):
    """Any texts, such as may have commas themselves: between semicolons."""

    what: str = "text"
    metavar: ClassVar[str] = "TEXT"

    @property
    def accepts(self) -> str:
        """The form."""
        return f"{self.what}, or several of them between semicolons"

    def part(self, text: str) -> str:
        """One of them; nothing is none."""
        if not text:
            raise ValueError
        return text

    def from_text(self, text: str) -> tuple[Any, ...]:
        """Parts between semicolons."""
        return self._checked([self.part(part.strip()) for part in text.split(";")])

    def to_text(self, value: Any) -> str:
        """Parts between semicolons."""
        return ";".join(value)


@dataclass(frozen=True)
class Tenants(Texts):
    """Tenants of a store, as `Tenant.parse` reads them."""

    metavar: ClassVar[str] = "TENANT"

    def part(self, text: str) -> str:
        """One of them, as it was written."""
        quota = Tenant.parse(text).quota
        if quota is not None:
            Size().from_value(quota)
        return text


@dataclass(frozen=True)
class Cpus(_Several):
    """CPU numbers: as text also ranges (`0,2,4-7`), in TOML and JSON a list of whole numbers."""

    metavar: ClassVar[str] = "CPUS"
    accepts: ClassVar[str] = 'CPU numbers: a list of whole numbers, or text such as "0,2,4-7"'

    def part(self, text: str) -> tuple[int, ...]:
        """One number or range."""
        first, dash, last = text.partition("-")
        begin = int(first)
        end = int(last) if dash else begin
        if not 0 <= begin <= end < _MOST_CPUS:
            raise ValueError
        return tuple(range(begin, end + 1))

    def from_value(self, value: object) -> tuple[Any, ...]:
        """Whole numbers, or text."""
        if isinstance(value, str):
            return self.from_text(value)
        if not isinstance(value, list | tuple):
            raise ValueError
        if not all(type(cpu) is int and 0 <= cpu < _MOST_CPUS for cpu in value):
            raise ValueError
        return self._checked([(cpu,) for cpu in value])

    def _checked(self, parts: list[Any]) -> tuple[Any, ...]:
        return super()._checked([cpu for part in parts for cpu in part])


_RANK = re.compile(r"0|[1-9]\d{0,5}", re.ASCII)


@dataclass(frozen=True)
class ByRank(Kind):
    """One value for all ranks of a server, which is itself; or one for each: a dict by rank number."""

    one: Kind

    @property
    def accepts(self) -> str:
        """The three forms."""
        return (
            f"{self.one.accepts}; or one for each rank of the server: a list in the order of the ranks, or "
            "an object from rank number to value"
        )

    def from_text(self, text: str) -> Any:
        """One for all."""
        return self.one.from_text(text)

    def from_value(self, value: object) -> Any:
        """One for all, a list, or an object, whose keys JSON has as text."""
        if isinstance(value, list | tuple):
            return self._each(list(enumerate(value)))
        if isinstance(value, dict):
            return self._each([(self._rank(key), part) for key, part in value.items()])
        return self.one.from_value(value)

    def _each(self, parts: list[tuple[int, object]]) -> dict[int, Any]:
        if not parts:
            raise ValueError
        read: dict[int, Any] = {}
        for rank, part in parts:
            if rank in read:
                raise PartError(f"names rank {rank} twice")
            try:
                read[rank] = self.one.from_value(part)
            except ValueError as error:
                raise PartError(f"of rank {rank} is {self.one.accepts}, not {shortly(part)}") from error
        return read

    def _rank(self, key: object) -> int:
        if type(key) is int and key >= 0:
            return key
        if not isinstance(key, str) or not _RANK.fullmatch(key):
            raise PartError(f"names ranks by their numbers, from 0, not {shortly(key)}")
        return int(key)
