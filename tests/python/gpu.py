"""GPUs for tests: the stand-in for the CUDA driver, used as CuPy or PyTorch would use the real one.

A process that has it keeps it, so what uses it runs in a process of its own: `alone` makes a test of a
function.
"""

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.python.peers import LIMIT, ROOT, Bytes

SOURCES = ROOT / "tests" / "standins" / "cuda"
WHERE = "KVIK_TEST_CUDA"


def alone(function: Callable[["Cuda"], None]) -> Callable[[Path], None]:
    """A test that runs the function in a process of its own, over the stand-in."""

    @functools.wraps(function, assigned=("__name__", "__doc__", "__module__"))
    def test(standin: Path) -> None:
        name, home = function.__name__, function.__module__
        call = f"from {home} import {name}; from {__name__} import run; run({name})"
        path = f"{standin}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        env = {**os.environ, WHERE: str(standin / "libcuda.so.1"), "LD_LIBRARY_PATH": path}
        done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, env=env, capture_output=True, text=True,
                              timeout=3 * LIMIT, check=False)  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"

    test.body = function  # type: ignore[attr-defined]
    # pytest looks at what is wrapped for the names of fixtures.
    del test.__wrapped__
    return test


def run(test: Any) -> None:
    """In the process of its own: the function of a test."""
    test.body(Cuda(os.environ[WHERE]))


def build(folder: Path) -> Path:
    """The folder, with the stand-in in it."""
    subprocess.run(["make", "-C", SOURCES, f"OUT={folder}"], check=True, timeout=120, capture_output=True)
    return folder


class Cuda:
    """An application of CUDA's: it has the primary context of the first device."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver's that must succeed."""
        code = self.library[name](*arguments)
        assert code == 0, f"{name} returned {code}"

    def say(self, command: str) -> None:
        """Give the stand-in a command."""
        self.call("standin_control", command.encode())

    def array(self, count: int, **changes: Any) -> "Array":
        """An array of bytes on the device; `changes` are of its interface."""
        return Array(self, count, changes)

    def stream(self) -> int:
        """A stream that no other waits for."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value
        return stream.value


class Array:
    """Bytes on a device, as CuPy has them."""

    def __init__(self, cuda: Cuda, count: int, changes: dict[str, Any]) -> None:
        self.cuda, self.count, self.changes = cuda, count, changes
        at = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(count))
        self.at = at.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = {"shape": (self.count,), "typestr": "|u1", "data": (self.at, False), "version": 3}
        return {**told, "strides": None, "stream": None, **self.changes}

    @property
    def now(self) -> Bytes:
        """What is there at this moment."""
        into = np.zeros(self.count, np.uint8)
        at, size = ctypes.c_uint64(self.at), ctypes.c_size_t(self.count)
        self.cuda.call("standin_peek", at, ctypes.c_void_p(into.ctypes.data), size)
        return into

    @now.setter
    def now(self, given: Bytes) -> None:
        at, size = ctypes.c_uint64(self.at), ctypes.c_size_t(given.size)
        self.cuda.call("standin_poke", at, ctypes.c_void_p(given.ctypes.data), size)

    def fill(self, stream: int, value: int, micros: int) -> None:
        """Launch a kernel that sets every byte after a while."""
        at, size = ctypes.c_uint64(self.at), ctypes.c_size_t(self.count)
        self.cuda.call("standin_fill", ctypes.c_void_p(stream), at, size, value, micros)

    def free(self) -> None:
        """Give the memory back to the device."""
        self.cuda.call("cuMemFree_v2", ctypes.c_uint64(self.at))
