"""Copies between the host and a GPU, over the stand-in for the CUDA driver and a provider without a NIC."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvik
from kvik.doctor import gpu_copies as copying
from kvik.doctor import measure
from kvik.doctor.measure import Measured, gpu_copies
from kvik.doctor.model import Machine
from kvik.doctor.near import near_gpus
from tests.python.doctor.machines import recorded
from tests.python.doctor.machines.desktops import GIDS
from tests.python.doctor.machines.recording import Device, bridge, record
from tests.python.doctor.machines.recording import Machine as Described
from tests.python.doctor.small import examined
from tests.python.gpu import build

GPU, OTHER = "0000:1a:00.0", "0000:1b:00.0"  # as the stand-in has them
LINK = (32.0, 16)
WAYS = [f"kvik, host to GPU {GPU}", f"kvik, GPU {GPU} to host"]


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, standin: Path) -> None:
    """The stand-in, where processes that are started look for the driver."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{standin}:{path}" if path else str(standin))


def machine(nics: bool = True) -> Machine:
    """One whose GPU is the stand-in's first one."""
    gpu = Device(GPU, "gpu", 0x10DE, 0x2330, LINK, LINK, 0)
    nic = Device("0000:3a:00.0", "nic", 0x15B3, 0x1021, LINK, LINK, 0, "mlx5_core", gids=GIDS)
    nic.name, nic.rate = "mlx5_0", "400 Gb/sec (4X NDR)"
    below = [gpu, nic] if nics else [gpu]
    return examined(record(Described("one", ("a maker", "a board"), [bridge("0000:00:01.0", below, LINK)])))


def rates(found: list[Measured]) -> dict[str, float | None]:
    return {one.what: one.gbs for one in found}


@pytest.mark.usefixtures("cuda")
def test_both_ways_are_copied_alone_and_while_a_nic_is_busy() -> None:
    found = list(gpu_copies(GPU, "libfabric:tcp"))
    busy = [f"{way} while libfabric:tcp is busy" for way in WAYS]
    assert list(rates(found)) == [*WAYS, *busy]
    assert all(gbs is not None and gbs > 0 for gbs in rates(found).values()), found
    for one in found[2:]:
        # What the NIC moved is said, and is more than nothing.
        words = one.note.partition("libfabric:tcp moved ")[2].split()
        assert float(words[0]) > 0, one
        assert words[1:] == ["GB/s", "meanwhile,", "to", "itself"]


@pytest.mark.usefixtures("cuda")
def test_a_nic_that_is_not_there_is_named_after_what_was_measured() -> None:
    *alone, last = gpu_copies(GPU, "libfabric:none")
    assert list(rates(alone)) == WAYS
    assert last.what == f"kvik, host and GPU {GPU} while libfabric:none is busy"
    assert last.gbs is None
    assert "libfabric:none" in last.note or 'provider "none"' in last.note


def test_a_nic_that_is_late_has_moved_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, and what it moves is told however little it is."""
    monkeypatch.setattr(copying, "_LEAST_S", 0.0)
    looks, layout = itertools.count(), kvik.Layout(1, 4096)
    with kvik.Engine() as engine:
        given, there = (engine.allocate(4096).pages(layout, [0]) for _ in range(2))
        found = copying._way(engine, "a way", given, there, lambda: int(next(looks) > 20), "a NIC")
    assert found.gbs is not None, found
    assert float(found.note.partition("a NIC moved ")[2].split()[0]) > 0, found


STOPS = """
import sys
import kvik
from kvik.doctor import gpu_copies
real, left = kvik.Engine, [3]

class Engine:
    def __init__(self, **options):
        self.engine = real(**options)

    def __enter__(self):
        self.engine.__enter__()
        return self

    def __exit__(self, *why):
        return self.engine.__exit__(*why)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def read(self, *arguments, **options):
        if arguments[0].layout.pages == gpu_copies._BUSY_PAGES:
            left[0] -= 1
            if not left[0]:
                raise kvik.TransportUnavailable("the NIC is gone")
        return self.engine.read(*arguments, **options)

kvik.Engine = Engine
for one in gpu_copies.copies("0000:1a:00.0", "libfabric:tcp"):
    print(one.what, one.gbs is not None, one.note, sep="|")
