"""Rules about one server, by what it says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvik.store.doctor.survey import Server
from kvik.store.doctor.words import Finding, joined, percent, share
from kvik.store.figures import Figures

MANY = 0.01
"""Of the blocks that came: fewer that were refused, or not written, are chance."""
ENOUGH = 100
"""Blocks that have to be counted before half of them says anything."""
_NO_ROOM = ("quota", "held_by_readers", "pinned", "in_use", "not_admitted")
_REFUSED = {
    "quota": "a tenant's quota is in use: raise it",
    "held_by_readers": "a quarter of the memory is being read: give it more memory",
    "pinned": "a quarter of the memory is pinned: pin less, or give it more memory",
    "in_use": "all memory has blocks on their way, or others behind them: give it more memory",
    "not_admitted": "the policy found them not worth another block's place: more memory, or another --policy",
}


def server_findings(servers: Iterable[Server]) -> Iterator[Finding]:
    """All of this module."""
    for server in servers:
        if server.unread:
            yield Finding(
                "server-unreadable", server.name, server.unread,
                "what it says of itself is not judged: its memory, its tiers, what it refuses",
                "Ask it with the kvik that it has; update the servers of a store to one version.",
                0.0, fails=False,
            )  # fmt: skip
        if server.figures is not None:
            yield from _broken(server.name, server.figures)
            yield from _pressure(server.name, server.figures)
            yield from _behind(server.name, server.figures)


def _broken(name: str, figures: Figures) -> Iterator[Finding]:
    """What fails, or gives other bytes."""
    ever, log, far = figures.since_start, figures.now.log, figures.now.object
    if log is not None and log["failures"]:
        yield Finding(
            "disk-failing", name, f"{log['failures']:,} reads, writes or syncs of the log have failed",
            "durable puts fail, and blocks that only the log has are misses",
            "Look at the disk and at the server's own log. Replace the disk, and start the server with an "
            "empty directory: nothing in a log is the only copy of anything.", 0.0, fails=True,
        )  # fmt: skip
    if far is not None and far["shut"]:
        yield Finding(
            "object-store-away", name, "the object store did not answer lately, and is not asked for now",
            "blocks that only it has are misses; what is put waits, and is left out when too much does",
            "Look at the object store, the network to it and the credentials; the server's own log says what "
            "failed. It goes on by itself.", 0.0, fails=True,
        )  # fmt: skip
    elif far is not None and far["failures"] > MANY * far["requests"]:
        yield Finding(
            "object-store-failing", name,
            f"{far['failures']:,} of {far['requests']:,} requests to the object store have failed or took too"
            " long", "each is a miss, or a batch that comes later",
            "The server's own log says which; look at limits of requests and at the network.",
            share(far["failures"], far["requests"]), fails=False,
        )  # fmt: skip
    other = (log["quarantined_records"] if log else 0) + (far["quarantined_records"] if far else 0)
    if ever.corrupt or other:
        yield Finding(
            "corrupt-blocks", name,
            f"{ever.corrupt:,} blocks were not what was stored, and {other:,} records of the log or the "
            "object store were not what they should be",
            "each is a miss: it was taken out, and is served to nobody",
            "Look at the machine's memory (errors of ECC) and at its disk.", 0.0, fails=True,
        )  # fmt: skip


def _came(figures: Figures) -> int:
    """Blocks that have come to a server, as far as it counts them."""
    return figures.now.blocks + sum(figures.since_start.evicted.values())


def _pressure(name: str, figures: Figures) -> Iterator[Finding]:
    """Too little room."""
    ever = figures.since_start
    refused = {cause: count for cause, count in ever.refused_blocks.items() if cause in _NO_ROOM}
    count = sum(refused.values())
    part = share(count, _came(figures) + count)
    if part > MANY:
        most = max(refused, key=lambda cause: refused[cause])
        yield Finding(
            "blocks-refused", name,
            f"{count:,} blocks of puts were refused since it began: "
            + joined(f"{many:,} {cause}" for cause, many in sorted(refused.items())),
            f"{percent(part)} of what was put is computed again", f"Most: {_REFUSED[most]}.",
            part, fails=False,
        )  # fmt: skip
    idle, gap = ever.idle, ever.reuse_gap
    if idle and gap and min(idle.count, gap.count) >= ENOUGH and idle.p50 < gap.p50:
        memory = ever.tiers.get("memory")
        part = share(memory.misses, memory.lookups) if memory else 0.0
        yield Finding(
            "evicted-too-soon", name,
            f"half of the evicted blocks had not been read for {idle.p50:,.0f} s or less, and half of those "
            f"that were read again came back after {gap.p50:,.0f} s or more",
            f"{percent(part)} of what memory was asked for it does not have",
            "More memory (--memory), or a log below it, would give more hits; another policy may "
            "(`kvik store bench replay`).", part, fails=False,
        )  # fmt: skip


def _behind(name: str, figures: Figures) -> Iterator[Finding]:
    """Tiers that do not take what comes."""
    for code, tier, known, advice in (
        ("log-behind", "the log", figures.now.log, "Give the log a faster disk."),
        ("object-store-behind", "the object store", figures.now.object,
         "Look at the rate of the network to it, and at its limits of requests; a larger --object-batch "
         "makes fewer of them."),
    ):  # fmt: skip
        count = known["unwritten_blocks"] if known else 0
        part = share(count, _came(figures) + count)
        if part > MANY:
            yield Finding(
                code, name, f"{count:,} blocks did not come to {tier}: it was too slow, or refused them",
                f"{percent(part)} of what was put is gone when memory has no room for it, or with the server",
                advice, part, fails=False,
            )  # fmt: skip
