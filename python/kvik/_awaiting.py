"""`await` for transfers, reads, warm-ups and notices, `async for` for events: what is native, in asyncio.

The native module gives a descriptor (an eventfd) that becomes readable when what is awaited is there. The
loop watches it as it watches sockets, so a waiting task costs neither a thread nor a poll. Each await has
its own descriptor: several tasks may wait for the same.
"""

import asyncio
import os
from typing import TYPE_CHECKING, overload

from kvik._events import Event
from kvik._report import JointReport, Report, WarmUpReport

if TYPE_CHECKING:
    from kvik._native import Events, JointRead, Notice, Transfer, WarmUp


@overload
async def result_of(transfer: "Transfer") -> Report: ...
@overload
async def result_of(transfer: "JointRead") -> JointReport: ...
async def result_of(transfer: "Transfer | JointRead") -> Report | JointReport:
    """The report of the transfer, or its error. Cancelling the task cancels the transfer."""
    if not transfer.done:
        await _end_of(transfer)
    # At most the time between the event and the result: the transfer has ended.
    return transfer.wait()


async def warm_up_report_of(warm_up: "WarmUp") -> WarmUpReport:
    """What the warm-up found and made, or its error. Cancelling the task ends the warm-up."""
    if not warm_up.done:
        await _end_of(warm_up)
    return warm_up.wait()


async def _end_of(transfer: "Transfer | JointRead | WarmUp") -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    fd = transfer.done_fd()
    try:
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            transfer.cancel()
            # Only an ended transfer leaves the caller's memory alone, so the task learns of its own end after
            # it. A second cancellation does not wait; the transfer still ends by itself.
            await ended.wait()
            raise
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)


async def taken(notice: "Notice") -> None:
    """The end of the notification, or its error. Cancelling the task does not recall what was sent."""
    if not notice.done:
        await _readable(notice.done_fd())
    notice.wait()


async def next_event(events: "Events") -> Event:
    """The next event, or the end of the iteration."""
    while (event := events.poll()) is None:
        if events.closed:
            raise StopAsyncIteration
        await _readable(events.fd())
    return event


async def _readable(fd: int) -> None:
    """Wait for the descriptor, and close it."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)
