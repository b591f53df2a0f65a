"""A saved machine names nobody, and says the same about the machine."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvik.doctor import examine, findings, live
from kvik.doctor.saving import save
from kvik.doctor.tree import RecordedTree
from tests.python.doctor.machines import MACHINES, recorded
from tests.python.doctor.small import CHIPSET_X4, CPU_X16, config_with_serial, desktop

HOST = "owners-box"
SERIAL = bytes((0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88))
# Each is put where kernels and drivers have it; none may be in what is saved.
NAMING = (
    "00:1a:2b:3c:4d:5e", "001a2b3c4d5e", "8c2a:8e03:00f1:9b77", "fe80:0000:0000:0000:021a:2bff:fe3c:4d5e",
    "192.168.17.5", "c0a8:0105", "GPU-1b2c3d4e-1111-2222-3333-444455556666", "1b2c3d4e-1111",
    "fd12:3456:789a::17", HOST, "example.org", "/home/owner", "SN0123456789",
)  # fmt: skip


def owned() -> dict[str, Any]:
    """A PC with its owner's names all over it."""
    document = desktop(gpu=CHIPSET_X4, nic=CPU_X16)
    files, links = document["files"], document["links"]
    nic = "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0"
    port = f"{nic}/infiniband/mlx5_0/ports/1"
    files[f"{port}/gids/1"] = "fe80:0000:0000:0000:021a:2bff:fe3c:4d5e"
    files[f"{port}/gids/2"] = "0000:0000:0000:0000:0000:0000:0000:0000"
    for name in ("mtu", "operstate"):
        files[f"{nic}/net/enx001a2b3c4d5e/{name}"] = "9000" if name == "mtu" else "up"
    links["/sys/class/net/enx001a2b3c4d5e"] = f"{nic}/net/enx001a2b3c4d5e"
    links[f"{nic}/net/enx001a2b3c4d5e/device"] = nic
    files["/sys/class/dmi/id/product_name"] = f"PC of {HOST} 00:1a:2b:3c:4d:5e 8c2a:8e03:00f1:9b77"
    files["/proc/mounts"] = (
        "/dev/root / ext4 rw 0 0\n192.168.17.5:/home/owner /home/owner/models nfs4 rw,proto=tcp,"
        "addr=192.168.17.5 0 0\n"
        "[fd12:3456:789a::17]:/x /x nfs4 rw,clientaddr=fd12:3456:789a::17,proto=rdma 0 0\n"
    )
    files["/proc/self/maps"] = (
        "7f0-7f1 r-xp 0 08:01 1 /home/owner/lib/libfabric.so.1.27.0\n"
        "7f2-7f3 r-xp 0 08:01 1 /home/owner/venv/lib/python3.11/site-packages/nvidia/libnccl.so.2.21.5\n"
        "7f4-7f5 r-xp 0 08:01 1 /home/owner/secret.so\n"
    )
    files["/proc/self/status"] = f"Name:\t{HOST}\nUid:\t1000\nCapEff:\t0000000000004000\n"
    files["/proc/driver/nvidia/gpus/0000:01:00.0/information"] = (
        "Model: \t RTX\nGPU UUID: \t GPU-1b2c3d4e-1111-2222-3333-444455556666\nSerial: SN0123456789\n"
    )
    files["/proc/driver/nvidia/version"] = (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.10.01  "
        f"Release  (root@{HOST}.example.org)\n"
    )
    files["/usr/lib64/libibverbs.so.1.14.50.0"] = ""
    document["binary"][f"{nic}/config"] = config_with_serial(SERIAL)
    return document


def test_nothing_that_names_the_owner_is_saved() -> None:
    document = owned()
    given = json.dumps(document)
    for name in NAMING:
        assert name in given, f"{name} is not in the machine that is to be cleaned"
    saved = save(RecordedTree(document), "a machine", HOST)
    text = json.dumps(saved)
    for name in NAMING:
        assert name not in text, text[max(text.index(name) - 200, 0) :][:400] if name in text else ""
    configs = [value for path, value in saved["binary"].items() if "0000:02:00.0" in path]
    assert configs == [config_with_serial(bytes(8))]
    assert "secret.so" not in text


