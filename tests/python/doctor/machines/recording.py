"""A short description of a machine, and the recorded machine (`kvik-machine/1`) that it stands for.

Paths and forms of the files are the kernel's: Documentation/ABI/testing/sysfs-bus-pci,
stable/sysfs-class-infiniband, proc(5). A description names no host: there are no serials, MAC addresses or
GUIDs in it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.python.doctor.machines.modules import cmis, link_settings, qsfp

FORMAT = "kvik-machine/1"
GIB = 1 << 30
Speed = tuple[float, int]  # GT/s a lane, lanes
SITE = "/elsewhere/lib/python3/site-packages"
NCCL = ("nvidia_nccl_cu12-2.27.3.dist-info/METADATA", "nvidia/nccl/lib/libnccl.so.2")
# As `strings` shows them: libfabric 1.27 of the EFA installer, its plug-in of NCCL's, Debian's libibverbs.
WORDS = {
    "/libfabric.so.1.27.0": "FABRIC_1.0\nFABRIC_1.6\nFABRIC_1.7",
    "/libnccl-net-ofi.so": "FABRIC_1.0\nFABRIC_1.7",
    "/libibverbs.so.1.14.50.0": "/usr/lib/x86_64-linux-gnu/libibverbs",
}


@dataclass
class Device:
    """A PCI function. `now` and `most` are its link and what it could have; None where it has no link."""

    address: str
    kind: str
    """`gpu`, `nic` (RoCE), `efa`, `ena`, `nvme`, `bridge` or `lpc`."""
    vendor: int
    device: int
    now: Speed | None = None
    most: Speed | None = None
    numa: int = -1
    driver: str = ""
    below: list[Device] = field(default_factory=list)
    acs: int = 0
    """ACS control: bit 2 redirects requests of peers, bit 3 completions."""
    bar1: int = 0
    name: str = ""
    """Of a GPU its model; of a NIC its RDMA device."""
    rate: str = ""
    """Of a NIC, as `rate` says it."""
    net: str = ""
    mtu: int = 0
    gids: tuple[tuple[str, str], ...] = ()
    state: str = "4: ACTIVE"
    counters: dict[str, int] = field(default_factory=dict)
    cable: bytes = b""
    """The memory of what is plugged in; by default a cable of the port's rate."""


@dataclass
class Machine:
    """A machine. What is not said is as on a healthy one."""

    name: str
    board: tuple[str, str]
    devices: list[Device]
    nodes: int = 1
    cpus: int = 16
    memory: int = 64 * GIB
    iommu: str = "identity"
    memlock: str = "unlimited"
    cmdline: str = "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro iommu=pt"
    modules: tuple[str, ...] = ("nvidia", "nvidia_peermem", "ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib")
    nvidia: str = "570.133.20"
    nvidia_open: bool = True
    libcuda: str = "570.133.20"
    clock: str = "tsc"
    root: str = "ext4"
    mounts: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0",)
    packages: tuple[str, ...] = NCCL
    """Files of the serving engine's Python packages, below their folder."""
    words: dict[str, str] = field(default_factory=lambda: dict(WORDS))
    """What is in a library, by the end of its path."""
    rdma_files: bool = True
    gpu_files: bool = True
    cpu_max: str = "max 100000"
    memory_max: str = "max"
    allowed: str = ""
    """Processors that the process may use; by default all."""

    def every(self) -> Iterator[Device]:
        """Each PCI function, from the root down."""
        rest = list(self.devices)
        while rest:
            device = rest.pop(0)
            yield device
            rest = device.below + rest

    def those(self, *kinds: str) -> list[Device]:
        """The functions of these kinds."""
        return [device for device in self.every() if device.kind in kinds]


def bridge(address: str, below: list[Device], now: Speed, **more: Any) -> Device:
    """A root port or a switch's port. `most` is what its slot can carry."""
    chosen = {"vendor": 0x8086, "device": 0x460D, "most": now, "driver": "pcieport", **more}
    return Device(address, "bridge", now=now, below=below, **chosen)


