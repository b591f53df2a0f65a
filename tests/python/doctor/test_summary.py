"""The summary of a machine: alike for what does not change, another one for what a measurement depends on."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from kvik.doctor.summary import summary
from kvik.doctor.tree import RecordedTree
from tests.python.doctor.machines import EXPECTED, MACHINES, recorded
from tests.python.doctor.test_saving import HOST, NAMING, owned

FAULTS = [(name, fault) for name, fault, _ in EXPECTED if fault is not None]


def told(document: dict[str, Any]) -> dict[str, Any]:
    return summary(RecordedTree(document))


# A virtual machine that shows no links has nothing of the kind.
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "g5.12xlarge"])
def test_what_changes_by_itself_is_not_in_it(name: str) -> None:
    document = recorded(name)
    later = copy.deepcopy(document)
    for path, text in document["files"].items():
        folder, _, file = path.rpartition("/")
        if file.endswith(("_packets", "link_downed")):
            later["files"][path] = str(int(text) + 1000)
        elif file == "current_link_speed" and f"{folder}/resource" in later["files"]:  # a GPU at rest
            later["files"][path] = "2.5 GT/s PCIe\n"
    assert later != document
    assert told(later) == told(document)


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_what_is_wrong_is_in_it(name: str, fault: str) -> None:
    assert told(recorded(name, fault)) != told(recorded(name))


def test_it_says_where_things_are_and_how_fast() -> None:
    said = told(recorded("two-sockets-8x8"))
    assert said["nics"][0].startswith("mlx5_0: mlx5_core, 400 Gbit/s, mtu 9000, x16 63.0 GB/s, node 0")
    last = "0000:4a:00.0: NVIDIA H100 80GB HBM3, x16 63.0 GB/s, node 1, window of 131072 MiB"
    assert said["gpus"][7] == last
    assert said["nodes"] == ["0: processors 0-63", "1: processors 64-127"]
    assert (said["memlock"], said["findings"]) == ("unlimited", [])


def test_it_names_nobody() -> None:
    text = json.dumps(summary(RecordedTree(owned()), HOST))
    assert "libibverbs 1.14.50.0" in text
    assert [word for word in NAMING if word in text] == []


def test_a_process_prints_that_of_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvik.doctor.summary"], capture_output=True, text=True, timeout=60, check=True
    )
    said = json.loads(done.stdout)
    assert said.keys() == told(recorded("g5.12xlarge")).keys()
