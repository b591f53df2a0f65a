"""The CUDA driver of this machine, as the tests of GPU pages use it. It takes no toolkit: the one kernel is a
text in the driver's own assembly language (PTX), which the driver translates."""

import ctypes
import time
from typing import Any, NamedTuple

import numpy as np

from tests.python.gpu import Array, Cuda
from tests.python.peers import Bytes

# Waits until `nanos` have passed or, where `word` is not null, what is there is at least `wanted`.
HOLD = b"""
.version 6.0
.target sm_70
.address_size 64

.visible .entry hold(.param .u64 word, .param .u32 wanted, .param .u64 nanos)
{
    .reg .pred %p<4>;
    .reg .b32 %r<3>;
    .reg .b64 %d<6>;
    ld.param.u64 %d1, [word];
    ld.param.u32 %r1, [wanted];
    ld.param.u64 %d2, [nanos];
    mov.u64 %d3, %globaltimer;
    setp.eq.u64 %p1, %d1, 0;
look:
    @%p1 bra until;
    ld.volatile.u32 %r2, [%d1];
    setp.ge.u32 %p2, %r2, %r1;
    @%p2 bra done;
until:
    mov.u64 %d4, %globaltimer;
    sub.u64 %d5, %d4, %d3;
    setp.lt.u64 %p3, %d5, %d2;
    @%p3 bra look;
done:
    ret;
}
"""
STALL = 20.0  # seconds, after which streams go on by themselves: a test that fails leaves no device busy
ROOM = 4 << 20  # bytes that come or go in one copy
NON_BLOCKING = 1  # of a stream: it waits for no other one
PORTABLE = 1  # of page-locked memory: it is so for all devices


class OnDevice(NamedTuple):
    """What the tests have on a device: a stream that waits for no other, and the kernel."""

    stream: ctypes.c_void_p
    hold: ctypes.c_void_p


class Driver(Cuda):
    """This machine's driver.

    Bytes are looked at and set by copies of a stream of their own, which waits for no other.
    """

    def __init__(self) -> None:
        self._streams: list[int] = []
        self._stalled, self._since = 0, 0.0
        self._devices: dict[int, OnDevice] = {}
        super().__init__("libcuda.so.1")
        self._room, word = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(self._room), ctypes.c_size_t(ROOM), PORTABLE)
        self.call("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(4), PORTABLE)
        assert word.value
        self._word = ctypes.c_uint32.from_address(word.value)
        self._word.value = 0

    def use(self, device: int) -> None:
        """As of `Cuda`."""
        super().use(device)
        if device not in self._devices:
            self._devices[device] = self._prepare()
        self._here = self._devices[device]

    def _prepare(self) -> OnDevice:
        module, hold, own, at = (ctypes.c_void_p() for _ in range(4))
        self.call("cuModuleLoadData", ctypes.byref(module), HOLD)
        self.call("cuModuleGetFunction", ctypes.byref(hold), module, b"hold")
        self.call("cuStreamCreate", ctypes.byref(own), NON_BLOCKING)
        here = self._here = OnDevice(own, hold)
        # The first launch of a kernel may wait for other streams while the driver brings it to the device.
        self._launch(own, wanted=None, seconds=0.0)
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(1))
        self.call("cuMemsetD8Async", at, 0, ctypes.c_size_t(1), own)
        self.call("cuStreamSynchronize", own)
        self.call("cuMemFree_v2", at)
        return here

    def array(self, count: int, **changes: Any) -> Array:
        """As of `Cuda`: the driver may give memory out as it came back."""
        array = super().array(count, **changes)
        array.now = np.zeros(count, np.uint8)
        return array

    def stream(self) -> int:
        """As of `Cuda`."""
        stream = super().stream()
        self._streams.append(stream)
        return stream

    def say(self, command: str) -> None:
        """As of `Cuda`."""
        if command == "stall":
            self._stalled, self._since = self._stalled + 1, time.monotonic()
            for stream in self._streams:
                self._launch(ctypes.c_void_p(stream), self._stalled, STALL)
        elif command == "release":
            self._word.value = self._stalled
            assert time.monotonic() - self._since < STALL, "the streams were not held so long: they went on"
        else:
            assert command.startswith("delay "), f"no real driver does as it is told: {command}"

    def peek(self, at: int, into: Bytes) -> None:
        """As of `Cuda`."""
        assert into.flags.c_contiguous
        for first in range(0, into.size, ROOM):
            count = min(ROOM, into.size - first)
            self._copy("cuMemcpyDtoHAsync_v2", self._room, ctypes.c_uint64(at + first), count)
            ctypes.memmove(into.ctypes.data + first, self._room, count)

    def poke(self, at: int, given: Bytes) -> None:
        """As of `Cuda`."""
        assert given.flags.c_contiguous
        for first in range(0, given.size, ROOM):
            count = min(ROOM, given.size - first)
            ctypes.memmove(self._room, given.ctypes.data + first, count)
            self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(at + first), self._room, count)

    def fill(self, stream: int, at: int, count: int, value: int, micros: int) -> None:
        """As of `Cuda`."""
        if micros:
            self._launch(ctypes.c_void_p(stream), wanted=None, seconds=micros / 1e6)
        size = ctypes.c_size_t(count)
        self.call("cuMemsetD8Async", ctypes.c_uint64(at), value, size, ctypes.c_void_p(stream))

    def _copy(self, name: str, to: Any, source: Any, count: int) -> None:
        self.call(name, to, source, ctypes.c_size_t(count), self._here.stream)
        self.call("cuStreamSynchronize", self._here.stream)

    def _launch(self, stream: ctypes.c_void_p, wanted: int | None, seconds: float) -> None:
        """Hold a stream for so long, or until the word has the value that is wanted."""
        word = 0 if wanted is None else ctypes.addressof(self._word)
        given = (ctypes.c_uint64(word), ctypes.c_uint32(wanted or 0), ctypes.c_uint64(int(seconds * 1e9)))
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        self.call("cuLaunchKernel", self._here.hold, 1, 1, 1, 1, 1, 1, 0, stream, pointers, None)
