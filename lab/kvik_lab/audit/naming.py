# ruff: noqa: RUF001 - the marks and words that tables print
"""What the name of a column or row says about how it derives, and from which others."""

from __future__ import annotations

import re
from functools import lru_cache

from kvik_lab.audit.rules import Rule
from kvik_lab.audit.series import Series, View, words

_FAMILIES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (pattern, frozenset(families.split("|")))
    for pattern, families in (
        (
            r"Δ|delta|diff|gap|saved|saving|差|短縮|増減|节省|变化量|extra|added",
            "difference|size of difference|ratio",
        ),
        (
            r"change|improv|gain|reduc|increase|decrease|drop|overhead|改善|変化|向上|低下|削減|提升|下降|降低|幅度|率"
            r"|オーバーヘッド|开销|增加|变化|%|saving|better|faster|slower|higher|lower|\bvs\b|benefit|penalty|Δ|差",
            "change|reduction|difference|size of change|size of difference|ratio",
        ),
        (
            r"speed.?up|ratio|relative|normali[sz]ed|×|\bx\b|倍|比$|factor|scaling|加速|高速化|提速|improvement|\bvs\b|faster",
            "ratio",
        ),
        (
            r"\btotal\b|\bsum\b|合計|合计|总|総|\ball\b|end.to.end|\be2e\b|overall|combined|aggregate|全体",
            "sum|cumulative",
        ),
        (r"\bmean\b|\baverage\b|\bavg\b|平均|均值", "mean"),
        (r"geo", "geometric mean"),
        (r"median|中央|中位|p50", "median"),
        (r"\bmax|best|peak|最大|最高|highest|worst|\btop\b", "maximum"),
        (r"\bmin\b|minimum|best|最小|最短|最低|lowest|fastest|worst", "minimum"),
        (
            r"share|fraction|percent|% of|割合|占|util|efficien|利用|構成比|比率|proportion|of peak|of total",
            "share|ratio|proportion",
        ),
        (
            r"bandwidth|throughput|帯域|带宽|スループット|吞吐|/s\b|rate|speed|bps|速度|速率|レート",
            "rate|quotient",
        ),
        (r"cumulative|running|累計|累积|累计", "cumulative"),
        (
            r"product|combinations|total|cost|price|amount|slots|capacity|組合せ|金額|金额|費用|费用|小計|小计"
            r"|总价|line rate|theor|理論|理论",
            "product",
        ),
        (r"size|bytes|サイズ|大小|memory|キャッシュ|缓存|cache|cost|theor|理論|理论", "proportion"),
        (r"\bper\b|/|あたり|每|平均", "quotient|ratio"),
        (r"range|spread|幅", "difference|size of difference"),
    )
)
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), families) for pattern, families in _FAMILIES)


_TOTAL = re.compile(r"^(total|sum|mean|average|avg|合計|合计|总计|総計|平均)\b", re.IGNORECASE)


# how a name begins that sums up others: "CL best metric" and "B200 peak" were measured
_SUMMARY = re.compile(
    r"^\W*(max|min|best|worst|peak|top|highest|lowest|fastest|median|p50|最|中)", re.IGNORECASE
)


@lru_cache(maxsize=4096)
def families_named(name: str) -> frozenset[str]:
    """The families of rules that a name speaks of."""
    found: set[str] = set()
    for pattern, families in _COMPILED:
        if pattern.search(name):
            found |= families
    return frozenset(found)


@lru_cache(maxsize=4096)
def distinguishing(series: Series, others: tuple[Series, ...]) -> frozenset[str]:
    """The words of a series' name that not all the others have."""
    own = words(series.name)
    names = [words(other.name) for other in others if other.position != series.position and other.name]
    common = frozenset.intersection(*names) if names else frozenset()
    return own - common


def level(rule: Rule, target: Series, view: View) -> int:
    """How far a target's name names a rule: 0 not, 1 the kind, 2 the kind and an input, 3 and all
    inputs.

    The label of a row is a name of what was measured more often than of how it derives: there only
    the kind counts.
    """
    named = rule.family.name in families_named(target.name) or (rule.cumulative and "sum" in target.name)
    if target.note and rule.family.name in ("change", "reduction", "ratio", "size of change"):
        named = True
    if rule.stated:
        return 2
    if rule.family.name in ("maximum", "minimum", "median"):
        named = named and bool(_SUMMARY.match(target.name))
    if view.axis == "row":
        return 2 if named and _TOTAL.match(target.name) else int(named)
    mine = words(target.name)
    inputs = {series.key: series for series in rule.inputs}
    if not (named or (len(inputs) == 2 and rule.family.name in ("difference", "size of difference"))):
        return 0
    mentioned = sum(bool(distinguishing(series, view.series) & mine) for series in inputs.values())
    if rule.family.name in ("difference", "size of difference") and mentioned == len(inputs) == 2:
        named = True
    if not named:
        return 0
    return 1 if mentioned == 0 else 3 if mentioned == len(inputs) else 2
