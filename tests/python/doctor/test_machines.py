"""The recorded machines are whole: what they are compared with must not be wrong itself."""

from __future__ import annotations

import base64
import json
import posixpath
from collections import Counter

import pytest

from tests.python.doctor.machines import EXPECTED, MACHINES, recorded
from tests.python.doctor.machines.desktops import MEASURED

CASES = [(name, fault) for name, fault, _ in EXPECTED]


def _folders(document: dict[str, dict[str, str]]) -> set[str]:
    found = set()
    for path in (*document["files"], *document["links"], *document["binary"]):
        while path != "/":
            path = posixpath.dirname(path)
            found.add(path)
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_a_tree(name: str) -> None:
    """No path is a file and a folder, all are absolute, and what classes link to is there."""
    document = json.loads(json.dumps(recorded(name)))
    assert document["format"] == "kvik-machine/1"
    folders = _folders(document)
    leaves = [*document["files"], *document["links"], *document["binary"]]
    assert [path for path, count in Counter(leaves).items() if count > 1] == []
    assert folders & set(leaves) == set()
    for path, target in document["links"].items():
        if path.startswith(("/sys/class", "/sys/bus/pci/devices")):
            there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            assert there in folders, f"{path} leads to {there}, which is not there"
    for path, text in document["binary"].items():
        lengths = {"config": 4096, "module": 256, "link": 96}
        assert len(base64.b64decode(text, validate=True)) == lengths[posixpath.basename(path)], path


@pytest.mark.parametrize("name", MACHINES)
def test_a_device_is_listed_below_its_bridges(name: str) -> None:
    """Every function is in the bus's list once, and its folder is inside that of the bridge above it."""
    document, machine = recorded(name), MACHINES[name]
    listed = {
        path.rpartition("/")[2]: target
        for path, target in document["links"].items()
        if path.startswith("/sys/bus/pci/devices/")
    }
    every = list(machine.every())
    assert len(listed) == len(every) == len({device.address for device in every})
    for device in every:
        for below in device.below:
            assert listed[below.address] == f"{listed[device.address]}/{below.address}"


@pytest.mark.parametrize(("name", "fault"), [case for case in CASES if case[1] is not None])
def test_a_fault_changes_the_machine(name: str, fault: str) -> None:
    """A planted fault is in the recording, and the description that others use is as it was."""
    healthy = recorded(name)
    broken = recorded(name, fault)
    assert {key: broken[key] for key in ("files", "links", "binary")} != {
        key: healthy[key] for key in ("files", "links", "binary")
    }
    assert recorded(name) == healthy


def test_no_recording_names_a_host() -> None:
    """Addresses are those for documentation, and there are no MAC addresses, serials or GUIDs."""
    for name in MACHINES:
        paths = recorded(name)["files"]
        wrong = [
            path for path in paths if path.endswith(("/address", "_serial", "_uuid", "_guid", "/serial"))
        ]
        assert wrong == []


def test_what_was_measured_has_a_direction() -> None:
    """The article's first move gained in every column with TP above 1, the second one lost."""
    for state, sign in (("gpu-by-oculink", 1), ("gpu-and-nic-exchanged", -1)):
        for (tp, _), models in MEASURED[state].items():
            for low, high in models.values():
                assert low <= high
                assert tp == 1 or (low * sign > 0 and high * sign > 0)
