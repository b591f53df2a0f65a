"""An alarm that is exact to tens of microseconds.

An event loop waits in whole milliseconds (epoll's unit), and asyncio rounds up: a request that is due would
go out up to one late. A timer of the kernel is a descriptor that becomes readable when the time has come.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

_CLOCK_MONOTONIC, _ABSTIME = 1, 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC


class _Itimerspec(ctypes.Structure):
    """`struct itimerspec` of timerfd_settime(2): interval, then value; each seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """One timer; one waits at a time. Times are nanoseconds of `time.monotonic_ns`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"no timer: {os.strerror(code)}")
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._rings)

    async def until(self, when: int) -> None:
        """Return at `when`, or at once if it has passed."""
        if when <= time.monotonic_ns():
            return
        spec = _Itimerspec(0, 0, when // 1_000_000_000, when % 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _ABSTIME, ctypes.byref(spec), None) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the timer was not set: {os.strerror(code)}")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _rings(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Give the timer back."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
