"""One wheel on machines with and without the libraries of NICs: what is not there is named, and nothing else
is taken in its place."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.commands import ROOT, run

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]

FABRIC, VERBS, CUDA = "libfabric", "libibverbs", "libcuda"
SONAMES = {FABRIC: "libfabric.so.1", VERBS: "libibverbs.so.1", CUDA: "libcuda.so.1"}
# Whether the dynamic linker finds each library. In a process of its own: kvik takes what is loaded.
PROBE = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
        print("found")
    except OSError as error:
        print(error)
"""


@dataclass(frozen=True)
class Machine:
    """This one, without some libraries."""

    without: tuple[str, ...]
    room: Path

    def run(self, *command: object) -> str:
        """What a command prints there; it has to succeed."""
        room = self.room / str(len(list(self.room.iterdir())))
        unshare = ("unshare", "--mount", "--propagation", "private")
        machine = (sys.executable, "-m", "tests.packaging.machine", room, *self.without)
        return run(*unshare, *machine, "--", *command, env={"LD_LIBRARY_PATH": ""}, cwd=ROOT)


def needed(library: str) -> set[str]:
    """The libraries, of those here, that one of them is linked against."""
    finds = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    maps = run(sys.executable, "-c", finds, library)
    return {name for name, soname in SONAMES.items() if soname.removesuffix(".1") in maps}


def make(tmp_path: Path, *without: str) -> Machine:
    """A machine, or the test is skipped by name where there can be none."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mount namespaces take root and `unshare`")
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace can be made: {tried.stderr.strip()}")
    return Machine(without, tmp_path)


def told(machine: Machine, python: Path) -> tuple[list[str], dict[str, str]]:
    """What the dynamic linker says of each library there, and the stranger of each transport."""
    found = machine.run(python, "-c", PROBE, *SONAMES.values()).splitlines()
    transports: dict[str, str] = json.loads(machine.run(python, ROOT / "tests" / "packaging" / "stranger.py"))
    for name, said in zip(SONAMES, found, strict=True):
        if name in machine.without:
            missing = f"{SONAMES[name]}: cannot open shared object file: No such file or directory"
            assert said == missing
    # What needs no library of a NIC is there everywhere.
    assert transports["tcp"].startswith("tcp by ")
    assert transports["local"].startswith("local by ")
    return found, transports


def names_what_is_missing(said: str, library: str) -> None:
    """The error's kind and text: the library, where it was looked for, and what to do."""
    words = (f"TransportUnavailable: {SONAMES[library]} cannot be loaded", "No such file or directory",
             "Install it", "KVIK_NIC_LIBRARY", "in a container")  # fmt: skip
    assert [word for word in words if word not in said] == [], said


def names_the_missing_device(said: str, refusal: tuple[str, ...], transport: str) -> None:
    """The error's kind and text; where this machine has RDMA devices, pages may have moved instead."""
    devices = Path("/sys/class/infiniband")
    if devices.is_dir() and any(devices.iterdir()) and said.startswith(f"{transport} by "):
        return
    assert [word for word in refusal if word not in said] == [], said


NO_EFA = ("TransportUnavailable: libfabric", 'no NIC of provider "efa"', "fi_info -p efa")
NO_VERBS = ("TransportUnavailable: libibverbs (", "no RDMA device with an active port", "ibv_devices")


def test_without_any_library(empty_env: Path, tmp_path: Path) -> None:
    """tcp and local go; each kind of NIC is refused by the name of its library."""
    found, transports = told(make(tmp_path, FABRIC, VERBS, CUDA), empty_env / "python")
    assert "found" not in found
    names_what_is_missing(transports["efa"], FABRIC)
    names_what_is_missing(transports["libfabric:tcp"], FABRIC)
    names_what_is_missing(transports["verbs"], VERBS)


def test_with_libfabric(empty_env: Path, tmp_path: Path) -> None:
    """Its provider for every machine moves pages; the one for a device that is not here is refused."""
    others = tuple(sorted(set(SONAMES) - needed(SONAMES[FABRIC])))
    found, transports = told(make(tmp_path, *others), empty_env / "python")
    assert found[0] == "found"
    assert transports["libfabric:tcp"] == "libfabric by tcp"
    names_the_missing_device(transports["efa"], NO_EFA, "libfabric")
    if VERBS in others:
        names_what_is_missing(transports["verbs"], VERBS)
    else:
        names_the_missing_device(transports["verbs"], NO_VERBS, "verbs")


def test_with_libibverbs_only(empty_env: Path, tmp_path: Path) -> None:
    """verbs finds its library and no device; what takes libfabric is refused by the name of that."""
    found, transports = told(make(tmp_path, FABRIC, CUDA), empty_env / "python")
    assert found[1] == "found"
    names_the_missing_device(transports["verbs"], NO_VERBS, "verbs")
    names_what_is_missing(transports["efa"], FABRIC)
    names_what_is_missing(transports["libfabric:tcp"], FABRIC)
