"""Memory that a side registers and the watcher sees as well, whatever becomes of the side.

A sheet is a memfd of the watcher that a side maps (for kvik: memory of the caller's, which a peer on this
host reads through the kernel), or memory that kvik allocated, which the watcher opens through the side's
descriptor.

Who wrote a byte can be told from its value: what a transfer moves, what a destination holds before it, what
its owner puts there afterwards, and what the source's owner puts into the source afterwards are apart.
"""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BLANK = 0x7F  # a destination before its transfer
REFILL = 0xF7  # a destination whose owner was told that it is free
ZERO = 0x00  # what fills up a chunk that its sender gave up
MARK = bytes(range(0x80, 0xA0))  # is in what a source holds after its owner was told that it is free
MARK_EVERY = 1024  # bytes
_OLD, _NEW = 0x3F, 0x80  # what is moved is 1 to 0x40; what comes into a free source 0x80 to 0xBF

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


def old(nbytes: int, seed: int) -> Bytes:
    """What a transfer is to move: known from the seed, and never a value that is used for anything else."""
    made: Bytes = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8) & np.uint8(_OLD)
    made += np.uint8(1)
    return made


def new(nbytes: int, seed: int) -> Bytes:
    """What a source holds once it is its owner's again."""
    made: Bytes = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8) & np.uint8(_OLD)
    made |= np.uint8(_NEW)
    for at in range(0, nbytes - len(MARK) + 1, MARK_EVERY):
        made[at : at + len(MARK)] = np.frombuffer(MARK, np.uint8)
    return made


def shuffled(pages: int, order: int) -> npt.NDArray[np.uint32]:
    """Page ids in an order that the number gives; 0 leaves them as they are."""
    ids = np.arange(pages, dtype=np.uint32)
    return np.random.default_rng(order).permutation(ids) if order else ids


def expected(content: Bytes, page_bytes: int, op: str, order: int) -> Bytes:
    """What the destination holds after a transfer whose initiator shuffled its own pages."""
    rows = content.reshape(-1, page_bytes)
    ids = shuffled(len(rows), order)
    if op == "write":
        return rows[ids].reshape(-1)
    there = np.empty_like(rows)
    there[ids] = rows
    return there.reshape(-1)


def placed(view: Bytes) -> int:
    """Bytes of a destination that something was written to since it was blank."""
    return int(np.count_nonzero(view != BLANK))


def leaked(view: Bytes) -> int:
    """Bytes of a destination that came from a source which was its owner's again."""
    return int(np.count_nonzero((view >= _NEW) & (view < _NEW + _OLD + 1)))


def late(view: Bytes) -> int:
    """Bytes that were written to a destination after its owner had filled it again."""
    return int(np.count_nonzero(view != REFILL))


class Sheet:
    """The watcher's sight of a side's memory."""

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        self.fd, self.nbytes = fd, nbytes
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, nbytes, access=access)
        self.view: Bytes = np.frombuffer(self._map, np.uint8)

    @classmethod
    def make(cls, nbytes: int) -> "Sheet":
        """New memory of zeros, for a side to map."""
        fd = os.memfd_create("kvik-fault-lab")
        os.truncate(fd, nbytes)
        return cls(fd, nbytes, writable=True)

    @classmethod
    def allocated_at(cls, pid: int, address: int, nbytes: int) -> "Sheet":
        """Memory that kvik allocated in a process."""
        inode = _inode_at(pid, address)
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.stat(entry).st_ino == inode:  # noqa: PTH116 - what the link leads to, which has no path
                return cls(os.open(entry, os.O_RDONLY | os.O_CLOEXEC), nbytes, writable=False)
        raise LookupError(f"process {pid} has no descriptor of its memory at {address:#x}")

    @property
    def path(self) -> str:
        """Where another process opens it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Let go of it."""
        del self.view
        self._map.close()
        os.close(self.fd)


def _inode_at(pid: int, address: int) -> int:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(text, 16) for text in span.split("-"))
        if first <= address < last:
            return int(inode)
    raise LookupError(f"process {pid} has nothing at {address:#x}")


class Mapped:
    """A sheet as the side that registers it sees it: an address, which can be given up and used again."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = self._map(path, None)

    @property
    def view(self) -> Bytes:
        """Its bytes; not to be kept over `unmap`."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))

    def unmap(self) -> None:
        """Give the address back to the kernel, without a word to anybody."""
        if _libc.munmap(self.address, self.nbytes) != 0:
            raise OSError(ctypes.get_errno(), "munmap")

    def use_again(self, path: str) -> None:
        """Put other memory at the same address."""
        self._map(path, self.address)

    def _map(self, path: str, at: int | None) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            flags = mmap.MAP_SHARED | (_MAP_FIXED if at else 0)
            found = _libc.mmap(at, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        finally:
            os.close(fd)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        return int(found)
