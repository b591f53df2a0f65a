"""`await transfer`."""

import asyncio
import contextlib
from pathlib import Path

import pytest

import kvik
from tests.python.peers import LIMIT, empty, engines, never_issued, owned, until


def watched() -> int:
    """How many eventfds this process has: what an await opens. Links open other ones as they like."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was read
            count += fd.readlink().name == "anon_inode:[eventfd]"
    return count


async def test_await_gives_the_report() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        report = await here.read(target.of(), there.grant(source.of()).ticket)
        assert report.bytes == target.memory.size
        assert (target.memory == source.memory).all()


async def test_await_of_an_ended_transfer_and_again() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        transfer = here.read(target.of(), there.grant(source.of()).ticket)
        transfer.wait(LIMIT)
        assert await transfer == await transfer


async def test_await_raises_the_error() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        ticket = never_issued(there, target.layout)
        here.explain(ticket)  # they are connected: what follows is the end of a transfer that has begun
        with pytest.raises((kvik.DeadlineExceeded, kvik.GrantUnknown)):
            await here.read(target.of(), ticket, deadline=0.2)


async def test_the_loop_runs_while_a_transfer_is_awaited() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        late = never_issued(there, source.layout)
        waiting = asyncio.ensure_future(here.read(target.of(), late, deadline=LIMIT))
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        there.grant(source.of(), grant_id=late.grant_id)
        assert (await asyncio.wait_for(waiting, LIMIT)).pages == 8


async def test_cancelling_the_task_cancels_the_transfer() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        transfer = here.read(target.of(), never_issued(there, target.layout))

        async def waits() -> None:
            await transfer

        task = asyncio.create_task(waits())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
        assert transfer.done, "a cancelled task may use its memory again"
        assert isinstance(transfer.error(), kvik.Cancelled)
        target.region.close()


async def test_a_timeout_of_asyncio_ends_the_transfer() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        transfer = here.read(target.of(), never_issued(there, target.layout))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transfer
        assert transfer.done


async def test_many_await_at_once_and_every_descriptor_is_closed() -> None:
    with engines() as start:
        here, there = start(), start()
        source = owned(there)
        grant = there.grant(source.of(), use="many")
        await here.read(empty(here).of(), grant.ticket)
        before = watched()
        targets = [empty(here) for _ in range(100)]
        transfers = [here.read(target.of(), grant.ticket) for target in targets]
        late = never_issued(there, source.layout)
        stalled = [here.read(empty(here).of(), late, deadline=0.3) for _ in range(50)]
        ended = await asyncio.gather(*transfers, *stalled, *transfers, return_exceptions=True)
        assert sum(isinstance(one, kvik.Report) for one in ended) == 200
        assert sum(isinstance(one, kvik.KvikError) for one in ended) == 50
        assert all((target.memory == source.memory).all() for target in targets)
        assert until(lambda: watched() <= before)


async def test_two_tasks_await_one_transfer() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        late = never_issued(there, source.layout)
        transfer = here.read(target.of(), late, deadline=LIMIT)

        async def waits() -> kvik.Report:
            return await transfer

        tasks = [asyncio.create_task(waits()) for _ in range(2)]
        await asyncio.sleep(0.05)
        there.grant(source.of(), grant_id=late.grant_id)
        first, second = await asyncio.wait_for(asyncio.gather(*tasks), LIMIT)
        assert first == second


def test_a_loop_that_ends_first_leaves_no_descriptor() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        here.read(target.of(), there.grant(owned(there).of()).ticket).wait(LIMIT)  # the link is up
        transfer = here.read(target.of(), never_issued(there, target.layout))
        asyncio.run(asyncio.sleep(0))
        before = watched()

        async def abandons() -> None:
            task = asyncio.ensure_future(transfer)
            await asyncio.sleep(0.05)
            assert not task.done()

        asyncio.run(abandons())
        assert transfer.done
        assert until(lambda: watched() <= before)
