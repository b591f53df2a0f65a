"""Rules about a store: what is wrong, by its fact, with what it costs and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from kvik.store.doctor.rules_server import server_findings
from kvik.store.doctor.survey import Server, Survey
from kvik.store.doctor.words import Finding, joined, percent, share, size

__all__ = ["Finding", "findings"]

SIGMAS = 4
"""Standard deviations within which a share is chance: of 100 servers, one is beyond in 150 looks."""
UNEVEN = 0.1
"""Of an even share: what differs less costs nothing that is seen."""
STRAY = 0.01
"""Of all copies: fewer where nobody looks are left of what has moved, and go."""
_NAMED = 6


def findings(survey: Survey) -> list[Finding]:
    """What is wrong with a store: what fails first, then by the share of its blocks that is concerned.

    A healthy store has none.
    """
    found = [
        *_absent(survey),
        *_copies(survey),
        *_stray(survey),
        *_uneven(survey),
        *_unlike(survey),
        *server_findings(survey.servers),
    ]
    return sorted(found, key=lambda one: (not one.fails, -one.share, one.code, one.server))


def missed(servers: int, down: int, copies: int) -> float:
    """The share of blocks whose copies are all on servers that do not answer."""
    copies = min(copies, servers)
    return math.comb(down, copies) / math.comb(servers, copies)


def _absent(survey: Survey) -> Iterator[Finding]:
    """Servers that do not answer, or do not say all."""
    count = len(survey.servers)
    down = [server for server in survey.servers if server.state == "down"]
    gone = missed(count, len(down), survey.copies)
    cost = (
        f"about {percent(gone)} of all blocks have no copy on another server: misses, to be computed again"
        if gone
        else f"no block is missed that has all of its {survey.copies} copies: one at least is on another "
        "server; until it is back there is one less"
    )
    for server in down:
        yield Finding(
            "server-down", server.name, f"it does not answer: {server.why}", cost,
            "Start it again: what is in its log or object store is found then. If it does not come back, "
            "take it out of the list of all clients: its share goes to the others.",
            gone, fails=True,
        )  # fmt: skip
    for server in survey.servers:
        if server.state == "part":
            seen = server.contents.held.blocks
            yield Finding(
                "server-incomplete", server.name,
                f"it listed {seen:,} blocks, and then no more: {server.why}",
                "what is said here of blocks leaves out those that it did not list",
                "Ask again with a longer --deadline; if it stops again, look at what keeps that server.",
                share(1, count), fails=False,
            )  # fmt: skip
        elif server.state == "older":
            yield Finding(
                "server-older", server.name, f"it does not list its blocks: {server.why}",
                "what is said here of blocks leaves out those that it has",
                "Its kvik is older, and does not know that request: update it. The servers of a store may be "
                "updated one after the other.",
                share(1, count), fails=False,
            )  # fmt: skip


def _copies(survey: Survey) -> Iterator[Finding]:
    """Blocks with fewer copies than are wanted."""
    wanted, count = survey.wanted, len(survey.servers)
    if wanted is None:
        return
    if wanted > count:
        yield Finding(
            "servers-too-few", "all servers", f"{wanted} copies of each block are wanted of {count} servers",
            f"no block can have more than {count}",
            "Add servers to the list, or ask for fewer copies.", 1.0, fails=False,
        )  # fmt: skip
    short = survey.short
    if short.blocks == 0:
        return
    unseen, none = survey.short_unseen.blocks, survey.by_copies[0].blocks
    said = [
        f"{short.blocks:,} of {survey.blocks:,} blocks ({percent(share(short.blocks, survey.blocks))}, "
        f"{size(short.nbytes)}) have fewer than {survey.copies} copies where clients look"
    ]
    if none:
        said.append(f"{none:,} have none there")
    if unseen:
        said.append(f"of {unseen:,} the missing copies may be on servers that were not looked at")
    lacking = _most(survey.servers, lambda server: server.contents.lacking.blocks)
    if lacking:
        said.append(f"missing are most at {lacking}")
    yield Finding(
        "copies-missing", "all servers", "; ".join(said),
        "a block with one copy is lost with its server, and one with none is a miss",
        "A copy is made when its blocks are put the next time, and not by itself. A server that lacks many "
        "was away, has joined, or evicts more than the others: look at its memory and at how long it is up.",
        share(short.blocks, survey.blocks), fails=False,
    )  # fmt: skip


def _stray(survey: Survey) -> Iterator[Finding]:
    """Blocks that lie where clients of this list do not look."""
    copies = sum(server.contents.held.blocks for server in survey.servers)
    stray = sum(server.contents.stray.blocks for server in survey.servers)
    nbytes = sum(server.contents.stray.nbytes for server in survey.servers)
    part = share(stray, copies)
    if part <= STRAY:
        return
    said = "" if survey.wanted else f" (taken: {survey.copies} copies, as most blocks have; --copies says it)"
    advice = (
        "After a change of the list they are evicted in time; `Store.clear` takes them out at once, with all "
        "others. If the list has not changed, some clients have another one, or other `copies`: give all the "
        "same."
    )
    if part > 0.5:
        advice = (
            "Give `kvik store doctor` the servers as clients have them, written alike: a server is called by "
            "its address. If it is the same list, it has changed lately, and they are evicted in time."
        )
    yield Finding(
        "blocks-elsewhere", "all servers",
        f"{stray:,} of {copies:,} copies of blocks lie where no client with this list looks{said}: "
        + _most(survey.servers, lambda server: server.contents.stray.blocks),
        f"{size(nbytes)} that nobody reads, {percent(part)} of what is held",
        advice, part, fails=False,
    )  # fmt: skip


def _most(servers: Iterable[Server], count: Callable[[Server], int]) -> str:
    """The servers at which there is most, with their numbers."""
    told = sorted(((count(server), server.name) for server in servers if count(server)), reverse=True)
    more = [f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else []
    return joined([f"{name} ({blocks:,})" for blocks, name in told[:_NAMED]] + more)


def _uneven(survey: Survey) -> Iterator[Finding]:
    """Servers whose share is beyond what hashing does by chance."""
    servers, even = survey.looked_at(), survey.even()
    chance = SIGMAS * survey.scatter()
    if len(servers) < 2 or not even:
        return
    total = even * len(servers)
    for server in servers:
        blocks = server.contents.in_place
        away = blocks - even
        if abs(away) <= max(chance, UNEVEN * even):
            continue
        fact = (
            f"it has {blocks:,} blocks where clients look, {percent(share(blocks, total))} of all; an even "
            f"share is {percent(1 / len(servers))}, and for {survey.segments:,} segments hashing alone makes "
            f"that {percent(share(max(even - chance, 0), total))} to {percent(share(even + chance, total))}"
        )
        cost = (
            "it evicts sooner, and is asked for more, than the others"
            if away > 0
            else "its memory is of less use than the others', and blocks it should have are misses"
        )
        yield Finding(
            "uneven", server.name, fact, cost, _advice(survey, server, away > 0),
            abs(away) / total, fails=False,
        )  # fmt: skip


def _advice(survey: Survey, server: Server, above: bool) -> str:
    """What to do about a share that is too large or too small."""
    sizes = {one.figures.now.memory_capacity for one in survey.looked_at() if one.figures is not None}
    if len(sizes) > 1:
        return "Give all servers the same memory: shares of segments are equal, whatever memory they have."
    if above:
        return (
            "Look whether the others were away or have joined lately (their shares come back as blocks are "
            "put), or evict more."
        )
    lacking = server.contents.lacking.blocks
    said = f", {lacking:,} of them known elsewhere" if lacking else ""
    return (
        f"If it was started again, was away or has joined lately, its share comes back as blocks are put"
        f"{said}. If not, look at what it refuses and evicts (`kvik store stat`)."
    )


def _unlike(survey: Survey) -> Iterator[Finding]:
    """Servers that were not started alike."""
    versions = {server.name: server.version for server in survey.servers if server.version}
    if len(set(versions.values())) > 1:
        yield Finding(
            "versions-differ", "all servers", _by_value(versions),
            "none, while an update is under way", "Update the others too.", 0.0, fails=False,
        )  # fmt: skip
    for what, values in _options(survey.servers).items():
        if len(set(values.values())) > 1:
            yield Finding(
                "options-differ", "all servers", f"{what}: {_by_value(values)}",
                "each server gets an equal share of the segments: one with less keeps blocks for less long",
                "Start all servers of a store with the same options.", 0.0, fails=False,
            )  # fmt: skip


def _options(servers: Iterable[Server]) -> dict[str, dict[str, str]]:
    """Options by name, then by server."""
    told: dict[str, dict[str, str]] = {}
    for server in servers:
        if server.figures is None:
            continue
        now = server.figures.now
        options = {
            "memory": size(now.memory_capacity),
            "log": size(now.log["capacity_bytes"]) if now.log else "none",
            "object store": size(now.object["capacity_bytes"]) if now.object else "none",
            "quotas": joined([f"{name} {size(quota)}" for name, quota in sorted(now.quota_bytes.items())]),
        }
        for what, value in options.items():
            told.setdefault(what, {})[server.name] = value or "none"
    return told


def _by_value(values: dict[str, str]) -> str:
    """Who has what, each value once."""
    servers: dict[str, list[str]] = {}
    for name, value in values.items():
        servers.setdefault(value, []).append(name)
    said = []
    for value, names in sorted(servers.items()):
        more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
        said.append(f"{value} at {joined([*names[:_NAMED], *more])}")
    return "; ".join(said)
