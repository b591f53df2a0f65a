# ruff: noqa: RUF001 - the marks and words that tables print
"""Quantities as they are printed: the number with its digits, the unit, sign, arrow, marks, ranges
and bounds.

What a printed number says is an interval: half a unit in its last printed place to either side.
Trailing zeros count, except where a mark of approximation (~, about, 約, 约) stands before an
integer: there the zeros at its end say nothing.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from kvik_lab.audit.units import PATTERN, PERCENT, PLAIN, TIME, Unit, unit

_SECOND = Unit("s", "time", TIME, 1.0, 1.0)


@dataclass(frozen=True)
class Quantity:
    """A printed number. `number` carries its sign (also that of an arrow); `half` is half a unit in
    the last place, in the printed unit. `upper` is the other end of a range. `clock` is true for
    1m26.002s."""

    number: float
    half: float
    decimals: int
    unit: Unit
    text: str
    digits: str
    signed: bool = False
    arrow: bool = False
    approx: bool = False
    bound: str = ""
    upper: float | None = None
    clock: str = ""
    span: tuple[int, int] = (0, 0)

    @property
    def low(self) -> float:
        """The lower end of what is printed, in the printed unit."""
        return min(self.number, self.number if self.upper is None else self.upper) - self.half

    @property
    def high(self) -> float:
        """The upper end of what is printed, in the printed unit."""
        return max(self.number, self.number if self.upper is None else self.upper) + self.half

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The printed number twice, or the ends of a range, the lower first; without half a unit."""
        other = self.number if self.upper is None else self.upper
        return (min(self.number, other), max(self.number, other))

    @property
    def single(self) -> bool:
        """True for one number: no range, no bound, no plus-minus."""
        return self.upper is None and not self.bound

    def with_unit(self, other: Unit) -> Quantity:
        """The same digits in another unit: one that stands in the header."""
        return replace(self, unit=other)

    def show(self, number: float) -> str:
        """`number` (in the printed unit) printed as this one is."""
        return _print(self, number) if math.isfinite(number) else "no number"


@dataclass(frozen=True)
class Part:
    """A quantity in a cell, with the label before it ("TE") and whether it stands in parentheses."""

    quantity: Quantity
    label: str
    note: bool


_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?"
_APPROX = r"~|≈|≒|∼|約|约|大约|およそ|ほぼ"
_APPROX += r"|about\s|around\s|approximately\s|approx\.?\s|roughly\s|nearly\s|some\s|ca\.\s"
_QUANTITY = re.compile(
    rf"(?P<arrow>[↓↑▲▼⬆⬇])?\s*(?P<before><=|>=|<|>|≤|≥)?\s*(?P<approx>{_APPROX})?\s*(?P<money>[$¥€])?"
    rf"(?P<sign>\+/-|[+\-±])?(?P<paid>[$¥€])?(?P<number>{_NUMBER})(?P<first>\s?{PATTERN})?"
    rf"(?:\s?(?:±|\+/-)\s?{_NUMBER}(?:\s?%)?)?"
    rf"(?:(?:-|\s?[~〜]\s?)(?P<upper>{_NUMBER})(?![.\d]*[A-Za-z]+-))?(?P<unit>\s?{PATTERN})?"
    r"(?P<after>\s?(?:以内|以下|以上|未満|未满)|\+(?!\d))?\s?(?P<late>[↓↑▲▼⬆⬇])?",
)
_CLOCK = re.compile(
    r"(?P<sign>[+-])?(?:(?P<h>\d{1,9})\s?(?:h|時間|小时)\s?)?(?P<m>\d{1,9})\s?(?:min|m|分)\s?"
    r"(?P<s>\d{1,2}(?:\.\d+)?)\s?(?:sec|s|秒)(?![A-Za-z])"
)
_COLON = re.compile(r"(?P<sign>[+-])?(?:(?P<h>\d{1,9}):)?(?P<m>\d{1,2}):(?P<s>\d{2}(?:\.\d+)?)$")
# what accounts print for a negative number: (27)%, ($1,200)
_LOSS = re.compile(rf"^\(([$¥€])({_NUMBER})()\)$|^\(()({_NUMBER})\)(\s?%)$")
_MISSING = {"", "-", "--", "—", "–", "n/a", "na", "nan", "none", "null", "tbd", "?", "*", "無", "无", "なし"}
_BEFORE = re.compile(r"[A-Za-z0-9_.,:/#=\\^]$|[A-Za-z0-9^]-$")


# what Markdown would else take for markup: \+3.0%
_ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+\-.!~<>=$])")


