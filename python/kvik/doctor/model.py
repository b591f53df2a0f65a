"""What a machine is to a transfer: plain data, made by `kvik.doctor.examine`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """The PCIe link above a device. Speeds in GT/s a lane, widths in lanes; None where not readable."""

    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None


@dataclass(frozen=True)
class PciDevice:
    """A device of the PCIe tree, endpoint or bridge."""

    address: str
    vendor: int
    device: int
    class_code: int
    kind: str
    """`gpu`, `nic`, `nvme`, `bridge` or `other`."""
    chain: tuple[str, ...]
    """The bridges above it, nearest first."""
    link: Link
    numa: int | None
    """None where the kernel says -1 or nothing."""
    physical: str | None = None
    """Of a virtual function (SR-IOV) the function that it is one of, where this system has that one."""
    driver: str | None = None
    iommu: str | None = None
    """The type of its IOMMU group's domain (`identity`, `DMA`, `DMA-FQ`); None without an IOMMU."""
    bar1_bytes: int | None = None
    acs_redirects: bool | None = None
    """Whether the port sends peer requests up to the root (ACS); None where config space was not readable."""
    max_payload: int | None = None
    chipset: bool = False
    """Whether its path to the CPU goes through the chipset."""
    attachment: str | None = None
    """How it is attached, where that is not a slot: `CPU x4 port (M.2 or OCuLink)`, `external`."""

    @property
    def card(self) -> str:
        """The address of its card: without the function, and of a virtual one that of the physical one."""
        return (self.physical or self.address).rpartition(".")[0]


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device."""

    number: int
    rate_gbits: float | None
    state: str
    layer: str
    gids: tuple[str, ...]
    """Of each GID that is set its class: `ipv4`, `link-local` or `other`, with `/v1` or `/v2` for RoCE."""
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether it has a link."""
        return self.state.endswith("ACTIVE")


@dataclass(frozen=True)
class Nic:
    """An RDMA device of the kernel, or (without ports) a PCI function that is one and has no such device."""

    name: str
    address: str | None
    """Of its PCI function; None for a device in software."""
    numa: int | None
    driver: str
    ports: tuple[Port, ...]
    mtu: int | None
    """Of its network device; None where it has none, as EFA."""
    node: str | None
    """Its file `/dev/infiniband/uverbsN`, where it is there."""

    @property
    def rate_gbits(self) -> float:
        """Of all ports with a link."""
        return sum(port.rate_gbits or 0.0 for port in self.ports if port.active)


@dataclass(frozen=True)
class Gpu:
    """A GPU, by the address of its PCI function."""

    address: str
    name: str
    numa: int | None
    bar1_bytes: int | None


@dataclass(frozen=True)
class Nvme:
    """An NVMe controller."""

    name: str
    address: str
    numa: int | None


@dataclass(frozen=True)
class Cable:
    """A module or cable as its own memory describes it."""

    form: str
    """`SFP`, `QSFP28`, `OSFP` and so on."""
    vendor: str
    part: str
    technology: str
    """`optical`, `passive copper` or `active copper`."""
    length_m: float | None
    """Of a cable that cannot be taken out of its module."""
    rate_gbits: int | None
    """The highest that it names; None where its codes say none."""


@dataclass(frozen=True)
class NetDevice:
    """A network device with hardware behind it. `speed_mbits` is None without a link."""

    name: str
    address: str
    mtu: int | None
    speed_mbits: int | None
    state: str
    port: str | None = None
    """Its connector, as the driver says: `fibre`, `direct attach`, `twisted pair`, `none`."""
    able_mbits: int | None = None
    """The fastest link mode that the port supports."""
    partner_mbits: int | None = None
    """The fastest one that the link's partner offers; None where it does not say."""
    cable: Cable | None = None


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its processors as the kernel's list, bytes of memory, distances to all nodes."""

    number: int
    cpus: str
    memory_bytes: int | None
    distances: tuple[int, ...]

    @property
    def processors(self) -> set[int]:
        """The numbers of a list such as `0-3,8`."""
        return processors(self.cpus)


