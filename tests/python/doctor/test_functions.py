"""Cards of several functions (two ports in a bond, virtual functions), and ports that wait or speak iWARP."""

from __future__ import annotations

from typing import Any

import pytest

from kvik.doctor import findings
from tests.python.doctor.small import CPU_X16, desktop, examined

PORT = "/sys/devices/pci0000:00/0000:00:02.0"
FIRST = f"{PORT}/0000:02:00.0"
WIDE = ("0000:00:02.0", 16)


def with_function(number: int, **links: str) -> dict[str, Any]:
    """A healthy PC whose NIC has one more function, without an RDMA device."""
    document = desktop(gpu=CPU_X16, nic=WIDE)
    files, address = document["files"], f"0000:02:00.{number}"
    document["links"][f"/sys/bus/pci/devices/{address}"] = f"{PORT}/{address}"
    files.update(
        {
            path.replace(FIRST, f"{PORT}/{address}"): text
            for path, text in files.items()
            if path.startswith(FIRST) and "/infiniband/" not in path and "/net/" not in path
        }
    )
    document["links"].update({f"{PORT}/{address}/{name}": target for name, target in links.items()})
    return document


def codes(document: dict[str, Any]) -> list[str]:
    return [finding.code for finding in findings(examined(document))]


def bonded(first: str | None, second: str | None) -> dict[str, Any]:
    """Two ports, each with a network device that is in this bond."""
    document = with_function(1, driver="/sys/bus/pci/drivers/mlx5_core")
    for number, bond in enumerate((first, second)):
        net = f"{PORT}/0000:02:00.{number}/net/enp2s{number}"
        document["files"][f"{net}/mtu"] = "9000"
        if bond is not None:
            document["links"][f"{net}/master"] = f"/sys/devices/virtual/net/{bond}"
    return document


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("bond0", "bond0", []),
        ("bond0", "bond1", ["nic-without-driver"]),
        (None, "bond0", ["nic-without-driver"]),
        (None, None, ["nic-without-driver"]),
    ],
)
def test_two_ports_in_a_bond_have_one_rdma_device(
    first: str | None, second: str | None, found: list[str]
) -> None:
    assert codes(bonded(first, second)) == found


def test_a_bond_of_another_network_namespace_is_not_seen() -> None:
    document = with_function(1, driver="/sys/bus/pci/drivers/mlx5_core")
    document["files"]["/.dockerenv"] = ""
    document["files"] = {path: text for path, text in document["files"].items() if "/net/" not in path}
    assert codes(document) == []
    del document["links"][f"{PORT}/0000:02:00.1/driver"]
    assert codes(document) == ["nic-without-driver"]


def test_a_virtual_function_is_for_who_it_was_given_to() -> None:
    assert codes(with_function(2)) == ["nic-without-driver"]
    assert codes(with_function(2, physfn="../0000:02:00.0")) == []


def test_an_unused_virtual_function_is_no_card_without_a_link() -> None:
    """The one above the eighth has a device number of its own."""
    document = with_function(0)
    there, address = f"{PORT}/0000:02:01.0", "0000:02:01.0"
    document["links"][f"/sys/bus/pci/devices/{address}"] = there
    for path, text in list(document["files"].items()):
        if path.startswith(FIRST):
            document["files"][path.replace(FIRST, there).replace("mlx5_0", "mlx5_9")] = text
    rdma = f"{there}/infiniband/mlx5_9"
    document["links"]["/sys/class/infiniband/mlx5_9"] = rdma
    document["links"][f"{rdma}/device"] = f"../../../{address}"
    document["files"][f"{rdma}/ports/1/state"] = "1: DOWN"
    document["files"]["/sys/class/infiniband_verbs/uverbs9/ibdev"] = "mlx5_9"
    document["files"]["/dev/infiniband/uverbs9"] = ""
    assert codes(document) == ["nic-port-down"]
    document["links"][f"{there}/physfn"] = "../0000:02:00.0"
    assert codes(document) == []


def test_an_iwarp_device_is_no_nic_of_kviks() -> None:
    """An X722 of the board: Ethernet, one GID of its MAC, and no GID of RoCE's whatever its address is."""
    document = desktop(gpu=CPU_X16, nic=WIDE)
    rdma = f"{FIRST}/infiniband/mlx5_0"
    document["files"][f"{rdma}/ports/1/gids/0"] = "0015:17ff:0000:0000:0000:0000:0000:0000"
    document["files"][f"{rdma}/ports/1/gid_attrs/types/0"] = "IB/RoCE v1"
    document["files"][f"{FIRST}/vendor"] = "0x8086"
    assert codes(document) == ["roce-gid-missing"]
    document["files"][f"{rdma}/node_type"] = "4: RNIC"
    machine = examined(document)
    assert findings(machine) == []
    assert machine.nics == ()
    said = {one.path: one.reason for one in machine.unread}
    assert "iWARP" in said["/sys/class/infiniband/mlx5_0"]


@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED"])
def test_a_link_without_a_subnet_manager_needs_no_cable(state: str) -> None:
    document = desktop(gpu=CPU_X16, nic=WIDE)
    port = f"{FIRST}/infiniband/mlx5_0/ports/1"
    document["files"].update({f"{port}/link_layer": "InfiniBand", f"{port}/state": state})
    (finding,) = findings(examined(document))
    assert finding.code == "nic-port-down"
    assert "no subnet manager" in finding.fact
    assert state in finding.fact
    assert "opensm" in finding.advice
    assert "cable" not in finding.advice