@lru_cache(maxsize=8192)
def plain(text: str) -> str:
    """Text without Markdown and HTML markup, with one form for each character that has several."""
    text = re.sub(r"<br\s*/?>", " ; ", text, flags=re.IGNORECASE)
    # a footnote's mark or an exponent is no further digit: 12.5¹, 10<sup>6</sup>
    text = re.sub(r"<sup\b[^<>]*>|(?<![⁰¹²³⁴-⁹⁺⁻])(?=[⁰¹²³⁴-⁹⁺⁻])", "^", text, flags=re.IGNORECASE)
    text = html.unescape(re.sub(r"</?[A-Za-z][^<>]*>", "", text))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(\*\*|__|`|~~)", "", text)
    text = _ESCAPED.sub(r"\1", text)
    text = unicodedata.normalize("NFKC", text.replace("½", "1/2"))
    text = text.replace("−", "-").replace("‐", "-").replace("‑", "-").replace("–", "-")
    return re.sub(r"[ \t\u3000\xa0]+", " ", text).strip().strip("*").strip()


# no table's number, and none that arithmetic on it would survive
_MONSTER = re.compile(r"[\d,.]{60}|[eE][+-]?0*[1-9]\d\d")
_POWER = re.compile(r"\^[+-]?\d")
_START = re.compile(r"[\d↓↑~≈≒約约±<>≤≥+\-$¥€]")


@lru_cache(maxsize=8192)
def quantities(text: str) -> tuple[Quantity, ...]:
    """All quantities in running text, in order, with their spans."""
    found: list[Quantity] = []
    position = 0
    while True:
        match = _START.search(text, position)
        if match is None:
            return tuple(found)
        start = match.start()
        here = None if _BEFORE.search(text[max(start - 2, 0) : start]) else _at(text, start)
        if here is None:
            digit = re.compile(r"[A-Za-z0-9_.]*").match(text, start)
            position = max(start + 1, digit.end() if digit and text[start].isdigit() else start + 1)
            continue
        found.append(here)
        position = here.span[1]


def _at(text: str, start: int) -> Quantity | None:
    """The quantity that begins at `start`, clock times first."""
    clock = _CLOCK.match(text, start)
    if clock is not None:
        return _clock(clock, "m")
    match = _QUANTITY.match(text, start)
    if match is None or _MONSTER.search(match[0]) or _POWER.match(text, match.end("number")):
        return None
    return _quantity(match)


def _clock(match: re.Match[str], style: str) -> Quantity:
    seconds = match["s"]
    number = int(match["h"] or 0) * 3600 + int(match["m"]) * 60 + float(seconds)
    decimals = len(seconds.partition(".")[2])
    return Quantity(
        number=-number if match["sign"] == "-" else number,
        half=0.5 * 10.0**-decimals,
        decimals=decimals,
        unit=_SECOND,
        text=match[0].strip(),
        digits=match[0],
        signed=match["sign"] is not None,
        clock=style,
        span=match.span(),
    )


def _quantity(match: re.Match[str]) -> Quantity:
    digits = match["number"].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    number = float(digits)
    sign = match["sign"] or ""
    arrow = (match["arrow"] or "") + (match["late"] or "")
    if sign == "-" or any(mark in arrow for mark in "↓▼⬇"):
        number = -number
    upper = None if match["upper"] is None else float(match["upper"].replace(",", ""))
    if upper is not None and number < 0:
        upper = -upper
    approx = match["approx"] is not None
    symbol = (match["unit"] or match["first"] or match["money"] or match["paid"] or "").strip()
    end = match.end("unit") if match["unit"] else match.end()
    return Quantity(
        number=number,
        half=_half(mantissa, decimals, approx),
        decimals=max(decimals, 0),
        unit=_counted(match) or (unit(symbol) if symbol else None) or PLAIN,
        text=match[0].strip(),
        digits=match["number"],
        signed=sign in ("+", "-"),
        arrow=bool(arrow),
        approx=approx,
        bound=(match["before"] or match["after"] or ("±" if sign in ("±", "+/-") else "")),
        upper=upper,
        span=(match.start(), max(end, match.end())),
    )


def _counted(match: re.Match[str]) -> Unit | None:
    """The unit of "1.5K tokens" and "4 KB pages": a prefix, or a size, of its own before what is counted."""
    first, counted = (match["first"] or "").strip(), (match["unit"] or "").strip()
    if not first or not counted or match["upper"] is not None:
        return None
    one = unit(first + counted) if first in ("k", "K", "M") else None
    if one is not None:
        return replace(one, symbol=(first + match["unit"]).strip())
    size = unit(first)
    return size if size is not None and size.scale != 1 else None


def _half(mantissa: str, decimals: int, approx: bool) -> float:
    half = 0.5 * 10.0**-decimals
    if approx and "." not in mantissa:
        zeros = len(mantissa) - len(mantissa.rstrip("0")) if mantissa.strip("0") else 0
        half *= 10.0**zeros
    return half


def parse_cell(text: str) -> tuple[Part, ...]:
    """The quantities of a cell. A label, a list of values and a missing value have none."""
    text = plain(text)
    if text.lower() in _MISSING:
        return ()
    label, rest = _label(text)
    clock = _COLON.match(rest)
    loss = _LOSS.match(rest)
    rest = "-" + "".join(loss.groups("")) if loss else rest
    first = _clock(clock, ":") if clock else _at(rest, 0)
    if first is None or first.span[0] != 0:
        return ()
    parts = [Part(first, label, note=False)]
    rest = rest[first.span[1] :].strip()
    notes = _notes(rest)
    return () if notes is None else tuple(parts + notes)


def _label(text: str) -> tuple[str, str]:
    match = re.match(r"^([^\d:;()=<>~+\-±↓↑][^:;()=]{0,40}?)\s?:\s*(?=\S)(.*)$", text, re.DOTALL)
    return (match[1].strip(), match[2].strip()) if match else ("", text)


_LEAD = re.compile(r"^(?:->|=>|[\s(→=])+")


def _notes(rest: str) -> list[Part] | None:
    """The derived values and annotations after a cell's first quantity; None when the cell is no
    quantity."""
    if not rest:
        return []
    inner = re.match(r"^\((.*)\)$", rest, re.DOTALL)
    joined = re.match(r"^(?:/|;|→|->|=>|,\s)\s*(.*)$", rest, re.DOTALL)
    if inner is None and joined is None:
        words = re.sub(r"\(.*?\)", "", rest)
        return [] if re.fullmatch(r"[^\d=]{1,40}", words) and not re.match(r"[-_][A-Za-z]", words) else None
    pieces = re.split(r"[;/]|,\s|、", inner[1] if inner else rest)
    notes: list[Part] = []
    listed = 0
    for piece in pieces:
        label, value = _label(_LEAD.sub("", piece))
        quantity = _at(value, 0) if value else None
        if quantity is not None and not value[quantity.span[1] :].strip(" )"):
            notes.append(Part(quantity, label, note=True))
            listed += 1
    # "1K, 2K, 3K, 4K" is a list of values, not a value with others derived from it
    return None if joined is not None and rest.startswith(",") and listed > 1 else notes


def header_unit(text: str) -> Unit | None:
    """The unit that a header states: "Latency (ms)", "帯域 [GB/s]", "Time, s", "Change %"."""
    clean = plain(text)
    for inner in re.findall(r"[(\[]([^()\[\]]*)[)\]]", clean)[::-1]:
        for word in [inner, *re.split(r"[,、;]\s*", inner)]:
            found = unit(word.strip())
            if found is not None and found.kind not in ("ratio", "tokens"):
                return found
    tail = re.search(r"(?:^|[\s,_])([A-Za-zμ%]+(?:/[A-Za-z]+)?)$", clean)
    if tail and (tail[1] == "%" or (tail[1] in _TAILS and clean != tail[1])):
        return unit(tail[1])
    return PERCENT if clean.endswith("%") else None


_TAILS = {
    "ms",
    "us",
    "μs",
    "ns",
    "sec",
    "GB",
    "MB",
    "KB",
    "GiB",
    "MiB",
    "KiB",
    "Gbps",
    "GB/s",
    "MB/s",
    "GiB/s",
}


def _print(like: Quantity, number: float) -> str:
    """`number` with the digits, sign, unit and style of another."""
    # exact halves go away from zero, as most print them; to the even digit is rounding too, and holds
    step = 10.0**-like.decimals
    rounded = math.copysign(math.floor(abs(number) / step + 0.5 + 1e-9) * step, number)
    if rounded == 0:
        rounded = 0.0
    if like.clock:
        return _print_clock(like, rounded)
    digits = (
        f"{abs(rounded):,.{like.decimals}f}"
        if "," in like.digits or abs(rounded) >= 1e4
        else (f"{abs(rounded):.{like.decimals}f}")
    )
    if like.arrow:
        shown = ("↓" if rounded < 0 else "↑") + digits
    else:
        shown = ("-" if rounded < 0 else "+" if like.signed and rounded > 0 else "") + digits
    symbol = like.unit.symbol
    mark = "~" if like.approx else ""
    if like.unit.kind == "money" and re.search(re.escape(symbol) + r"[+-]?\d", like.text):  # $1,200
        sign = shown.rstrip("0123456789.,")
        return mark + sign + symbol + shown.removeprefix(sign)
    written = symbol and symbol in like.text
    space = " " if written and re.search(r"\d\s" + re.escape(symbol), like.text) else ""
    return mark + shown + (space + symbol if written else "")


def _print_clock(like: Quantity, number: float) -> str:
    sign = "-" if number < 0 else "+" if like.signed else ""
    minutes, seconds = divmod(abs(number), 60)
    hours, minutes = divmod(int(minutes), 60)
    width = (3 + like.decimals) if like.decimals else 2
    if like.clock == ":":
        body = (
            f"{minutes:02d}:{seconds:0{width}.{like.decimals}f}"
            if hours
            else (f"{minutes}:{seconds:0{width}.{like.decimals}f}")
        )
        return sign + (f"{hours}:" if hours else "") + body
    body = f"{minutes}m" if minutes or hours else ""
    return sign + (f"{hours}h" if hours else "") + f"{body}{seconds:.{like.decimals}f}s"