def processors(listed: str) -> set[int]:
    """The numbers of a list of the kernel's, such as `0-3,8`."""
    # No kernel has as many as six digits say; a recording may say anything.
    spans = re.findall(r"\b([0-9]{1,6})(?:-([0-9]{1,6}))?\b", listed)
    return {number for first, last in spans for number in range(int(first), int(last or first) + 1)}


@dataclass(frozen=True)
class Mount:
    """A mounted file system that models may be loaded from. `proto` of NFS: `tcp` or `rdma`."""

    target: str
    fstype: str
    proto: str | None


@dataclass(frozen=True)
class Limits:
    """Limits of this process and of memory, in bytes. `memlock` None is unlimited."""

    memlock: int | None = None
    memlock_known: bool = False
    locks_freely: bool = False
    """Whether the process has CAP_IPC_LOCK, to which `memlock` does not apply."""
    memory_bytes: int | None = None
    huge_pages: int | None = None
    huge_page_bytes: int | None = None
    cpus_allowed: str | None = None
    """The processors that it may use, as the kernel's list."""
    cpu_quota_known: bool = False
    cpu_quota: float | None = None
    """Processors' worth of time that its control groups give it; None is all."""
    memory_limit_known: bool = False
    memory_limit: int | None = None
    """Of its control groups; None is all."""
    ptrace_scope: int | None = None
    clock_source: str | None = None


@dataclass(frozen=True)
class Library:
    """A library of fabrics or GPUs: its file, the version in the file's name, whether this process or the
    serving engine's Python packages bring it (`origin`: `system`, `efa`, `engine`, `loaded`)."""

    name: str
    version: str
    path: str
    origin: str
    interface: int | None = None
    """Of libfabric and NCCL's plug-ins for it: the highest N of `FABRIC_1.N` that it has, or needs."""
    driver_folder: str | None = None
    """Where libibverbs looks for the drivers of NICs."""
    drivers: tuple[str, ...] = ()
    """What it finds there."""

    @property
    def bundled(self) -> bool:
        """Whether it has the name that a wheel's bundler gave it: the linker takes it for another library."""
        return not self.path.rpartition("/")[2].startswith(f"{self.name}.so")

    @property
    def package(self) -> str:
        """Of the engine's: the folder that it is in, which is called as its package is."""
        return self.path.rpartition("/")[0].rpartition("/")[2]


@dataclass(frozen=True)
class Pair:
    """The path of traffic between two ends: GPUs and NICs by name, `memory`, `wire`."""

    a: str
    b: str
    gbs: float | None
    """Ideal GB/s (10^9 bytes) each way after line encoding; None where no link of the path says its speed."""
    bottleneck: str
    chipset: int
    """Crossings of the link between chipset and CPU."""
    crosses_numa: bool


@dataclass(frozen=True)
class Missing:
    """A fact that was not read, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """Everything that was read, and what was not."""

    board: str
    chipset: str | None
    dmi_gbs: float | None
    """Ideal GB/s between chipset and CPU; None where the chipset is not known."""
    devices: dict[str, PciDevice]
    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    nvmes: tuple[Nvme, ...]
    nets: tuple[NetDevice, ...]
    nodes: tuple[NumaNode, ...]
    mounts: tuple[Mount, ...]
    limits: Limits
    libraries: tuple[Library, ...]
    modules: tuple[str, ...]
    """Loaded kernel modules that matter to transfers."""
    gpu_driver: str | None
    gpu_driver_open: bool
    container: bool
    gpu_nodes: int | None
    """Files `/dev/nvidiaN`; None where `/dev` was not read."""
    pairs: tuple[Pair, ...]
    unread: tuple[Missing, ...]
    container_marks: tuple[str, ...] = ()
    """By what it is known that this is a container."""
    not_there: tuple[str, ...] = ()
    """What transfers need of a host and is not in the container."""


@dataclass(frozen=True)
class Cost:
    """What a finding costs: per cent of what the device could give (or of tokens a second), with the GB/s
    behind it.

    `fails`: transfers do not work at all, or take another path. `source`: where the formula is from.
    """

    percent: float | None
    source: str
    gbs_now: float | None = None
    gbs_could: float | None = None
    fails: bool = False


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `code` is stable, for scripts."""

    code: str
    device: str
    fact: str
    cost: Cost
    advice: str
    assumes: str
    """The traffic for which it matters: `kv`, `collectives`, `load`, several with commas."""
