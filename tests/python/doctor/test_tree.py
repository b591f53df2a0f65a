"""Trees: links, what cannot be read, and recordings that somebody else made."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvik.doctor import examine, findings
from kvik.doctor.page import page
from kvik.doctor.show import finding_lines, machine_lines
from kvik.doctor.tree import RecordedTree, RecordingError, Tree, Unread, load
from tests.python.doctor.small import CHIPSET_X4, CPU_X16, desktop
from tests.python.doctor.test_saving import owned
from tests.python.peers import random_seed

DOCUMENT = {
    "format": "kvik-machine/1",
    "files": {"/sys/devices/a/value": " 7\n", "/proc/x": "x"},
    "links": {
        "/sys/bus/a": "../devices/a",
        "/sys/bus/b": "/sys/bus/a",
        "/sys/loop": "/sys/loop",
        "/sys/out": "../../../../proc",
    },
    "binary": {"/sys/devices/a/config": "AAE="},
}


@pytest.fixture(params=["recorded", "folder"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    if request.param == "recorded":
        return RecordedTree(DOCUMENT)
    for path, text in DOCUMENT["files"].items():  # type: ignore[attr-defined]
        file = tmp_path / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "sys/devices/a/config").write_bytes(b"\0\1")
    for path, target in DOCUMENT["links"].items():  # type: ignore[attr-defined]
        link = tmp_path / path[1:]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return load(tmp_path)


def test_links_are_followed_inside_the_tree(tree: Tree) -> None:
    assert tree.read("/sys/bus/b/value") == "7"
    assert tree.link("/sys/bus/b") == "/sys/devices/a"
    assert tree.blob("/sys/bus/a/config") == b"\0\1"
    assert tree.list("/sys/bus/a") == ["config", "value"]
    assert tree.read("/sys/out/x") == "x"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/sys/none", "absent"), ("/sys/loop/x", "too many links"), ("sys", "not a plain absolute path"),
     ("/sys/../etc", "not a plain absolute path")],
)  # fmt: skip
def test_what_is_not_read_says_why(tree: Tree, path: str, reason: str) -> None:
    with pytest.raises(Unread, match=reason) as error:
        tree.read(path)
    assert error.value.reason == reason


def test_a_link_to_thousands_of_folders_is_not_followed() -> None:
    document = {"format": "kvik-machine/1", "links": {"/sys/bus/pci/devices/0000:01:00.0": "/a" * 5000}}
    with pytest.raises(Unread, match="too many folders"):
        RecordedTree(document).read("/sys/bus/pci/devices/0000:01:00.0/class")
    machine = examine(RecordedTree(document))
    assert [*machine_lines(machine), *finding_lines(findings(machine))]


def test_a_pipe_in_a_recorded_folder_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    os.mkfifo(tmp_path / "sys/pipe")
    with pytest.raises(Unread, match="not a file"):
        load(tmp_path).read("/sys/pipe")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "kvik-machine/2"}', '{"format": "kvik-machine/1", "files": {"a": "b"}}',
     '{"format": "kvik-machine/1", "links": {"/a": 1}}', "[" * 100_000,
     '{"format": "kvik-machine/1", "links": {"/a\\ud800": "/b"}}'],
)  # fmt: skip
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(RecordingError, match=r"machine\.json"):
        load(file)


def damaged(document: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy with a few values and paths changed at random."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    for _ in range(draw.randint(1, 8)):
        table = copy[draw.choice(["files", "links", "binary"])]
        if not table:
            continue
        path = draw.choice(sorted(table))
        what = draw.randrange(4)
        if what == 0:
            del table[path]
        elif what == 1:
            table[path] = draw.choice(
                ["", "-1", "255", "9" * 400, "0x", "Unknown", "\0", "::", "/", "..", "é", "="]
            )
        elif what == 2:
            table[path] = draw.choice(sorted(copy["files"]) + sorted(copy["links"]))
        else:
            table[f"{path}/{draw.choice(['device', 'x', '0'])}"] = table[path]
    return copy


def test_no_recording_makes_it_fail() -> None:
    draw = random.Random(random_seed())
    document = owned()
    for _ in range(150):
        machine = examine(RecordedTree(damaged(document, draw)))
        found = findings(machine)
        assert all(missing.reason for missing in machine.unread)
        assert [*machine_lines(machine), *finding_lines(found), page(machine, found, "<b>")]


def test_each_unread_fact_is_named_with_its_path() -> None:
    document = desktop(gpu=CHIPSET_X4, nic=CPU_X16)
    path = "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0/current_link_width"
    del document["files"][path]
    document["unread"] = {path: "not permitted"}
    missing = {one.path: one.reason for one in examine(RecordedTree(document)).unread}
    assert missing["/sys/bus/pci/devices/0000:02:00.0/current_link_width"] == "not permitted"


@pytest.mark.parametrize("cpus", ["9" * 5000, "0-" + "9" * 5000, "x", "3-1", "-"])
def test_processors_of_any_numbers_are_read(cpus: str) -> None:
    document = desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))
    document["files"]["/sys/devices/system/node/node0/cpulist"] = cpus
    machine = examine(RecordedTree(document))
    assert len(machine.nodes[0].processors) <= 1
    assert findings(machine) == []
