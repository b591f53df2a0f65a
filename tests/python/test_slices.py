"""Ranks of unequal heads and pages of unequal tokens, through the public face: every byte where it belongs,
grants that wait for all of their readers, and no more extents than the memory makes necessary."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

import kvik
from tests.python.peers import LIMIT, Peer, Pipe, engines, random_seed

LAYERS, CONTENT = 3, 64
PAGES = 24
TOKENS = 112
"""Seven pages of 16 tokens, or three and a half of 32."""

Transport = Literal["tcp", "local"]
TRANSPORTS: tuple[Transport, ...] = ("tcp", "local")
Start = Callable[..., kvik.Engine]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the ranks of one side divide heads and tokens."""

    ranks: int
    tokens: int

    def heads(self, rank: int, heads: int) -> range:
        """The heads of a rank: a share of them, or a copy of one where there are fewer heads than ranks."""
        if self.ranks > heads:
            return range(rank * heads // self.ranks, rank * heads // self.ranks + 1)
        each = heads // self.ranks
        return range(rank * each, (rank + 1) * each)


class Rank:
    """One rank's KV-cache: pages of [heads][tokens][content], and the pages of one prompt in it."""

    def __init__(self, engine: kvik.Engine, tokens: int, heads: range, pages: list[int]) -> None:
        self.engine, self.tokens, self.heads, self.pages = engine, tokens, heads, pages
        self.memory = np.zeros((LAYERS, PAGES, len(heads), tokens, CONTENT), np.uint8)
        run = tokens * CONTENT
        self.layout = kvik.Layout(PAGES, run, layers=LAYERS, slices=len(heads))
        self.region = engine.register(self.memory.reshape(-1))

    def prompt(self) -> npt.NDArray[np.uint8]:
        """The prompt's KV as [layers][tokens][heads][content]."""
        pages = self.memory[:, self.pages].transpose(0, 1, 3, 2, 4)
        return pages.reshape(LAYERS, -1, len(self.heads), CONTENT)[:, :TOKENS]

    def compute(self, prompt: npt.NDArray[np.uint8]) -> None:
        """Put the prompt's KV into its pages."""
        for token in range(TOKENS):
            page, at = self.pages[token // self.tokens], token % self.tokens
            self.memory[:, page, :, at] = prompt[:, token, self.heads.start : self.heads.stop]

    def ids(self, unit: int) -> list[int]:
        """The prompt's groups of `unit` tokens, as ids of parts of pages."""
        parts = self.tokens // unit
        return [self.pages[group // parts] * parts + group % parts for group in range(TOKENS // unit)]

    def slices(self, heads: range) -> tuple[int, int]:
        """Heads as slices of this rank."""
        return heads.start - self.heads.start, heads.stop - self.heads.start

    def grant(self, **options: Any) -> kvik.Grant:
        """A grant of the whole prompt."""
        return self.engine.grant(self.region.pages(self.layout, self.pages), **options)

    def read(self, owner: "Rank", ticket: kvik.Ticket | str, **options: Any) -> kvik.Report:
        """Read the heads that both have."""
        heads = range(max(self.heads.start, owner.heads.start), min(self.heads.stop, owner.heads.stop))
        unit = min(self.tokens, owner.tokens)
        local = self.region.pages(
            self.layout, self.ids(unit), slices=self.slices(heads), parts=self.tokens // unit
        )
        transfer = self.engine.read(
            local,
            ticket,
            range(TOKENS // unit),
            remote_slices=owner.slices(heads),
            remote_parts=owner.tokens // unit,
            **options,
        )
        return transfer.wait(LIMIT)


def shares(owner: Rank, reader: Rank) -> bool:
    """Whether the two have heads in common."""
    return reader.heads.start < owner.heads.stop and owner.heads.start < reader.heads.stop


def side(start: Start, split: Split, heads: int, first: int, step: int) -> list[Rank]:
    """The ranks of one side, with the prompt in every `step`-th page from `first` on."""
    count = -(-TOKENS // split.tokens)
    pages = list(range(first, first + count * step, step))
    return [Rank(start(), split.tokens, split.heads(rank, heads), pages) for rank in range(split.ranks)]


def hand_over(
    start: Start, here: Split, there: Split, heads: int, transport: Transport, step: int = 1
) -> list[kvik.Report]:
    """One prompt from the ranks of `there` to those of `here`; checks bytes and the ends of the grants."""
    prompt = np.random.default_rng(random_seed()).integers(1, 256, (LAYERS, TOKENS, heads, CONTENT), np.uint8)
    owners, readers = side(start, there, heads, 1, step), side(start, here, heads, 2, step)
    reports = []
    for owner in owners:
        owner.compute(prompt)
        # Where ranks have copies, each reader takes the first that has its heads.
        mine = [reader for reader in readers if next(o for o in owners if shares(o, reader)) is owner]
        if there.ranks <= heads:
            mine = [reader for reader in readers if shares(owner, reader)]
        grant = owner.grant()
        for reader in mine:
            assert grant.state == "live"
            reports.append(reader.read(owner, grant.ticket, readers=len(mine), transport=transport))
        if mine:
            assert grant.wait(LIMIT) == "consumed"
        else:
            grant.revoke()
    for reader in readers:
        assert (reader.prompt() == prompt[:, :, reader.heads.start : reader.heads.stop]).all()
        written = np.count_nonzero(reader.memory)
        assert written == LAYERS * TOKENS * len(reader.heads) * CONTENT, "bytes beside the prompt"
    return reports


SCHEMES = {
    "TP 4 to 2": (Split(4, 16), Split(2, 16), 8),
    "TP 2 to 4": (Split(2, 16), Split(4, 16), 8),
    "TP 4 to 8, 4 heads": (Split(4, 16), Split(8, 16), 4),
    "MLA, TP 2 to 4": (Split(2, 16), Split(4, 16), 1),
    "16 to 32 tokens": (Split(1, 16), Split(1, 32), 4),
    "32 to 16 tokens": (Split(1, 32), Split(1, 16), 4),
    "MLA, 16 to 64 tokens": (Split(1, 16), Split(1, 64), 1),
    "TP 2 to 4, 32 to 16 tokens": (Split(2, 32), Split(4, 16), 8),
    "TP 4 to 1, 16 to 48 tokens": (Split(4, 16), Split(1, 48), 8),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_unequal_ranks_hand_over(name: str, transport: Transport) -> None:
    there, here, heads = SCHEMES[name]
    with engines() as start:
        reports = hand_over(start, here, there, heads, transport)
    assert {report.transport for report in reports} == {transport}


@pytest.mark.parametrize(("there", "here"), [(16, 32), (32, 16), (16, 16)])
def test_an_engine_hands_over_to_itself(there: int, here: int) -> None:
    seed = random_seed()
    with engines() as start:
        engine = start()
        prompt = np.random.default_rng(seed).integers(1, 256, (LAYERS, TOKENS, 4, CONTENT), np.uint8)
        owner = Rank(engine, there, range(4), list(range(3, 10)))
        owner.pages = owner.pages[: -(-TOKENS // there)]
        reader = Rank(engine, here, range(1, 3), [5, 2, 7, 11, 0, 1, 20][: -(-TOKENS // here)])
        owner.compute(prompt)
        grant = owner.grant()
        assert reader.read(owner, grant.ticket).transport == "self"
        assert grant.wait(LIMIT) == "consumed"
        assert (reader.prompt() == prompt[:, :, 1:3]).all()


def naive(here: Split, there: Split, heads: int) -> int:
    """Extents of one reader where each head of each group of tokens in each layer is one."""
    unit = min(here.tokens, there.tokens)
    return LAYERS * (TOKENS // unit) * len(here.heads(0, heads))


def expected(here: Split, there: Split, heads: int, transport: Transport, scattered: bool) -> int:
    """What the arithmetic of the layouts says of all the reads of one reader together.

    All of a page's heads lie side by side, and pages with consecutive ids too; so do some of the heads, which
    end before the next page begins. A part of a page is a piece of each of its heads, and only the last piece
    of a page touches the next page. Over tcp only this side is counted; a copy within the host needs runs of
    both.
    """
    mine, theirs = len(here.heads(0, heads)), len(there.heads(0, heads))
    shared, unit = min(mine, theirs), min(here.tokens, there.tokens)
    groups, reads = TOKENS // unit, mine // shared

    def runs(split: Split, own: int) -> set[int]:
        """Groups after which a run of one side ends, and in each of them every head where they are apart."""
        parts = split.tokens // unit
        joined = shared == own and not scattered
        last_of_page = {group for group in range(groups) if (group + 1) % parts == 0}
        ends = {groups - 1} if joined else {groups - 1} | last_of_page
        last = {(group + 1) * shared - 1 for group in ends}
        if parts == 1 or shared == 1:
            return last
        pages = {(group + 1) * shared - 1 for group in last_of_page}
        return (set(range(groups * shared)) - pages) | last

    ends = runs(here, mine)
    if transport == "local":
        ends |= runs(there, theirs)
    return LAYERS * len(ends) * reads


def test_extents_are_as_few_as_the_memory_allows() -> None:
    print(f"\n{'scheme':28} {'ids':12} {'transport':9} {'pages':>5} {'naive':>6} {'planned':>8} {'ratio':>6}")
    ratios = {}
    for (name, (there, here, heads)), step, transport in itertools.product(
        SCHEMES.items(), (1, 2), TRANSPORTS
    ):
        with engines() as start:
            reports = hand_over(start, here, there, heads, transport, step)
        # Each reader needs as many as the first.
        planned = sum(report.extents for report in reports) // here.ranks
        count, pages = naive(here, there, heads), -(-TOKENS // here.tokens)
        ids = "consecutive" if step == 1 else "scattered"
        print(f"{name:28} {ids:12} {transport:9} {pages:5} {count:6} {planned:8} {planned / count:6.2f}")
        assert planned == expected(here, there, heads, transport, step > 1), (name, ids, transport)
        ratios[name, ids, transport] = planned / count
    # One extent a layer and page for all heads of a page or for a half of them; a run of pages is one.
    assert ratios["TP 2 to 4", "scattered", "tcp"] == 1 / 2
    assert ratios["TP 2 to 4", "consecutive", "tcp"] == 1 / (2 * 7)
    assert ratios["TP 2 to 4", "consecutive", "local"] == 1 / 2
    assert ratios["TP 4 to 2", "consecutive", "local"] == 1 / 2
    assert ratios["MLA, 16 to 64 tokens", "consecutive", "local"] == 1 / 7
    # A head of a large page is two runs of small ones, however the copy is planned.
    assert ratios["16 to 32 tokens", "scattered", "local"] == 1


def reader_that_stays(pipe: Pipe, *, transport: str) -> None:
    """A reader of two that has read by the ticket that it is told, and not confirmed, until it is killed."""
    with kvik.Engine() as engine:
        rank = Rank(engine, 16, range(2, 4), list(range(7)))
        owner = Rank(engine, 16, range(4), list(range(7)))
        pipe.say(up=True)
        rank.read(owner, pipe.hear()["ticket"], readers=2, confirm=False, transport=transport)
        pipe.say(read=True)
        pipe.hear()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_grant_whose_second_reader_was_killed_ends_by_its_expiry(transport: Transport) -> None:
    with engines() as start:
        owner = Rank(start(), 16, range(4), list(range(7)))
        reader = Rank(start(), 16, range(2), list(range(7)))
        owner.compute(np.full((LAYERS, TOKENS, 4, CONTENT), 7, np.uint8))
        with Peer(reader_that_stays, transport=transport) as other:
            assert other.hear()["up"]  # what a start takes is none of the grant's time
            grant = owner.grant(expiry=6.0)
            assert other.ask(ticket=str(grant.ticket))["read"]
            other.process.kill()
            other.end()
        reader.read(owner, grant.ticket, readers=2, transport=transport)
        # Nor can the one that is left end it by saying that it was alone.
        reader.engine.release(grant.ticket).wait(LIMIT)
        assert grant.state == "live"
        assert grant.wait(LIMIT) == "expired"


def test_a_release_of_two_readers_takes_both() -> None:
    with engines() as start:
        owner, one, two = start(), start(), start()
        grant = Rank(owner, 16, range(1), [0]).grant()
        one.release(grant.ticket, readers=2).wait(LIMIT)
        one.release(grant.ticket, readers=2).wait(LIMIT)
        assert grant.state == "live"
        two.release(grant.ticket, readers=2).wait(LIMIT)
        assert grant.wait(LIMIT) == "consumed"
        lone = Rank(owner, 16, range(1), [0]).grant()
        one.release(lone.ticket).wait(LIMIT)
        assert lone.wait(LIMIT) == "consumed"


def test_a_page_set_of_parts_names_parts() -> None:
    with engines() as start:
        region = start().register(np.zeros(4 * 96, np.uint8))
        layout = kvik.Layout(4, 48, slices=2)
        parts = region.pages(layout, [0, 7, 11], parts=3)
        assert (len(parts), parts.nbytes) == (3, 3 * 2 * 16)
        with pytest.raises(kvik.PageOutOfRange, match="part 0 of 3 of page 4"):
            region.pages(layout, [0, 12], parts=3)
        for wrong in (0, 5, 257, 2**40, -1):
            with pytest.raises(kvik.InvalidArgument):
                region.pages(layout, [0], parts=wrong)
        with pytest.raises(TypeError):
            region.pages(layout, [0], parts=1.5)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused_by_name() -> None:
    with engines() as start:
        owner = Rank(start(), 32, range(4), [0, 1, 2, 3])
        reader = Rank(start(), 16, range(4), list(range(7)))
        pages = owner.region.pages(owner.layout, [1, 2], layers=(1, 3), slices=(1, 3))
        grant = owner.engine.grant(pages, use="many")
        fitting = reader.region.pages(reader.layout, range(4), layers=(0, 2), slices=(0, 2))
        good: dict[str, Any] = {"remote_parts": 2}
        wrong: list[tuple[dict[str, Any], type[kvik.KvikError]]] = [
            ({"remote_layers": (0, 2)}, kvik.PageNotGranted),
            ({"remote_slices": (2, 4)}, kvik.PageNotGranted),
            ({"remote_slices": (2, 2)}, kvik.InvalidArgument),
            ({"remote_parts": 0}, kvik.InvalidArgument),
            ({"remote_parts": 5}, kvik.InvalidArgument),
            ({"remote_parts": 2**20}, kvik.InvalidArgument),
            ({"readers": 0}, kvik.InvalidArgument),
            ({"readers": 4097}, kvik.InvalidArgument),
            ({"readers": -1}, kvik.InvalidArgument),
            ({"readers": 2**20}, kvik.InvalidArgument),
            ({"remote_parts": None}, kvik.ShapeMismatch),
            ({"remote_slices": (1, 2)}, kvik.ShapeMismatch),
            ({"positions": [0, 1, 2, 4]}, kvik.PageNotGranted),
        ]
        for options, error in wrong:
            with pytest.raises(error):
                reader.engine.read(fitting, grant.ticket, **{**good, **options}).wait(LIMIT)
        twice = reader.region.pages(reader.layout, [0, 3, 3, 1], layers=(0, 2), slices=(0, 2))
        with pytest.raises(kvik.DuplicatePage):
            reader.engine.read(twice, grant.ticket, **good)
        with pytest.raises(kvik.InvalidArgument):
            reader.engine.release(grant.ticket, readers=0)
        reader.engine.read(fitting, grant.ticket, **good).wait(LIMIT)
