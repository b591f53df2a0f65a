"""Makes a `Machine` of a tree."""

from __future__ import annotations

import re
from dataclasses import replace

from kvik.doctor import host
from kvik.doctor.cables import read_cables
from kvik.doctor.containers import container_marks, not_there
from kvik.doctor.libraries import read_libraries
from kvik.doctor.links import pairs, pcie_gbs
from kvik.doctor.model import Gpu, Machine, PciDevice
from kvik.doctor.pci import NVIDIA, chipset_of, read_devices
from kvik.doctor.reader import Reader
from kvik.doctor.tree import Tree

_DMI = "/sys/class/dmi/id"
_NVIDIA = "/proc/driver/nvidia"


def examine(tree: Tree) -> Machine:
    """Read a machine. Nothing raises: a fact that cannot be read is in `unread`, with the reason."""
    reader = Reader(tree)
    devices = read_devices(reader)
    names = (
        reader.text(f"{_DMI}/{name}") for name in ("sys_vendor", "product_name", "board_vendor", "board_name")
    )
    board = " ".join(dict.fromkeys(name for name in names if name))
    chipset, speed, lanes = chipset_of(reader, board)
    marks = container_marks(reader)
    driver, is_open = _gpu_driver(reader, devices)
    machine = Machine(
        board=board,
        chipset=chipset,
        dmi_gbs=pcie_gbs(speed, lanes) if speed and lanes else None,
        devices=devices,
        nics=host.read_nics(reader, devices),
        gpus=tuple(_gpu(reader, device) for device in devices.values() if device.kind == "gpu"),
        nvmes=host.read_nvmes(reader, devices),
        nets=read_cables(reader, host.read_nets(reader)),
        nodes=host.read_nodes(reader),
        mounts=host.read_mounts(reader),
        limits=host.read_limits(reader),
        libraries=read_libraries(reader),
        modules=tuple(name for name in reader.names("/sys/module") if name in host.MODULES),
        gpu_driver=driver,
        gpu_driver_open=is_open,
        container=bool(marks),
        container_marks=marks,
        not_there=not_there(reader) if marks else (),
        gpu_nodes=_gpu_nodes(reader),
        pairs=(),
        unread=(),
    )
    return replace(machine, pairs=pairs(machine), unread=reader.missing)


def _gpu(reader: Reader, device: PciDevice) -> Gpu:
    name = f"{device.vendor:04x}:{device.device:04x}"
    if device.vendor == NVIDIA:
        said = reader.text(f"{_NVIDIA}/gpus/{device.address}/information") or ""
        model = re.search(r"^Model:\s*(.+)$", said, re.MULTILINE)
        name = model[1].strip() if model else name
    return Gpu(device.address, name, device.numa, device.bar1_bytes)


def _gpu_driver(reader: Reader, devices: dict[str, PciDevice]) -> tuple[str | None, bool]:
    """Version of NVIDIA's kernel driver, and whether it is the open one (which exports dma-buf)."""
    if not any(device.vendor == NVIDIA for device in devices.values()):
        return None, False
    said = reader.text(f"{_NVIDIA}/version") or ""
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", said)
    return (version[1] if version else None), "Open Kernel Module" in said


def _gpu_nodes(reader: Reader) -> int | None:
    names = reader.names("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names) if names else None
