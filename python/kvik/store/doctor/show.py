"""What a store holds, and what is wrong with it, for the terminal and as JSON.

Names, versions and errors are what servers say of themselves: for the terminal every line is `printable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvik.store.doctor.survey import Amount, Server, Survey
from kvik.store.doctor.words import Finding, percent, printable, share, size

_MOST_NAMESPACES = 16
_NAME = 32


def to_json(survey: Survey, found: Sequence[Finding]) -> dict[str, Any]:
    """What ``kvik store doctor --json`` prints."""
    document = asdict(survey)
    for server in document["servers"]:
        if server["figures"] is not None:
            # Of an interval there is nothing: it was looked at once.
            server["figures"] = {name: server["figures"][name] for name in ("now", "since_start")}
    document["blocks"] = survey.blocks
    document["even_share"] = survey.even()
    document["scatter"] = survey.scatter()
    return {"store": document, "findings": [asdict(one) for one in found]}


def survey_lines(survey: Survey) -> Iterator[str]:
    """Servers, copies, what would be lost, namespaces."""
    yield from _table(_server_rows(survey))
    yield ""
    yield from map(printable, _facts(survey))
    yield ""
    yield "if a server died now, of the blocks that only it has where clients look:"
    yield from _table(_loss_rows(survey))
    if survey.namespaces:
        yield ""
        yield from _table(_namespace_rows(survey))


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows in columns: the first one to the left, the others to the right."""
    table = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        yield "  ".join(cells).rstrip()


def _server_rows(survey: Survey) -> Iterator[Sequence[str]]:
    yield ("SERVER", "VERSION", "BLOCKS", "BYTES", "OF ALL", "MEMORY", "LOG", "OBJECT", "ELSEWHERE")
    all_blocks = sum(server.contents.held.blocks for server in survey.servers)
    for server in survey.servers:
        if server.state in ("down", "older"):
            said = "does not answer" if server.state == "down" else "not listed"
            yield (server.name, server.version or "-", said, *"------")
            continue
        held = server.contents.held
        yield (
            server.name,
            server.version,
            f"{held.blocks:,}" + ("+" if server.state == "part" else ""),
            size(held.nbytes),
            percent(share(held.blocks, all_blocks)),
            *_fills(server),
            f"{server.contents.stray.blocks:,}",
        )


def _fills(server: Server) -> tuple[str, str, str]:
    """How full each tier is, in per cent of what it may have."""
    if server.figures is None:
        return "-", "-", "-"
    now = server.figures.now
    tiers = ((tier["bytes"], tier["capacity_bytes"]) if tier else None for tier in (now.log, now.object))
    fills = [(sum(now.memory_bytes.values()), now.memory_capacity), *tiers]
    told = ["none" if fill is None else f"{percent(share(*fill))} of {size(fill[1])}" for fill in fills]
    return told[0], told[1], told[2]


def _facts(survey: Survey) -> Iterator[str]:
    """A line for each thing that is so of all servers together."""
    if survey.sample > 1:
        yield (
            f"sample     1 block in {survey.sample} was looked at, {survey.rows:,} copies in all: figures of "
            "blocks are estimates"
        )
    copies = ", ".join(
        f"{amount.blocks:,} with {number or 'none'}"
        for number, amount in enumerate(survey.by_copies)
        if amount.blocks
    )
    judged = "as --copies says" if survey.wanted else "as most blocks have"
    yield f"copies     of {survey.blocks:,} blocks: {copies or 'no block'} (of {survey.copies}, {judged})"
    servers = survey.looked_at()
    if len(servers) > 1 and survey.segment_blocks:
        even, scatter = survey.even(), survey.scatter()
        worst = max(servers, key=lambda server: abs(server.contents.in_place - even))
        away = share(worst.contents.in_place - even, even)
        yield (
            f"balance    {worst.name} is farthest from an even share, by {100 * away:+.1f} %; hashing alone "
            f"gives {100 * share(scatter, even):.1f} % for {survey.segments:,} segments (standard deviation)"
        )
        yield f"segments   the largest one has {survey.largest_segment:,} blocks, on one server of each copy"
    unplaced = sum(server.contents.unplaced.blocks for server in survey.servers)
    if unplaced:
        yield f"unplaced   {unplaced:,} copies are too deep in prompts to say where clients look for them"


def _loss_rows(survey: Survey) -> Iterator[Sequence[str]]:
    yield ("SERVER", "GONE", "BYTES", "BACK WITH IT", "BYTES")

    def pair(amount: Amount) -> tuple[str, str]:
        return f"{amount.blocks:,}", size(amount.nbytes)

    for server in survey.servers:
        if server.state in ("whole", "part"):
            yield (server.name, *pair(server.contents.lost), *pair(server.contents.away))


def _namespace_rows(survey: Survey) -> Iterator[Sequence[str]]:
    yield ("MODEL", "TENANT", "NAMESPACE", "BLOCKS", "BYTES", "COPIES", "BYTES OF A BLOCK")
    largest = sorted(survey.namespaces, key=lambda one: (-one.copies.nbytes, one.id))
    for one in largest[:_MOST_NAMESPACES]:
        yield (
            _cut(one.model),
            _cut(one.tenant),
            one.id,
            f"{one.held.blocks:,}",
            size(one.held.nbytes),
            f"{one.copies.blocks:,}",
            f"{one.block_bytes:,}",
        )
    left = len(largest) - _MOST_NAMESPACES
    if left > 0:
        yield (f"and {left:,} more", *[""] * 6)


def _cut(name: str) -> str:
    """A name that fits."""
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def finding_lines(found: Iterable[Finding]) -> Iterator[str]:
    """Each finding: fact, cost, advice."""
    for number, finding in enumerate(found, 1):
        yield f"{number}. {finding.code}: {printable(finding.server)}"
        for what in ("fact", "cost", "advice"):
            yield f"   {what:<6}  {printable(getattr(finding, what))}"
