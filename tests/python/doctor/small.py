"""Small machines for tests: recordings of desktop PCs, and machines of a few GPUs and NICs made directly."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from kvik.doctor.examining import examine
from kvik.doctor.model import Gpu, Limits, Link, Machine, Nic, PciDevice, Port
from kvik.doctor.tree import RecordedTree

CPU_X16, CPU_X4, CHIPSET_X4 = ("0000:00:01.0", 16), ("0000:00:06.0", 4), ("0000:00:1c.4", 4)
Slot = tuple[str, int]


def desktop(gpu: Slot, nic: Slot) -> dict[str, Any]:
    """A PC of an H670 board: a GPU of 16 GT/s and a NIC of 100 Gbit/s and 8 GT/s, each in a slot."""
    files: dict[str, str] = {"/sys/class/dmi/id/board_name": "H670 board", "/dev/null": ""}
    links: dict[str, str] = {}
    _function(files, links, "0000:00:1f.0", "", ("0x8086", "0x7a85", "0x060100"), None)
    ends = (
        ("0000:01:00.0", gpu, ("0x10de", "0x27b2", "0x030000"), "16.0"),
        ("0000:02:00.0", nic, ("0x15b3", "0x1017", "0x020000"), "8.0"),
    )
    for address, (port, lanes), ids, speed in ends:
        _function(files, links, port, "", ("0x8086", "0x460d", "0x060400"), (speed, lanes, "16.0", lanes))
        _function(files, links, address, f"/{port}", ids, (speed, lanes, speed, 16))
    path = f"/sys/devices/pci0000:00/{nic[0]}/0000:02:00.0"
    rdma = f"{path}/infiniband/mlx5_0"
    links["/sys/class/infiniband/mlx5_0"] = f"../../{rdma.removeprefix('/sys/')}"
    links[f"{rdma}/device"] = "../../../0000:02:00.0"
    files[f"{rdma}/ports/1/rate"] = "100 Gb/sec (4X EDR)"
    files[f"{rdma}/ports/1/state"] = "4: ACTIVE"
    files[f"{rdma}/ports/1/link_layer"] = "Ethernet"
    files[f"{rdma}/ports/1/counters/symbol_error"] = "0"
    files[f"{rdma}/ports/1/gids/0"] = "0000:0000:0000:0000:0000:ffff:c0a8:0105"
    files[f"{rdma}/ports/1/gid_attrs/types/0"] = "RoCE v2"
    files[f"{path}/net/enp2s0/mtu"] = "9000"
    files["/sys/class/infiniband_verbs/uverbs0/ibdev"] = "mlx5_0"
    files["/dev/infiniband/uverbs0"] = ""
    files["/proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.10.01 "
    )
    files["/dev/nvidia0"] = ""
    return {"format": "kvik-machine/1", "name": "desktop", "files": files, "links": links, "binary": {}}


def _function(
    files: dict[str, str],
    links: dict[str, str],
    address: str,
    above: str,
    ids: tuple[str, str, str],
    link: tuple[str, int, str, int] | None,
) -> None:
    path = f"/sys/devices/pci0000:00{above}/{address}"
    links[f"/sys/bus/pci/devices/{address}"] = f"../../../{path.removeprefix('/sys/')}"
    files.update(zip((f"{path}/vendor", f"{path}/device", f"{path}/class"), ids, strict=True))
    if link:
        files[f"{path}/current_link_speed"] = f"{link[0]} GT/s PCIe"
        files[f"{path}/current_link_width"] = str(link[1])
        files[f"{path}/max_link_speed"] = f"{link[2]} GT/s PCIe"
        files[f"{path}/max_link_width"] = str(link[3])


def examined(document: dict[str, Any]) -> Machine:
    """The machine of a recording."""
    return examine(RecordedTree(document))


def config_with_serial(serial: bytes) -> str:
    """Config space, in base64, with the Device Serial Number capability."""
    space = bytearray(512)
    space[0x100:0x104] = (0x03 | 1 << 16).to_bytes(4, "little")
    space[0x104:0x10C] = serial
    return base64.b64encode(bytes(space)).decode("ascii")


def made(gpus: Iterable[tuple[int, int]], nics: Iterable[tuple[int, int]]) -> Machine:
    """GPUs and NICs, each by NUMA node and number of the switch on that node that it is below."""
    devices: dict[str, PciDevice] = {}
    found_gpus, found_nics = [], []
    for kind, ends in (("gpu", gpus), ("nic", nics)):
        for index, (node, switch) in enumerate(ends):
            root, up = f"0000:00:{node * 8 + switch:02x}.0", f"0000:{16 + node * 8 + switch:02x}:00.0"
            address = f"0000:{64 * (1 + (kind == 'nic')) + index:02x}:00.0"
            for name, chain in ((root, ()), (up, (root,)), (address, (up, root))):
                end = name == address
                devices[name] = PciDevice(
                    name, 1, 1, 0, kind if end else "bridge", chain, Link(16.0, 16, 16.0, 16), node
                )
            if kind == "gpu":
                found_gpus.append(Gpu(address, "a GPU", node, None))
            else:
                port = Port(1, 100.0, "4: ACTIVE", "InfiniBand", ())
                found_nics.append(Nic(f"nic{index}", address, node, "driver", (port,), None, None))
    return Machine(
        board="", chipset=None, dmi_gbs=None, devices=devices, nics=tuple(found_nics), gpus=tuple(found_gpus),
        nvmes=(), nets=(), nodes=(), mounts=(), limits=Limits(), libraries=(), modules=(), gpu_driver=None,
        gpu_driver_open=False, container=False, gpu_nodes=None, pairs=(), unread=(),
    )  # fmt: skip
