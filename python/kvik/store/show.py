"""Figures of a store for people, in 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvik.bench.report import seconds_text
from kvik.store.figures import Figures, Period, Times, Traffic

WIDTH = 100
_MOST_TENANTS = 16
_NAME = 24
_UNITS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


def printable(words: str) -> str:
    """What a server says, without what a terminal would take for orders."""
    return "".join(sign if sign.isprintable() else "?" for sign in words)


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style)


def view(figures: Figures) -> Group:
    """What a store has, and what it did between two looks and since it began."""
    parts: list[RenderableType] = [_text(f"store at {figures.address}", "bold"), _traffic(figures)]
    if figures.servers:
        parts.append(_servers(figures))
    if figures.since_start.latency:
        parts.append(_latency(figures))
    if not any(ever.lookups or ever.in_bytes for ever in figures.since_start.tiers.values()):
        parts.append(Text("nothing was asked for yet", style="dim"))
    parts += [_text(line) for line in _lines(figures)]
    return Group(*parts)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(titles[0], no_wrap=True, width=_NAME)
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _traffic(figures: Figures) -> Table:
    """A line a tier, then one for each tenant and tier: of the interval, and the hit rate since the start."""
    seconds = figures.interval.seconds or 1.0
    table = _table("TIER, TENANT", "BLOCKS/s", "HITS", "SINCE START", "MB/s IN", "MB/s OUT", "BLOCKS READ")

    def add(name: str, now: Traffic, ever: Traffic) -> None:
        cells = (
            name if len(name) <= _NAME else name[: _NAME - 1] + "…",
            f"{now.lookups / seconds:,.0f}",
            _percent(now.hit_rate),
            _percent(ever.hit_rate),
            f"{now.in_bytes / seconds / 1e6:,.1f}",
            f"{now.out_bytes / seconds / 1e6:,.1f}",
            f"{ever.hits:,}",
        )
        table.add_row(*map(_text, cells))

    for tier, ever in figures.since_start.tiers.items():
        add(tier, figures.interval.tiers[tier], ever)
    tenants = {
        name: tiers
        for name, tiers in figures.since_start.tenants.items()
        if any(ever.lookups or ever.in_bytes for ever in tiers.values())
    }
    busiest = sorted(tenants, key=lambda name: (-tenants[name]["memory"].lookups, name))
    for name in busiest[:_MOST_TENANTS]:
        for tier, ever in tenants[name].items():
            add(f"  {name}, {tier}", figures.interval.tenants[name][tier], ever)
    left = len(busiest) - _MOST_TENANTS
    if left > 0:
        table.add_row(Text(f"  and {left} more", style="dim"))
    return table


def _servers(figures: Figures) -> Table:
    """A line a server: its share of what there is, and of what was asked for in the interval."""
    seconds = figures.interval.seconds or 1.0
    table = _table("SERVER", "BLOCKS", "OF ALL", "MEMORY", "BLOCKS/s", "OF ALL", "HITS", "MB/s OUT")
    servers = figures.servers.values()
    blocks, asked = sum(one.blocks for one in servers), sum(one.lookups for one in servers)
    for name, one in figures.servers.items():
        if not one.up:
            table.add_row(_text(name), Text("does not answer", style="bold"))
            continue
        cells = (
            name,
            f"{one.blocks:,}",
            _percent(one.blocks / blocks if blocks else None),
            size(one.memory_bytes),
            f"{one.lookups / seconds:,.0f}",
            _percent(one.lookups / asked if asked else None),
            _percent(one.hits / one.lookups if one.lookups else None),
            f"{one.out_bytes / seconds / 1e6:,.1f}",
        )
        table.add_row(*map(_text, cells))
    return table


_OPS = {
    "get_first": "get, first block",
    "get": "get, until read",
    "put": "put",
    "load": "load from below",
}


def _latency(figures: Figures) -> Table:
    table = _table("TIME OF", "NOW p50", "p99", "EVER p50", "p99", "COUNT")
    for op, title in _OPS.items():
        for tier, ever in figures.since_start.latency.get(op, {}).items():
            now = figures.interval.latency.get(op, {}).get(tier)
            cells = (
                f"{title}, {tier}",
                *_pair(now, seconds_text),
                *_pair(ever, seconds_text),
                f"{ever.count:,}",
            )
            table.add_row(*map(_text, cells))
    return table


def _pair(times: Times | None, text: Callable[[float], str]) -> tuple[str, str]:
    return ("-", "-") if times is None else (text(times.p50), text(times.p99))


def _lines(figures: Figures) -> list[str]:
    now, ever = figures.now, figures.since_start
    used, pinned = sum(now.memory_bytes.values()), sum(now.pinned_bytes.values())
    deciding = ", ".join(f"{policy}{_for(tenant)}" for tenant, policy in sorted(now.policy.items()))
    lines = [
        f"memory     {size(used)} in blocks, {size(now.memory_taken)} taken of "
        f"{size(now.memory_capacity)}; {size(now.lent_bytes)} being read, {size(pinned)} pinned",
        f"blocks     {now.blocks:,} known",
        f"policy     {deciding}; evicted: {_counted(ever.evicted) or 'none'}",
        f"reuse gap  {_ages(ever.reuse_gap)}",
        f"idle time  {_ages(ever.idle)} before eviction",
    ]
    for tenant, quota in sorted(now.quota_bytes.items()):
        lines.append(f"quota      {tenant}: {size(now.memory_bytes.get(tenant, 0))} of {size(quota)}")
    if now.log is not None:
        log = now.log
        lines.append(
            f"log        {size(log['bytes'])} of {size(log['capacity_bytes'])} in {log['segments']} "
            f"segments, {log['dropped_blocks']:,} blocks dropped, {size(log['copied_bytes'])} copied, "
            f"{log['syncs']:,} syncs, {log['failures']:,} failures"
        )
    if now.object is not None:
        far = now.object
        state = "is not asked, since it did not answer" if far["shut"] else "is being looked through"
        lines.append(
            f"objects    {size(far['bytes'])} of {size(far['capacity_bytes'])} in {far['count']:,}, "
            f"{size(far['unsent_bytes'])} unsent, {far['requests']:,} requests, "
            f"{far['failures']:,} failures, {far['unwritten_blocks']:,} blocks not taken"
        )
        if far["shut"] or not far["open"]:
            lines.append(f"objects    the object store {state}")
    return lines + _trouble(ever)


def _trouble(ever: Period) -> list[str]:
    """What happened that should not, or not often; a line only where it did."""
    lines = []
    if ever.refused_blocks:
        lines.append(f"refused    blocks: {_counted(ever.refused_blocks)}")
    if ever.refused_requests:
        lines.append(f"refused    requests: {_counted(ever.refused_requests)}")
    if ever.corrupt:
        lines.append(f"corrupt    {ever.corrupt:,} blocks were not what was stored, and were taken out")
    if ever.shared_waits:
        lines.append(f"shared     {ever.shared_waits:,} blocks were on their way for others already")
    return lines


def _for(tenant: str) -> str:
    return f" ({tenant})" if tenant else ""


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _ages(times: Times | None) -> str:
    if times is None:
        return "none yet"
    return f"p50 {times.p50:,.0f} s, p99 {times.p99:,.0f} s of {times.count:,} blocks"


def size(count: int) -> str:
    """Bytes for people."""
    for unit, power in _UNITS:
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"
