# ruff: noqa: RUF001 - the marks and words that tables print
"""Units as tables print them: what they measure, and how many of the base unit they are.

Base units are the second, the byte, the token and 1. Decimal byte prefixes carry the binary reading
beside them, because "MB" is printed for both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

Dimension = tuple[tuple[str, int], ...]

NONE: Dimension = ()
TIME: Dimension = (("time", 1),)
BYTES: Dimension = (("byte", 1),)
TOKENS: Dimension = (("token", 1),)


@dataclass(frozen=True)
class Unit:
    """A unit: its name as printed, what it measures, its size, and its size if prefixes are powers
    of 1024.

    `kind` tells dimensionless units apart: plain (none printed), percent, points, ratio, count.
    """

    symbol: str
    kind: str
    dimension: Dimension
    scale: float
    binary: float

    def __hash__(self) -> int:
        # units are keys of caches that are asked for every rule and cell
        return hash(self.symbol)


PLAIN = Unit("", "plain", NONE, 1.0, 1.0)
PERCENT = Unit("%", "percent", NONE, 0.01, 0.01)

_TIMES = {
    1e-9: "ns nanoseconds",
    1e-6: "us μs usec microseconds 微秒",
    1e-3: "ms msec msecs millisecond milliseconds ミリ秒 毫秒",
    1.0: "s sec secs second seconds 秒",
    60.0: "min mins minute minutes 分 分钟 分間",
    3600.0: "h hr hrs hour hours 時間 小时 時",
}
_PREFIX = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_OF_TOKENS = "tokens token toks tok トークン"
_RATIOS = "x X × 倍"
_COUNTS = (
    "requests request reqs req blocks block runs run patterns pattern iterations iters iter gpus "
    "gpu nodes node "
    "layers layer heads files file cores core nics nic pairs pair slots ops models model levels "
    "samples starts "
    "prompts times pages threads replicas steps queries "
    "回 件 個 台 枚 本 行 种 个 次 张 条 块 パターン モデル ノード ファイル リクエスト イテレーション"
)


def _simple() -> dict[str, Unit]:
    table: dict[str, Unit] = {"%": PERCENT, "percent": PERCENT}
    for word in ("pt", "pts", "pp", "points", "ポイント"):
        table[word] = Unit(word, "points", NONE, 0.01, 0.01)
    for scale, words in _TIMES.items():
        for word in words.split():
            table[word] = Unit(word, "time", TIME, scale, scale)
    for word in _OF_TOKENS.split():
        table[word] = Unit(word, "tokens", TOKENS, 1.0, 1.0)
    for word in _RATIOS.split():
        table[word] = Unit(word, "ratio", NONE, 1.0, 1.0)
    for word in _COUNTS.split():
        table[word] = Unit(word, "count", NONE, 1.0, 1.0)
    for prefix, power in _PREFIX.items():
        table |= _prefixed(prefix, power)
    return table


def _prefixed(prefix: str, power: int) -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    decimal, binary = 1000.0**power, 1024.0**power
    for word in ("B", "byte", "bytes", "Byte", "Bytes", "バイト"):
        table[prefix + word] = Unit(prefix + word, "bytes", BYTES, decimal, binary)
        if power:
            table[prefix.upper() + "i" + word] = Unit(
                prefix.upper() + "i" + word, "bytes", BYTES, binary, binary
            )
    for word in ("b", "bit", "bits"):
        if power:
            table[prefix + word] = Unit(prefix + word, "bits", BYTES, decimal / 8, decimal / 8)
            table[prefix.upper() + "i" + word] = Unit(
                prefix + "i" + word, "bits", BYTES, binary / 8, binary / 8
            )
    if power:
        table[prefix] = Unit(prefix, "count", NONE, decimal, binary)
        table[prefix + "tok"] = Unit(prefix + "tok", "tokens", TOKENS, decimal, binary)
        table[prefix + "tokens"] = Unit(prefix + "tokens", "tokens", TOKENS, decimal, binary)
    for word, base in (("W", "power"), ("J", "energy"), ("Wh", "energy_h"), ("Hz", "hz"), ("FLOPS", "flops")):
        table[prefix + word] = Unit(prefix + word, base, ((base, 1),), decimal, decimal)
    return table


_UNITS = _simple()
_PER_SECOND = {"bps": "b", "Bps": "B", "kbps": "kb", "Kbps": "Kb", "Mbps": "Mb", "Gbps": "Gb", "Tbps": "Tb"}
_TOKEN_RATES = {"t/s"}
_COUNT_RATES = {"qps", "QPS", "rps", "RPS", "req/s", "IOPS", "ops/s", "TPS", "tps", "it/s"}
_MONEY = {"USD", "$", "EUR", "€", "JPY", "¥", "円", "元", "CNY"}
_SPLIT = re.compile(r"^(.+?)\s*/\s*(s|sec|second|秒|h|hr|hour|時間|token|tok|トークン|GPU|gpu)$")


@lru_cache(maxsize=4096)
def unit(symbol: str) -> Unit | None:
    """The unit of a printed symbol, or None when it is not one."""
    word = symbol.strip().strip(".")
    found = _UNITS.get(word) or _rate(word)
    if found is None and word.lower() in _UNITS and len(word) > 2:
        found = _UNITS[word.lower()]
    if found is None and word in _MONEY:
        found = Unit(word, "money", (("money", 1),), 1.0, 1.0)
    return found


def _rate(word: str) -> Unit | None:
    if word in _PER_SECOND:
        inner = _UNITS.get(_PER_SECOND[word]) or Unit("b", "bits", BYTES, 0.125, 0.125)
        return Unit(word, "rate", combine(inner.dimension, TIME, -1), inner.scale, inner.binary)
    if word in _TOKEN_RATES:
        return Unit(word, "rate", combine(TOKENS, TIME, -1), 1.0, 1.0)
    if word in _COUNT_RATES:
        return Unit(word, "rate", (("time", -1),), 1.0, 1.0)
    match = _SPLIT.match(word)
    if match is None:
        return None
    over, under = unit(match[1]), _UNITS.get(match[2].lower(), _UNITS.get(match[2]))
    if over is None or under is None:
        return None
    dimension = combine(over.dimension, under.dimension, -1)
    return Unit(word, "rate", dimension, over.scale / under.scale, over.binary / under.scale)


def combine(left: Dimension, right: Dimension, sign: int) -> Dimension:
    """The dimension of a product (sign 1) or a quotient (sign -1)."""
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


_NAMES = sorted((name for name in _UNITS), key=len, reverse=True)
_LATIN = [re.escape(name) for name in _NAMES if name.isascii()]
_OTHER = [re.escape(name) for name in _NAMES if not name.isascii()]
_RATES = [
    re.escape(name)
    for name in sorted(_PER_SECOND.keys() | _COUNT_RATES | _TOKEN_RATES, key=len, reverse=True)
]
_BASE = "(?:" + "|".join(_RATES + _LATIN + _OTHER) + ")"
#: A unit in running text: the longest that is one, not the beginning of a longer word.
PATTERN = rf"(?:{_BASE}(?:\s?/\s?(?:sec|s|秒|hour|hr|h|token|tok|トークン|GPU|gpu))?)"
PATTERN += r"(?![A-Za-zμ])(?!(?<=[xX×])\s?\d)"