def record(machine: Machine) -> dict[str, Any]:
    """The recorded machine, as a JSON document."""
    return _Recording(machine).document()


_CLASSES = {
    "gpu": 0x030000,
    "nic": 0x020000,
    "efa": 0x020000,
    "ena": 0x020000,
    "nvme": 0x010802,
    "bridge": 0x060400,
    "lpc": 0x060100,
}
# By Gbit/s: a cable, and the kernel's bits of link modes that such a port has (KR, SR, CR).
_CABLES = {100: (qsfp(), (36, 37, 38)), 400: (cmis(), (85, 86, 89))}
_RESOURCES = 13  # lines: six BARs, the ROM, and the windows of bridges


def _speed(value: float) -> str:
    return f"{value:.1f} GT/s PCIe"


class _Recording:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.binary: dict[str, str] = {}
        self.groups = 0  # and how many of each were recorded so far
        self.rdma = 0
        self.nvmes = 0
        self.gpus = 0

    def document(self) -> dict[str, Any]:
        for device in self.machine.devices:
            domain_bus = device.address.rpartition(":")[0]
            self._device(device, f"/sys/devices/pci{domain_bus}")
        self._system()
        self._limits()
        self._software()
        return {
            "format": FORMAT,
            "name": self.machine.name,
            "files": self.files,
            "links": self.links,
            "binary": self.binary,
        }

    def _put(self, folder: str, **files: object) -> None:
        self.files.update({f"{folder}/{name}": f"{text}\n" for name, text in files.items()})

    def _device(self, device: Device, above: str) -> None:
        path = f"{above}/{device.address}"
        self.links[f"/sys/bus/pci/devices/{device.address}"] = f"../../..{path.removeprefix('/sys')}"
        code = (
            0x030200
            if device.kind == "gpu" and not device.below and device.numa >= 0
            else _CLASSES[device.kind]
        )
        self._put(path, vendor=f"{device.vendor:#06x}", device=f"{device.device:#06x}")
        self.files[f"{path}/class"] = f"{code:#08x}\n"
        self._put(path, numa_node=device.numa, local_cpulist=self._cpus(max(device.numa, 0)))
        if device.now and device.most:
            self._put(path, current_link_speed=_speed(device.now[0]), current_link_width=device.now[1])
            self._put(path, max_link_speed=_speed(device.most[0]), max_link_width=device.most[1])
        if device.driver:
            self.links[f"{path}/driver"] = f"/sys/bus/pci/drivers/{device.driver}"
        group = f"/sys/kernel/iommu_groups/{self.groups}"
        self.groups += 1
        self.links[f"{path}/iommu_group"] = group
        self._put(group, type=self.machine.iommu)
        self.binary[f"{path}/config"] = base64.b64encode(_config(device)).decode()
        if device.kind == "gpu":
            self._gpu(device, path)
        elif device.kind == "nvme":
            self._nvme(device, path)
        elif device.kind in ("nic", "efa", "ena"):
            self._nic(device, path)
        for below in device.below:
            self._device(below, path)

    def _gpu(self, device: Device, path: str) -> None:
        zero = f"{0:#018x} {0:#018x} {0:#018x}"
        lines = [zero] * _RESOURCES
        lines[0] = f"{0x82000000:#018x} {0x82FFFFFF:#018x} {0x40200:#018x}"
        start = 0x4000000000
        lines[1] = f"{start:#018x} {start + device.bar1 - 1:#018x} {0x14220C:#018x}"
        lines[3] = f"{start * 2:#018x} {start * 2 + (32 << 20) - 1:#018x} {0x14220C:#018x}"
        self._put(path, resource="\n".join(lines))
        if device.vendor == 0x10DE:
            self._put(
                f"/proc/driver/nvidia/gpus/{device.address}",
                information=f"Model: \t\t {device.name}\nBus Location: \t {device.address}",
            )
            if self.machine.gpu_files:
                self.files[f"/dev/nvidia{self.gpus}"] = ""
            self.gpus += 1

    def _nvme(self, device: Device, path: str) -> None:
        name = f"nvme{self.nvmes}"
        self.nvmes += 1
        self.links[f"/sys/class/nvme/{name}"] = f"{path}/nvme/{name}"
        self.links[f"{path}/nvme/{name}/device"] = f"../../../{device.address}"
        self._put(f"{path}/nvme/{name}", state="live", transport="pcie")

    def _nic(self, device: Device, path: str) -> None:
        if device.net:
            net = f"{path}/net/{device.net}"
            self.links[f"/sys/class/net/{device.net}"] = net
            self.links[f"{net}/device"] = f"../../../{device.address}"
            up = device.state == "4: ACTIVE"
            speed = int(device.rate.split()[0]) * 1000 if device.rate and up else -1
            self._put(net, mtu=device.mtu, operstate="up" if up else "down", speed=speed)
            if speed // 1000 in _CABLES:
                cable, modes = _CABLES[speed // 1000]
                asked = {"link": link_settings(modes, modes, speed=speed), "module": device.cable or cable}
                for name, said in asked.items():
                    self.binary[f"/ioctl/ethtool/{device.net}/{name}"] = base64.b64encode(said).decode()
        if not device.name:
            return
        rdma = f"{path}/infiniband/{device.name}"
        self.links[f"/sys/class/infiniband/{device.name}"] = rdma
        self.links[f"{rdma}/device"] = f"../../../{device.address}"
        port = f"{rdma}/ports/1"
        efa = device.kind == "efa"
        physical = "5: LinkUp" if device.state == "4: ACTIVE" else "3: Disabled"
        self._put(port, rate=device.rate, state=device.state, phys_state=physical)
        self._put(port, link_layer="Unspecified" if efa else "Ethernet")
        for index, (gid, kind) in enumerate(device.gids):
            self.files[f"{port}/gids/{index}"] = f"{gid}\n"
            self.files[f"{port}/gid_attrs/types/{index}"] = f"{kind}\n"
            self.files[f"{port}/gid_attrs/ndevs/{index}"] = f"{device.net}\n"
        # EFA counts in hw_counters only (drivers/infiniband/hw/efa/efa_verbs.c).
        hardware = (
            {"rx_drops": 0, "rx_pkts": 10_000_000, "retrans_timeout_events": 0}
            if efa
            else {"out_of_sequence": 0, "packet_seq_err": 0, "local_ack_timeout_err": 0}
        )
        usual = (
            {}
            if efa
            else {"symbol_error": 0, "port_rcv_errors": 0, "port_rcv_packets": 10_000_000, "link_downed": 1}
        )
        for folder, counts in (("counters", usual), ("hw_counters", hardware)):
            chosen = {**counts, **{name: count for name, count in device.counters.items() if name in counts}}
            self._put(f"{port}/{folder}", **chosen)
        node = f"uverbs{self.rdma}"
        self.rdma += 1
        self._put(f"/sys/class/infiniband_verbs/{node}", ibdev=device.name)
        if self.machine.rdma_files:
            self.files[f"/dev/infiniband/{node}"] = ""

    def _cpus(self, node: int) -> str:
        each = self.machine.cpus // self.machine.nodes
        return f"{node * each}-{node * each + each - 1}"

    def _system(self) -> None:
        machine = self.machine
        self._put("/sys/class/dmi/id", sys_vendor=machine.board[0], product_name=machine.board[1])
        self._put("/sys/class/dmi/id", board_vendor=machine.board[0], board_name=machine.board[1])
        root = "/sys/devices/system/node"
        for node in range(machine.nodes):
            kib = machine.memory // machine.nodes >> 10
            distances = " ".join("10" if other == node else "21" for other in range(machine.nodes))
            self._put(f"{root}/node{node}", cpulist=self._cpus(node), distance=distances)
            self._put(f"{root}/node{node}", meminfo=f"Node {node} MemTotal:       {kib} kB")
        self._put("/sys/devices/system/clocksource/clocksource0", current_clocksource=machine.clock)
        for module in machine.modules:
            self._put(f"/sys/module/{module}", initstate="live")

    def _limits(self) -> None:
        machine = self.machine
        self._put("/proc", cmdline=machine.cmdline)
        kib = machine.memory >> 10
        self._put(
            "/proc",
            meminfo=f"MemTotal:       {kib} kB\nHugePages_Total:       0\nHugepagesize:       2048 kB",
            cpuinfo="processor\t: 0\nflags\t\t: fpu constant_tsc nonstop_tsc",
        )
        head = "Limit                     Soft Limit           Hard Limit           Units"
        self.files["/proc/self/limits"] = (
            f"{head}\nMax locked memory         {machine.memlock:<20} {machine.memlock:<20} bytes\n"
        )
        allowed = machine.allowed or f"0-{machine.cpus - 1}"
        self.files["/proc/self/status"] = (
            f"Name:\tpython3\nCapEff:\t0000000000000000\nCpus_allowed_list:\t{allowed}\n"
        )
        self._put("/proc", **{"self/cgroup": "0::/user.slice", "1/cgroup": "0::/init.scope"})
        self._put("/sys/fs/cgroup", **{"cgroup.controllers": "cpuset cpu memory"})
        groups = {"cpu.max": machine.cpu_max, "memory.max": machine.memory_max}
        self._put("/sys/fs/cgroup/user.slice", **groups)
        self.files["/proc/self/mountinfo"] = "22 1 8:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw\n"
        self.files["/proc/self/maps"] = ""
        self.files["/proc/sys/kernel/yama/ptrace_scope"] = "1\n"
        mounts = (f"/dev/root / {machine.root} rw,relatime 0 0", *machine.mounts)
        self.files["/proc/mounts"] = "\n".join(mounts) + "\n"

    def _software(self) -> None:
        machine = self.machine
        self.files["/dev/null"] = ""
        if any(gpu.vendor == 0x10DE for gpu in machine.those("gpu")):
            kind = "Open Kernel Module for x86_64" if machine.nvidia_open else "x86_64 Kernel Module"
            self._put(
                "/proc/driver/nvidia",
                version=f"NVRM version: NVIDIA UNIX {kind}  {machine.nvidia}  Release Build",
            )
            self.files[f"/usr/lib/x86_64-linux-gnu/libcuda.so.{machine.libcuda}"] = ""
        for library in (*machine.libraries, *(f"{SITE}/{name}" for name in machine.packages)):
            said = (text for end, text in machine.words.items() if library.endswith(end))
            self.files[library] = next(said, "")
        if any("/libibverbs.so" in library for library in machine.libraries):
            self.files["/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so"] = ""


def _config(device: Device) -> bytes:
    """Config space with the PCI Express capability and, of bridges, ACS (PCI Express Base Specification)."""
    space = bytearray(4096)
    space[0:4] = device.vendor.to_bytes(2, "little") + device.device.to_bytes(2, "little")
    space[0x0E] = 1 if device.kind == "bridge" else 0
    if not device.now:
        return bytes(space)
    space[0x06] = 0x10  # a list of capabilities
    space[0x34] = 0x40
    space[0x40:0x42] = bytes((0x10, 0))
    space[0x48:0x4A] = (1 << 5).to_bytes(2, "little")  # Device Control: payload of 256 bytes
    if device.kind == "bridge":
        space[0x100:0x104] = (0x0D | 1 << 16).to_bytes(4, "little")
        space[0x104:0x106] = (0x5F).to_bytes(2, "little")
        space[0x106:0x108] = device.acs.to_bytes(2, "little")
    return bytes(space)
