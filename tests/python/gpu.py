"""GPUs for tests, used as CuPy or PyTorch would use them: those of the stand-in for the CUDA driver, or with
KVIK_TEST_GPU=1 those of this machine.

A process that has a driver keeps it, so what uses it runs in a process of its own: `alone` makes a test of a
function. What only the stand-in can do is marked by `only_standin`.
"""

import abc
import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.python.peers import LIMIT, ROOT, Bytes

if TYPE_CHECKING:
    import pytest

SOURCES = ROOT / "tests" / "standins" / "cuda"
WHERE = "KVIK_TEST_CUDA"
ON_GPU = os.environ.get("KVIK_TEST_GPU", "") not in ("", "0")
# Streams share as many queues of the device as this says, and one that stands still holds its whole queue up.
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
PATIENCE = (12 if ON_GPU else 3) * LIMIT  # a process that uses a GPU takes seconds to start
BUS_ID = 13  # room for a PCI address, "0000:1a:00.0", and its end


def only_standin(why: str) -> "pytest.MarkDecorator":
    """Marks a test that no real driver can run."""
    import pytest  # which processes of tests do not need

    return pytest.mark.skipif(ON_GPU, reason=f"only the stand-in for the driver {why}")


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that has the driver: the stand-in's, which is built into the folder, or the
    one of this machine."""
    if ON_GPU:
        return {**os.environ, QUEUES[0]: QUEUES[1]}
    build(folder)
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**os.environ, WHERE: str(folder / "libcuda.so.1"), "LD_LIBRARY_PATH": path}


def alone(function: Callable[["Cuda"], None]) -> Callable[[dict[str, str]], None]:
    """A test that runs the function in a process of its own, over the driver; see the fixture `gpu_env`."""

    @functools.wraps(function, assigned=("__name__", "__doc__", "__module__"))
    def test(gpu_env: dict[str, str]) -> None:
        name, home = function.__name__, function.__module__
        call = f"from {home} import {name}; from {__name__} import run; run({name})"
        done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, env=gpu_env, capture_output=True,
                              text=True, timeout=PATIENCE, check=False)  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        print(done.stdout, end="")

    test.body = function  # type: ignore[attr-defined]
    # pytest looks at what is wrapped for the names of fixtures.
    del test.__wrapped__
    return test


def run(test: Any) -> None:
    """In the process of its own: the function of a test."""
    test.body(driver())


def build(folder: Path) -> Path:
    """The folder, with the stand-in in it."""
    subprocess.run(["make", "-C", SOURCES, f"OUT={folder}"], check=True, timeout=120, capture_output=True)
    return folder


def driver() -> "Cuda":
    """The driver of this process, which `environment` has prepared."""
    if ON_GPU:
        from tests.python.gpu_driver import Driver

        return Driver()
    return Standin(os.environ[WHERE])


class Cuda(abc.ABC):
    """An application of CUDA's: it has the primary context of the first device."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.call("cuInit", 0)
        self.use(0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver's that must succeed."""
        code = self.library[name](*arguments)
        assert code == 0, f"{name} returned {code}"

    def use(self, device: int) -> None:
        """From now on this thread, and what it allocates and launches, is on this device."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def places(self) -> list[str]:
        """The PCI address of each device, in the kernel's letters."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        places = []
        for device in range(count.value):
            text = ctypes.create_string_buffer(BUS_ID)
            self.call("cuDeviceGetPCIBusId", text, BUS_ID, device)
            places.append(text.value.decode().lower())
        return places

    def array(self, count: int, **changes: Any) -> "Array":
        """An array of zeroes on the device; `changes` are of its interface."""
        return Array(self, count, changes)

    def stream(self) -> int:
        """A stream that no other waits for."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value
        return stream.value

    @abc.abstractmethod
    def say(self, command: str) -> None:
        """A command of the stand-in. A real driver knows `stall` and `release`, for the streams of `stream`,
        and takes `delay` as it is: its copies take their own time."""

    @abc.abstractmethod
    def peek(self, at: int, into: Bytes) -> None:
        """What is there at this moment, in no order with anything."""

    @abc.abstractmethod
    def poke(self, at: int, given: Bytes) -> None:
        """Bytes are there from this moment on, in no order with anything."""

    @abc.abstractmethod
    def fill(self, stream: int, at: int, count: int, value: int, micros: int) -> None:
        """Launch a kernel that sets every byte after a while."""


class Standin(Cuda):
    """The stand-in for the driver."""

    def say(self, command: str) -> None:
        """As of `Cuda`."""
        self.call("standin_control", command.encode())

    def peek(self, at: int, into: Bytes) -> None:
        """As of `Cuda`."""
        self.call("standin_peek", *_range(at, into))

    def poke(self, at: int, given: Bytes) -> None:
        """As of `Cuda`."""
        self.call("standin_poke", *_range(at, given))

    def fill(self, stream: int, at: int, count: int, value: int, micros: int) -> None:
        """As of `Cuda`."""
        size = ctypes.c_size_t(count)
        self.call("standin_fill", ctypes.c_void_p(stream), ctypes.c_uint64(at), size, value, micros)


def _range(at: int, host: Bytes) -> tuple[Any, ...]:
    return ctypes.c_uint64(at), ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.size)


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
        self.cuda.peek(self.at, into)
        return into

    @now.setter
    def now(self, given: Bytes) -> None:
        self.cuda.poke(self.at, given)

    def fill(self, stream: int, value: int, micros: int) -> None:
        """Launch a kernel that sets every byte after a while."""
        self.cuda.fill(stream, self.at, self.count, value, micros)

    def free(self) -> None:
        """Give the memory back to the device."""
        self.cuda.call("cuMemFree_v2", ctypes.c_uint64(self.at))