"""


@pytest.mark.usefixtures("cuda")
def test_a_nic_that_stops_is_not_called_busy() -> None:
    """Its third transfer fails: no rate is given for the time after."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPS], capture_output=True, text=True, timeout=120, check=True
    )
    *alone, last = ended.stdout.strip().splitlines()
    assert [line.split("|")[:2] for line in alone] == [[way, "True"] for way in WAYS]
    what, measured, note = last.split("|")
    assert (what, measured) == (f"kvik, host and GPU {GPU} while libfabric:tcp is busy", "False")
    assert note.startswith("libfabric:tcp cannot be kept busy: ")
    assert "the NIC is gone" in note


@pytest.mark.usefixtures("cuda")
def test_each_gpu_is_found_by_its_address() -> None:
    assert [one.what for one in gpu_copies(OTHER, None)] == [way.replace(GPU, OTHER) for way in WAYS]
    (none,) = gpu_copies("0000:99:00.0", None)
    assert none.note == "none of the 2 GPUs that CUDA shows to this process is 0000:99:00.0"


REFUSED = """
import ctypes, sys
assert ctypes.CDLL("libcuda.so.1").standin_control(sys.argv[1].encode()) == 0
from kvik.doctor.gpu_copies import CannotMeasureError, copies
try:
    print(list(copies("0000:1a:00.0", None)))
except CannotMeasureError as error:
    print(error)
"""


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fail cuMemAlloc_v2 nth=1 code=2", "the GPU has no 64 MiB that are free (cuMemAlloc_v2)"),
        ("fail cuInit nth=1 code=999", "cuInit of the driver returned 999"),
    ],
)
def test_what_the_driver_refuses_is_said(fault: str, said: str) -> None:
    command = [sys.executable, "-c", REFUSED, fault]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == said


@pytest.mark.usefixtures("cuda")
def test_a_gpu_without_nics_is_measured_alone() -> None:
    found = list(measure._gpus([GPU], near_gpus(machine(nics=False))))
    assert list(rates(found)) == [*WAYS, f"kvik, host and GPU {GPU} while a NIC is busy"]
    assert (found[-1].gbs, found[-1].note) == (None, "no RDMA NIC and no EFA is seen")
    nowhere = machine()
    nowhere = replace(nowhere, nics=tuple(replace(nic, node=None) for nic in nowhere.nics))
    last = list(measure._gpus([GPU], near_gpus(nowhere)))[-1]
    assert (last.gbs, last.note) == (None, "no RDMA NIC has its device file in /dev/infiniband")


@pytest.mark.parametrize(
    ("name", "number", "nics"),
    [
        ("two-sockets-8x8", 3, "verbs:mlx5_3"),
        ("p5en.48xlarge", 0, "efa:rdmap19s0,rdmap20s0"),
        ("roce-pair-left", 0, "verbs"),
    ],
)
def test_the_nics_near_a_gpu_are_kept_busy(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, nics: str
) -> None:
    asked: list[tuple[str, str | None]] = []

    def note(gpu: str, named: str | None) -> Iterator[Measured]:
        asked.append((gpu, named))
        return iter(())

    monkeypatch.setattr(measure, "gpu_copies", note)
    of = examined(recorded(name))
    gpu = of.gpus[number].address
    assert list(measure._gpus([gpu], near_gpus(of))) == []
    assert asked == [(gpu, nics)]


def test_without_a_gpu_a_line_says_so() -> None:
    assert list(measure._gpus([], [])) == [
        Measured("copies between host and GPU", None, "this machine has no NVIDIA GPU")
    ]


def test_without_the_driver_a_line_says_so() -> None:
    """Also on a host that has one."""
    script = (
        "import ctypes, sys\nreal = ctypes.CDLL\n"
        "def refuse(name, *more):\n"
        "    if name == 'libcuda.so.1': raise OSError('no such file')\n"
        "    return real(name, *more)\n"
        "ctypes.CDLL = refuse\n"
        "from kvik.doctor.gpu_copies import copies\n"
        "try: list(copies('0000:1a:00.0', None))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "CannotMeasureError libcuda.so.1 cannot be loaded: no such file"


def test_a_process_that_ends_badly_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho it broke >&2; exit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    assert list(gpu_copies(GPU, None)) == [Measured(f"kvik, host and GPU {GPU}", None, "it broke")]
