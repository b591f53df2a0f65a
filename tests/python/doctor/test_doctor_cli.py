"""`kvik doctor` as a command: what it prints, writes and returns, on this machine and on recorded ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvik.doctor.cli import doctor
from tests.python.doctor.machines import recorded
from tests.python.doctor.small import CHIPSET_X4, CPU_X4, CPU_X16, desktop

COMMAND = [sys.executable, "-m", "kvik.cli", "doctor", "--json"]
WITHOUT_MEASURING_S = 2.0


def write(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document))
    return str(path)


@pytest.fixture
def moved(tmp_path: Path) -> list[str]:
    """The article's PC before a move, after the good one, and a healthy one."""
    return [
        write(tmp_path / "before.json", desktop(gpu=CHIPSET_X4, nic=CPU_X16)),
        write(tmp_path / "oculink.json", desktop(gpu=CPU_X4, nic=CPU_X16)),
        write(tmp_path / "healthy.json", desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))),
    ]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(doctor, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_status_and_findings_of_recorded_machines(moved: list[str]) -> None:
    code, text = run("--tree", moved[0])
    assert code == 1
    assert "gpu-behind-chipset: 0000:01:00.0" in text
    assert "through the chipset" in text
    assert run("--tree", moved[2])[0] == 0
    assert "no findings" in run("--tree", moved[2])[1]


def test_json_has_the_machine_and_the_findings(moved: list[str]) -> None:
    code, text = run("--tree", moved[0], "--json")
    document = json.loads(text)
    assert code == 1
    assert [one["code"] for one in document["findings"]] == ["gpu-behind-chipset", "gpu-link-narrow"]
    assert all(one["cost"]["source"] and one["advice"] and one["assumes"] for one in document["findings"])
    assert document["machine"]["chipset"] == "H670"


def test_comparison(moved: list[str]) -> None:
    code, text = run("--compare", moved[0], moved[1])
    assert code == 1  # The GPU has 4 of its 16 lanes still.
    assert "gone: gpu-behind-chipset: 0000:01:00.0" in text
    assert "TP=2 PP=1 Llama-3.2-1B" in text
    assert run("--compare", moved[0], moved[2])[0] == 0
    assert "nothing has changed" in run("--compare", moved[2], moved[2])[1]


def test_the_page_has_what_the_terminal_has(tmp_path: Path) -> None:
    machine, page = (
        write(tmp_path / "server.json", recorded("two-sockets-8x8", "verbs-twice")),
        tmp_path / "x",
    )
    text = run("--tree", machine, "--page", str(page))[1]
    html = page.read_text()
    for said in (
        "OSFP A maker OSFP-PART, passive copper 1.5 m, 400 Gbit/s", "nixl_cu13.libs/libibverbs-1de1263b",
        "processors 0-127, all their time, memory unlimited", "library-twice", "mlx5_7 400 Gbit/s",
    ):  # fmt: skip
        assert said in text
        assert said in html


def test_a_page_and_a_recording_are_written(moved: list[str], tmp_path: Path) -> None:
    page, saved = tmp_path / "page.html", tmp_path / "saved.json"
    assert run("--tree", moved[0], "--page", str(page), "--save", str(saved))[0] == 1
    text = page.read_text()
    assert text.count("<rect") == 1 + 4  # CPU, two ports, GPU, NIC
    assert "http" not in text
    assert "gpu-behind-chipset" in text
    assert run("--tree", str(saved), "--json")[1] == run("--tree", moved[0], "--json")[1]


@pytest.mark.parametrize(
    "arguments",
    [["--tree", "none.json"], ["--nothing"], ["--compare", "a"], ["--tree", "{}", "--measure"],
     ["--compare", "{}", "{}", "--save", "x"]],
)  # fmt: skip
def test_wrong_use_is_status_2(moved: list[str], arguments: list[str]) -> None:
    assert run(*(word.format(moved[0]) if word != "{}" else moved[0] for word in arguments))[0] == 2


def test_what_cannot_be_written_is_said(moved: list[str], tmp_path: Path) -> None:
    code, text = run("--tree", moved[2], "--page", str(tmp_path / "no" / "page.html"))
    assert (code, "cannot be written: No such file or directory" in text) == (1, True)


def examined_here(command: list[str]) -> dict[str, Any]:
    begin = os.times()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    # Processor time: the wall is the neighbours' too.
    now = os.times()
    spent = now.children_user + now.children_system - begin.children_user - begin.children_system
    assert spent < WITHOUT_MEASURING_S
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_this_machine() -> None:
    document = examined_here(COMMAND)
    assert document["machine"]["nodes"]
    assert document["machine"]["limits"]["memory_bytes"] > 0
    named = {missing["path"] for missing in document["machine"]["unread"]}
    for path in ("/sys/class/infiniband", "/sys/class/dmi/id/board_name"):
        assert Path(path).exists() or path in named


# The interpreter may lie where only root reads, so it is loaded first.
AS_NOBODY = """
import encodings.idna, os
from kvik.doctor.cli import doctor
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
doctor(["--json"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become another user")
def test_this_machine_as_another_user() -> None:
    document = examined_here([sys.executable, "-c", AS_NOBODY])
    assert not document["machine"]["limits"]["locks_freely"]
    named = {missing["path"]: missing["reason"] for missing in document["machine"]["unread"]}
    for address, device in document["machine"]["devices"].items():
        if device["acs_redirects"] is None:
            assert f"/sys/bus/pci/devices/{address}/config" in named, address


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to make a mount namespace")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not installed")
def test_this_machine_where_sys_is_not_mounted() -> None:
    script = 'mount -t tmpfs none /sys && exec "$@"'
    document = examined_here(["unshare", "--mount", "--pid", "--fork", "sh", "-ec", script, "sh", *COMMAND])
    named = {missing["path"]: missing["reason"] for missing in document["machine"]["unread"]}
    for path in ("/sys/bus/pci/devices", "/sys/class/net", "/sys/devices/system/node", "/sys/module"):
        assert named[path] == "absent"


def test_help_imports_nothing_of_it() -> None:
    script = "import sys, kvik.cli; print([name for name in sys.modules if name.startswith('kvik.doctor')])"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"
