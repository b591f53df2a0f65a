"""`Engine.read_all`: several reads as one."""

import asyncio
import gc
import os
import select

import numpy as np
import pytest

import kvik
from tests.python.peers import (
    LIMIT,
    Pages,
    Peer,
    empty,
    engines,
    never_issued,
    owned,
    owner,
    random_bytes,
)

PAGES = 8


def reads_of(target: Pages, tickets: list[kvik.Ticket]) -> list[kvik.Read]:
    """Reads of whole grants of `PAGES` pages, one after the other."""
    return [
        kvik.Read(target.of(range(part * PAGES, (part + 1) * PAGES)), ticket, range(PAGES))
        for part, ticket in enumerate(tickets)
    ]


def test_all_come_as_one() -> None:
    with engines() as start:
        here, owners = start(), [start(), start(transport="tcp")]
        sources = [owned(engine, seed=seed) for seed, engine in enumerate(owners, 1)]
        target = empty(here, 2 * PAGES)
        grants = [engine.grant(source.of()) for engine, source in zip(owners, sources, strict=True)]
        wanted = reads_of(target, [grant.ticket for grant in grants])
        assert wanted[1].ticket == grants[1].ticket
        assert len(wanted[1].local) == PAGES
        reads = here.read_all(wanted, tag="some request")
        assert (reads.engine, reads.reads) == (here, tuple(wanted))
        report = reads.wait(LIMIT)
        assert report == reads.report()
        assert report.bytes == target.memory.size == sum(one.bytes for one in report.reads)
        assert [one.transport for one in report.reads] == ["local", "tcp"]
        assert max(one.total_s for one in report.reads) <= report.total_s
        assert reads.done
        assert reads.error() is None
        assert reads.outcomes() == list(report.reads)
        assert (target.memory == np.concatenate([source.memory for source in sources])).all()
        assert [grant.wait(LIMIT) for grant in grants] == ["consumed", "consumed"]
        assert repr(reads) == f"<kvik.JointRead of 2 done: {report.bytes} bytes>"


def test_what_a_read_takes_counts_for_that_read() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here, 2 * PAGES)
        chain, part = random_bytes(32 * PAGES, 7).tobytes(), b"part"
        content = kvik.Content(chain, part)
        kept, grant = (there.grant(source.of(), content=content) for _ in range(2))
        first, last = target.of(range(3)), target.of(range(3, PAGES))
        report = here.read_all(
            [
                kvik.Read(first, kept.ticket, (0, 3), confirm=False, readers=1, content=content),
                kvik.Read(last, str(grant.ticket), [3, 4, 5, 6, 7], content=content),
            ]
        ).wait(LIMIT)
        assert [one.pages for one in report.reads] == [3, 5]
        assert (target.rows[:PAGES] == source.rows).all()
        assert (grant.wait(LIMIT), kept.state) == ("consumed", "live")
        again = here.read_all([kvik.Read(first, there.grant(source.of(), content=content).ticket, (0, 3))])
        with pytest.raises(kvik.ContentRequired):
            again.wait(LIMIT)


def test_the_first_failure_ends_the_others_and_says_which_it_was() -> None:
    with engines() as start:
        here, there = start(), start()
        target, source = empty(here, 3 * PAGES), owned(there)
        revoked = there.grant(source.of())
        revoked.revoke()
        late = [never_issued(there, source.layout) for _ in range(2)]
        reads = here.read_all(reads_of(target, [late[0], revoked.ticket, late[1]]), deadline=10 * LIMIT)
        with pytest.raises(kvik.GrantRevoked, match=r"reads\[1\] of 3 \(from engine ") as raised:
            reads.wait(LIMIT)
        error = raised.value
        assert (error.read, error.peer, error.grant) == (1, there.id, revoked.id)
        outcomes = reads.outcomes()
        assert outcomes is not None
        assert [type(one) for one in outcomes] == [kvik.Cancelled, kvik.GrantRevoked, kvik.Cancelled]
        assert (reads.report(), type(reads.error())) == (None, kvik.GrantRevoked)
        assert repr(reads) == "<kvik.JointRead of 3 failed: grant_revoked>"
        for ticket in late:
            there.grant(source.of(), grant_id=ticket.grant_id)
        here.read(empty(here).of(), late[0]).wait(LIMIT)
        assert not target.memory.any()


def test_a_killed_owner_ends_the_reads_from_the_others() -> None:
    with engines() as start, Peer(owner) as peer:
        here, there = start(), start()
        heard = peer.hear()
        target = empty(here, 2 * PAGES)
        dead = kvik.Ticket(heard["ticket"]).with_grant(os.urandom(16).hex(), 60.0)
        reads = here.read_all(reads_of(target, [never_issued(there, target.layout), dead]), deadline=LIMIT)
        assert not reads.done
        peer.process.kill()
        with pytest.raises(kvik.KvikError) as raised:
            reads.wait(LIMIT)
        assert isinstance(raised.value, (kvik.PeerLost, kvik.PeerUnreachable))
        assert (raised.value.read, raised.value.peer) == (1, heard["id"])
        target.region.close()