def test_a_saved_machine_is_the_machine() -> None:
    before = examine(RecordedTree(owned()))
    saved = save(RecordedTree(owned()), "a machine", HOST)
    after = examine(RecordedTree(json.loads(json.dumps(saved))))
    assert after.devices == before.devices
    assert after.pairs == before.pairs
    assert after.nics == before.nics
    assert [(mount.fstype, mount.proto) for mount in after.mounts] == [
        (mount.fstype, mount.proto) for mount in before.mounts
    ]
    assert {(one.name, one.version, one.origin) for one in after.libraries} == {
        ("libfabric", "1.27.0", "loaded"),
        ("libnccl", "2.21.5", "engine"),
        ("libibverbs", "1.14.50.0", "system"),
    }
    assert {one.name for one in before.libraries} == {one.name for one in after.libraries}
    assert (after.limits, after.gpu_driver, after.gpu_nodes) == (
        before.limits,
        before.gpu_driver,
        before.gpu_nodes,
    )
    assert [finding.code for finding in findings(after)] == [finding.code for finding in findings(before)]


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_that_is_found_is_lost_by_saving(name: str) -> None:
    """Of whole machines with a GPU whose window is small: addresses of windows name nobody."""
    document = recorded(name, "bar1")
    before = examine(RecordedTree(document))
    after = examine(RecordedTree(save(RecordedTree(document), "a machine", HOST)))
    assert (after.devices, after.gpus, after.nics) == (before.devices, before.gpus, before.nics)
    codes = [finding.code for finding in findings(before)]
    assert "bar1-small" in codes
    assert [finding.code for finding in findings(after)] == codes


@pytest.mark.parametrize("host", ["dev", "node", "net", "class", "sys", "proc"])
def test_a_host_that_is_called_as_a_folder_is(host: str) -> None:
    before = examine(RecordedTree(owned()))
    after = examine(RecordedTree(save(RecordedTree(owned()), "a machine", host)))
    assert (after.devices, after.nics, after.gpu_nodes) == (before.devices, before.nics, before.gpu_nodes)
    assert len(after.nets) == len(before.nets) == 1


def test_devices_that_are_named_by_addresses_stay_apart() -> None:
    document = owned()
    nic = "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0"
    for name in ("enx001a2b3c4d5f", "enx001a2b3c4d60"):
        document["files"][f"{nic}/net/{name}/operstate"] = "up"
        document["links"][f"/sys/class/net/{name}"] = f"{nic}/net/{name}"
        document["links"][f"{nic}/net/{name}/device"] = nic
    saved = save(RecordedTree(document), "a machine", HOST)
    assert len(examine(RecordedTree(saved)).nets) == 3
    assert "001a2b3c4d" not in json.dumps(saved)


def test_saving_again_changes_nothing() -> None:
    saved = save(RecordedTree(owned()), "a machine", HOST)
    again = save(RecordedTree(saved), "a machine", HOST)
    assert {path: text for path, text in again["files"].items() if text} == {
        path: text for path, text in saved["files"].items() if text
    }


def test_this_machine_is_saved_without_its_names() -> None:
    text = json.dumps(save(live(), "this"))
    host = socket.gethostname()
    if len(host) > 3:
        assert host not in text
    for file in Path("/sys/class/net").glob("*/address"):
        address = file.read_text().strip()
        if address.strip("0:"):
            assert address not in text
    machine = examine(live())
    assert len(examine(RecordedTree(json.loads(text))).devices) == len(machine.devices)


@pytest.mark.parametrize("kind", ["link-local", "other", "ipv4"])
def test_the_kind_of_a_gid_is_kept(kind: str) -> None:
    gid = {"link-local": "fe80:0000:0000:0000:1:2:3:4", "other": "fd00:1:2:3:4:5:6:7",
           "ipv4": "0000:0000:0000:0000:0000:ffff:0a01:0203"}[kind]  # fmt: skip
    document = desktop(gpu=CHIPSET_X4, nic=CPU_X16)
    path = next(path for path in document["files"] if path.endswith("/gids/0"))
    document["files"][path] = gid
    saved = save(RecordedTree(document), "a machine", HOST)
    assert saved["files"][path] != gid
    assert examine(RecordedTree(saved)).nics[0].ports[0].gids == (f"{kind}/v2",)
