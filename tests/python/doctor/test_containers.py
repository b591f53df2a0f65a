"""What confines a process: control groups of both kinds, and by what a container is known for one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvik.config import ENTRIES
from kvik.doctor import examine, findings, live
from kvik.doctor.model import Limits
from kvik.doctor.rules_container import ENGINE, NIC_CPU_S, STORE, TCP_CPU_S
from kvik.doctor.saving import save
from kvik.doctor.show import machine_lines
from kvik.doctor.tree import RecordedTree
from tests.docs.pages import ROOT
from tests.python.doctor.machines import MACHINES, recorded
from tests.python.doctor.machines.recording import record
from tests.python.doctor.small import CPU_X16, desktop, examined

ID = "0123456789abcdef" * 4


def grouped(groups: str, files: dict[str, str]) -> dict[str, Any]:
    """A PC whose process is in these groups, with files of /sys/fs/cgroup."""
    document = desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))
    document["files"]["/proc/self/cgroup"] = groups
    document["files"].update({f"/sys/fs/cgroup/{name}": text for name, text in files.items()})
    return document


UNIFIED = {"cgroup.controllers": "cpu memory"}


@pytest.mark.parametrize(
    ("document", "quota", "memory"),
    [
        (grouped("0::/", UNIFIED), None, None),
        (grouped("0::/", {**UNIFIED, "cpu.max": "max 100000", "memory.max": "max"}), None, None),
        (grouped("0::/", {**UNIFIED, "cpu.max": "150000 100000", "memory.max": "1073741824"}), 1.5, 1 << 30),
        # The least of those above it counts.
        (
            grouped("0::/a/b", {
                **UNIFIED, "a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000",
                "a/memory.max": "4294967296", "a/b/memory.max": "8589934592",
            }), 2.0, 4 << 30,
        ),
        # The old interface, each controller by itself; -1 and the largest number are no limit.
        (
            grouped("4:memory:/m\n1:cpu,cpuacct:/c\n0::/u", {
                "cpu/c/cpu.cfs_quota_us": "50000", "cpu/c/cpu.cfs_period_us": "100000",
                "memory/m/memory.limit_in_bytes": "2147483648",
            }), 0.5, 2 << 30,
        ),
        (
            grouped("4:memory:/\n1:cpu:/", {
                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            }), None, None,
        ),
        # Without a namespace of groups a container's path is the host's, and the mount is the container's.
        (
            grouped(f"4:memory:/docker/{ID}\n1:cpu:/docker/{ID}", {
                "cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "1073741824",
            }), 3.0, 1 << 30,
        ),
    ],
)  # fmt: skip
def test_limits_of_groups(document: dict[str, Any], quota: float | None, memory: int | None) -> None:
    limits = examined(document).limits
    assert (limits.cpu_quota_known, limits.memory_limit_known) == (True, True)
    assert (limits.cpu_quota, limits.memory_limit) == (quota, memory)
    after = examined(save(RecordedTree(document), "a machine", "host")).limits
    assert after == limits


def test_groups_that_are_not_mounted_are_named() -> None:
    machine = examined(grouped("0::/a", {}))
    assert (machine.limits.cpu_quota_known, machine.limits.memory_limit_known) == (False, False)
    named = {one.path: one.reason for one in machine.unread}
    assert named["/sys/fs/cgroup"] == "absent"
    text = "\n".join(machine_lines(machine))
    assert "quota not said, memory limit not said" in text


def test_names_of_containers_and_users_are_not_kept() -> None:
    pod = f"/kubepods.slice/kubepods-pod{ID[:8]}.slice/cri-containerd-{ID}.scope"
    document = grouped(f"0::{pod}", UNIFIED)
    document["files"][f"/sys/fs/cgroup{pod}/memory.max"] = "1073741824"
    document["files"]["/proc/1/cgroup"] = f"0::{pod}"
    document["files"]["/run/.containerenv"] = f'engine="podman-4.3.1"\nname="owners-work"\nid="{ID}"'
    document["files"]["/proc/self/mountinfo"] = (
        f"1 2 8:1 /var/lib/docker/containers/{ID}/hostname /etc/hostname rw - ext4 /dev/sda1 rw\n"
        "1 3 8:1 /home/owner/models /models rw - ext4 /dev/sda1 rw\n"
    )
    saved = save(RecordedTree(document), "a machine", "host")
    text = json.dumps(saved)
    for name in (ID, ID[:8], "owner"):
        assert name in json.dumps(document)
        assert name not in text
    before, after = examined(document), examined(json.loads(text))
    assert before.container_marks == (
        "/run/.containerenv", "control group of kubepods", "mounts of docker",
    )  # fmt: skip
    assert (after.container_marks, after.limits) == (before.container_marks, before.limits)


KUBELET = f"1 2 8:1 /lib/kubelet/pods/{ID}/etc-hosts /etc/hosts rw - ext4 /dev/sda rw"
PODMAN = f"1 2 0:9 /containers/overlay-containers/{ID}/userdata/hostname /etc/hostname rw"
ON_HOST = "/var/lib/kubelet/pods/x/volume-subpaths/v"
MARKS = [
    ({"/proc/mounts": "overlay / overlay rw 0 0"}, "root on overlay"),
    ({"/.dockerenv": ""}, "/.dockerenv"),
    ({"/run/.containerenv": ""}, "/run/.containerenv"),
    ({"/run/systemd/container": "systemd-nspawn"}, "/run/systemd/container"),
    ({"/proc/1/cgroup": f"3:cpu:/docker/{ID}"}, "control group of docker"),
    ({"/proc/1/cgroup": f"0::/machine.slice/libpod-{ID}.scope"}, "control group of libpod"),
    ({"/proc/self/mountinfo": KUBELET}, "mounts of kubelet"),
    (
        {"/proc/self/mountinfo": "1 2 0:50 / /run/secrets/kubernetes.io/serviceaccount ro - tmpfs tmpfs rw"},
        "mounts of kubelet",
    ),
    ({"/proc/self/mountinfo": PODMAN}, "mounts of overlay-containers"),
]


@pytest.mark.parametrize(("files", "mark"), MARKS)
def test_by_what_a_container_is_known(files: dict[str, str], mark: str) -> None:
    document = desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))
    document["files"].update(files)
    machine = examined(document)
    assert (machine.container, machine.container_marks) == (True, (mark,))
    # The PC has an RDMA device and its file, and a GPU's.
    assert machine.not_there == ()
    for path in ("/dev/infiniband/uverbs0", "/dev/nvidia0"):
        del document["files"][path]
    bare = examined(document)
    assert bare.not_there == ("/dev/infiniband", "/dev/nvidia*")
    assert f"container told by {mark}; not there: /dev/infiniband, /dev/nvidia*" in "\n".join(
        machine_lines(bare)
    )
    assert {"/dev/infiniband", "/dev/nvidia0"} <= {one.path for one in bare.unread}
    assert {one.code for one in findings(bare)} == {"container-lacks-devices"}


def test_a_host_that_runs_containers_is_none() -> None:
    document = desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))
    document["files"].update(
        {
            "/proc/mounts": "/dev/sda / ext4 rw 0 0\noverlay /var/lib/docker/x/merged overlay rw 0 0",
            "/proc/1/cgroup": "0::/init.scope",
            "/proc/self/cgroup": "0::/system.slice/docker.service",
            "/proc/self/mountinfo": (
                "1 2 0:50 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw\n"
                f"1 2 8:1 /var/lib/kubelet/pods/x/v {ON_HOST} rw - ext4 /dev/sda rw\n"
            ),
        }
    )
    machine = examined(document)
    assert (machine.container, machine.container_marks, machine.not_there) == (False, (), ())


def test_a_quota_below_what_the_ports_need_is_told_with_its_share() -> None:
    """p5: 32 ports of 100 Gbit/s are 400 GB/s, 372.5 GiB/s."""
    machine = MACHINES["p5.48xlarge"]
    document = record(machine)
    path = "/sys/fs/cgroup/user.slice/cpu.max"
    need = 400e9 / 2**30 * NIC_CPU_S
    for quota, found in ((need - 0.5, True), (need + 0.5, False)):
        document["files"][path] = f"{int(quota * 100_000)} 100000"
        codes = [one.code for one in findings(examined(document))]
        assert codes == ["cpu-quota-low"] * found
    document["files"][path] = f"{int(need / 2 * 100_000)} 100000"
    (finding,) = findings(examined(document))
    assert finding.cost.percent == pytest.approx(50, abs=0.1)
    assert "at 400.0 GB/s" in finding.fact


def test_few_processors_are_as_a_quota() -> None:
    document = recorded("p5.48xlarge")
    status = document["files"]["/proc/self/status"]
    for allowed, codes in (("0-3", ["cpu-quota-low"]), ("0-15", []), ("0-191", [])):
        document["files"]["/proc/self/status"] = status.replace("0-191", allowed)
        assert [one.code for one in findings(examined(document))] == codes, allowed


@pytest.mark.parametrize(
    ("quota", "allowed", "said"),
    [
        (8.0, "0", "of 192 processors it may use 1,"),
        (0.5, "0-3", "its control groups give it 0.5,"),
        (8.0, "0-15", None),
    ],
)
def test_of_quota_and_processors_the_smaller_counts(quota: float, allowed: str, said: str | None) -> None:
    document = recorded("p5.48xlarge")
    document["files"]["/sys/fs/cgroup/user.slice/cpu.max"] = f"{int(quota * 100_000)} 100000"
    status = document["files"]["/proc/self/status"]
    document["files"]["/proc/self/status"] = status.replace("0-191", allowed)
    found = [(one.code, said in one.fact if said else one.fact) for one in findings(examined(document))]
    assert found == ([("cpu-quota-low", True)] if said else [])


def test_without_nics_tcp_is_counted() -> None:
    document = recorded("g5.12xlarge")
    document["links"] = {
        path: target for path, target in document["links"].items() if "infiniband" not in path
    }
    document["files"] = {
        path: "40000" if path.endswith("ens15/speed") else "up" if path.endswith("ens15/operstate") else text
        for path, text in document["files"].items()
    }
    document["files"]["/sys/fs/cgroup/user.slice/cpu.max"] = "100000 100000"
    found = {one.code: one for one in findings(examined(document))}
    need = 5e9 / 2**30 * TCP_CPU_S
    assert found["cpu-quota-low"].cost.percent == pytest.approx((1 - 1 / need) * 100)


def test_figures_are_those_of_the_measurements() -> None:
    name = "2026-11-20-loopback-2-cores.json"
    cells = json.loads((ROOT / "bench" / "results" / name).read_text(encoding="utf-8"))["cells"]
    (cell,) = [one for one in cells if (one["op"], one["page_bytes"], one["pages"]) == ("read", 16384, 2000)]
    (tcp,) = [one for one in cell["kvik"] if one["transport"] == "tcp"]
    for side in tcp["cpu_s_per_gib"].values():
        assert pytest.approx(side, abs=0.005) == TCP_CPU_S
    table = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    row = re.search(r"\| descriptor \| 16384 \| 4 \|.*\| ([0-9.]+) \[[^|]*\|\n", table)
    assert row is not None
    a_gib = float(row[1]) / 1e6 * 2**30 / (512 << 10)
    assert pytest.approx(a_gib, abs=0.002) == NIC_CPU_S
    defaults = {(entry.name, option.name): option.default for entry in ENTRIES for option in entry.options}
    assert defaults["store", "memory"] == STORE
    assert defaults["engine", "memory_cap"] == ENGINE


@pytest.mark.parametrize(("limit", "codes"), [(1 << 30, ["memory-limit-low"]), (2 << 30, [])])
def test_a_memory_limit_is_compared_with_what_is_needed(limit: int, codes: list[str]) -> None:
    document = recorded("two-sockets-8x8")
    document["files"]["/sys/fs/cgroup/user.slice/memory.max"] = str(limit)
    found = findings(examined(document))
    assert [one.code for one in found] == codes
    assert all("1380 MiB" in one.fact for one in found)


def test_this_process_is_held_by_what_the_kernel_says() -> None:
    limits = examine(live()).limits
    status = Path("/proc/self/status").read_text()
    assert f"Cpus_allowed_list:\t{limits.cpus_allowed}\n" in status
    assert isinstance(limits, Limits)
    assert limits.memory_limit is None or limits.memory_limit > 1 << 20


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset (util-linux) is not installed")
def test_this_process_with_one_processor() -> None:
    script = "from kvik.doctor import examine, live; print(examine(live()).limits.cpus_allowed)"
    first = min(int(word) for word in re.findall(r"\d+", examine(live()).limits.cpus_allowed or "0"))
    command = ["taskset", "-c", str(first), sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == str(first)


def test_a_right_of_another_user_namespace_locks_no_memory() -> None:
    """A rootless container has all rights in its own namespace; the kernel asks for those of the first."""
    document = recorded("two-sockets-8x8")
    document["files"]["/proc/self/limits"] = "Max locked memory         8388608    8388608    bytes"
    document["files"]["/proc/self/status"] = "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-127\n"
    for ids, freely, found in (
        ("         0          0 4294967295", True, []),
        ("         0     101000      65536", False, ["memlock-low"]),
    ):
        document["files"]["/proc/self/uid_map"] = ids
        saved = save(RecordedTree(document), "a machine", "host")
        assert "101000" not in json.dumps(saved)
        for machine in (examined(document), examined(saved)):
            assert machine.limits.locks_freely == freely
            assert [one.code for one in findings(machine)] == found


def test_what_is_needed_at_least_is_not_said_of_a_rate() -> None:
    """In a container no network device has hardware behind it, and no rate of a port is known."""
    document = grouped("0::/", {**UNIFIED, "cpu.max": "50000 100000"})
    for table in ("files", "links"):
        document[table] = {path: text for path, text in document[table].items() if "infiniband" not in path}
    (finding,) = [one for one in findings(examined(document)) if one.code == "cpu-quota-low"]
    assert finding.fact == "its control groups give it 0.5, and kvik alone needs one, however little it moves"
    assert finding.cost.percent == 50
    assert "heartbeats" in finding.cost.source


def test_locked_memory_is_compared_with_what_the_container_may_have() -> None:
    """64 GiB may be locked, and the server has 2 TiB."""
    document = recorded("two-sockets-8x8")
    document["files"]["/proc/self/limits"] = f"Max locked memory         {64 << 30}    {64 << 30}    bytes"
    for limit, codes in (("max", ["memlock-low"]), (str(64 << 30), []), (str(256 << 30), ["memlock-low"])):
        document["files"]["/sys/fs/cgroup/user.slice/memory.max"] = limit
        assert [one.code for one in findings(examined(document))] == codes