def test_they_end_by_one_deadline_and_by_cancelling() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here, 2 * PAGES)
        late = [never_issued(there, target.layout) for _ in range(2)]
        with pytest.raises((kvik.DeadlineExceeded, kvik.GrantUnknown)) as raised:
            here.read_all(reads_of(target, late), deadline=0.2).wait(LIMIT)
        assert raised.value.read in (0, 1)
        reads = here.read_all(reads_of(target, late), deadline=10 * LIMIT)
        with pytest.raises(kvik.WaitTimeout):
            reads.wait(0.01)
        assert (reads.done, reads.error(), reads.outcomes()) == (False, None, None)
        reads.cancel()
        with pytest.raises(kvik.Cancelled) as cancelled:
            reads.wait(LIMIT)
        assert cancelled.value.read is None
        target.region.close()


def test_what_is_refused_at_once_begins_none() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here, 2 * PAGES)
        grant = there.grant(source.of())
        good = kvik.Read(target.of(range(PAGES)), grant.ticket)
        twice = kvik.Read(target.of([1] * PAGES), grant.ticket)
        with pytest.raises(kvik.DuplicatePage, match=r"^reads\[1\] of 2: ") as raised:
            here.read_all([good, twice])
        assert raised.value.read == 1
        with pytest.raises(kvik.TicketInvalid):
            kvik.Read(target.of(), "nonsense")
        fixed = here.register(bytes(target.memory.size)).pages(target.layout, range(PAGES))
        with pytest.raises(kvik.BufferInvalid):
            kvik.Read(fixed, grant.ticket)
        with pytest.raises(TypeError):
            kvik.Read(target.of(), grant.ticket, deadline=1.0)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            here.read_all([(target.of(), grant.ticket)])  # type: ignore[list-item]
        assert here.stats()["transfers_open"] == 0
        assert not here.peers()
        assert here.read_all([]).wait(LIMIT) == kvik.JointReport(0, pytest.approx(0, abs=1), ())  # type: ignore[arg-type]
        here.read_all([good]).wait(LIMIT)
        assert (target.rows[:PAGES] == source.rows).all()


async def test_await_gives_the_report_and_cancelling_the_task_cancels_all() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here, 2 * PAGES)
        late = [never_issued(there, source.layout) for _ in range(2)]
        reads = here.read_all(reads_of(target, late), deadline=10 * LIMIT)
        waiting = asyncio.ensure_future(reads)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        there.grant(source.of(), grant_id=late[0].grant_id)
        there.grant(source.of(), grant_id=late[1].grant_id)
        assert (await asyncio.wait_for(waiting, LIMIT)).bytes == target.memory.size
        stalled = here.read_all(reads_of(target, [never_issued(there, source.layout)] * 2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stalled
        assert stalled.done, "a cancelled task may use its memory again"
        target.region.close()


def test_the_caller_is_woken_once_when_the_last_has_ended() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here, 3 * PAGES)
        late = [never_issued(there, source.layout) for _ in range(3)]
        reads = here.read_all(reads_of(target, late), deadline=10 * LIMIT)
        fd = reads.done_fd()
        try:
            for ticket in late:
                assert not select.select([fd], [], [], 0.05)[0]
                there.grant(source.of(), grant_id=ticket.grant_id)
            assert select.select([fd], [], [], LIMIT)[0]
            assert os.read(fd, 8) == (1).to_bytes(8, "little")
        finally:
            os.close(fd)
        assert reads.done


def test_memory_stays_while_nobody_refers_to_the_reads() -> None:
    with engines() as start:
        here, there = start(), start()
        source = owned(there)
        buffer = np.zeros(2 * PAGES * 4096, np.uint8)
        late = [never_issued(there, source.layout) for _ in range(2)]
        region = here.register(buffer)
        layout = kvik.Layout(2 * PAGES, 4096)
        wanted = [
            kvik.Read(region.pages(layout, range(part * PAGES, (part + 1) * PAGES)), ticket)
            for part, ticket in enumerate(late)
        ]
        here.read_all(wanted, deadline=10 * LIMIT)
        del wanted, region
        gc.collect()
        grants = [there.grant(source.of(), grant_id=ticket.grant_id) for ticket in late]
        assert [grant.wait(LIMIT) for grant in grants] == ["consumed", "consumed"]
        assert (buffer.reshape(2, -1) == source.memory).all()
