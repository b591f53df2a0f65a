"""Servers: instances of EC2 as their documentation describes them, and one with two sockets of its owner's.

Counts and rates: the EC2 documentation, "Specifications for Amazon EC2 accelerated computing instances" and
"Maximize network bandwidth on Amazon EC2 instances with multiple network cards". Which GPUs and NICs share
a switch, and the links of p5 and p4d: `topology/p5.48xl-topo.xml` and `p4d-24xl-topo.xml` of
aws/aws-ofi-nccl. No such file was found for p5en and p6: one switch a GPU is assumed, as on p5, and two
NUMA nodes. Rates as text: `drivers/infiniband/hw/efa/efa_verbs.c` of Linux. Ids: pci.ids. PCI addresses are
of these recordings.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.python.doctor.machines.desktops import GIDS
from tests.python.doctor.machines.recording import GIB, Device, Machine, Speed, bridge

EFA_MODULES = ("nvidia", "efa", "ib_core", "ib_uverbs")
EFA_LIBRARIES = (
    "/opt/amazon/efa/lib/libfabric.so.1.27.0",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so",
    "/usr/lib/x86_64-linux-gnu/libefa.so.1.3.50.0",
)
RATES = {
    40: "40 Gb/sec (4X FDR10)",
    100: "100 Gb/sec (4X EDR)",
    200: "200 Gb/sec (4X HDR)",
    400: "400 Gb/sec (8X HDR)",
}
GPUS = {  # PCI id, generation and lanes of the link, BAR1
    "NVIDIA A100-SXM4-40GB": (0x20B0, (16.0, 16), 64 * GIB),
    "NVIDIA H100 80GB HBM3": (0x2330, (32.0, 16), 128 * GIB),
    "NVIDIA H200": (0x2335, (32.0, 16), 256 * GIB),
    "NVIDIA B200": (0x2901, (32.0, 16), 256 * GIB),
    "NVIDIA B300 SXM6 AC": (0x3182, (32.0, 16), 512 * GIB),
}


def _gpu(address: str, model: str, numa: int, link: Speed | None = None) -> Device:
    device, most, bar1 = GPUS[model]
    return Device(
        address, "gpu", 0x10DE, device, link or most, link or most, numa, "nvidia", bar1=bar1, name=model
    )


def _ena() -> Device:
    """The network interface of every instance, which is no RDMA device."""
    return Device("0000:00:0f.0", "ena", 0x1D0F, 0xEC20, driver="ena", net="ens15", mtu=9001)


def instance(
    name: str, model: str, rate: int, link: Speed, switches: int, per_switch: tuple[int, int], device: int,
    gpu_link: Speed | None = None,
) -> Machine:  # fmt: skip
    """An instance with two nodes: under each of `switches`, GPUs and EFAs as `per_switch` says."""
    devices = []
    for switch in range(switches):
        numa, bus = switch * 2 // switches, 0x10 + 8 * switch
        below = []
        for index in range(sum(per_switch)):
            address = f"0000:{bus + 2 + index:02x}:00.0"
            if index < per_switch[0]:
                end = _gpu(address, model, numa, gpu_link)
            else:
                end = Device(
                    address, "efa", 0x1D0F, device, link, link, numa, "efa",
                    name=f"rdmap{bus + 2 + index}s0", rate=RATES[rate],
                )  # fmt: skip
            speed = end.most or link
            down = bridge(
                f"0000:{bus + 1:02x}:{index:02x}.0", [end], speed, numa=numa, vendor=0x1000, device=0xC030
            )
            below.append(down)
        up = bridge(f"0000:{bus:02x}:00.0", below, (32.0, 16), numa=numa, vendor=0x1000, device=0xC030)
        devices.append(bridge(f"0000:00:{switch + 1:02x}.0", [up], (32.0, 16), numa=numa, device=0x352A))
    return Machine(
        name, ("Amazon EC2", name), [*devices, _ena()], nodes=2, cpus=192, memory=2048 * GIB,
        modules=EFA_MODULES, libraries=EFA_LIBRARIES,
    )  # fmt: skip


def g5() -> Machine:
    """g5.12xlarge: four A10G and one EFA on the root bus of a virtual machine, which shows no links."""
    gpus = [
        Device(
            f"0000:00:{0x1B + index:02x}.0",
            "gpu",
            0x10DE,
            0x2237,
            driver="nvidia",
            bar1=32 * GIB,
            name="NVIDIA A10G",
        )
        for index in range(4)
    ]
    efa = Device("0000:00:06.0", "efa", 0x1D0F, 0xEFA1, driver="efa", name="rdmap0s6", rate=RATES[40])
    return Machine(
        "g5.12xlarge", ("Amazon EC2", "g5.12xlarge"), [efa, *gpus, _ena()], cpus=48, memory=192 * GIB,
        modules=EFA_MODULES, libraries=EFA_LIBRARIES,
    )  # fmt: skip


def two_sockets(
    name: str = "two-sockets-8x8", nic_nodes: Sequence[int] = (0, 0, 0, 0, 1, 1, 1, 1)
) -> Machine:
    """Eight H100 and eight ConnectX-7 of 400 Gbit/s, one of each below a switch; four pairs a socket."""
    devices = []
    for pair, nic_node in enumerate(nic_nodes):
        numa, bus = pair // 4, 0x10 + 8 * pair
        nic = Device(
            f"0000:{bus + 3:02x}:00.0", "nic", 0x15B3, 0x1021, (32.0, 16), (32.0, 16), nic_node, "mlx5_core",
            name=f"mlx5_{pair}", rate="400 Gb/sec (4X NDR)", net=f"ens{pair}np0", mtu=9000, gids=GIDS,
        )  # fmt: skip
        ends = [_gpu(f"0000:{bus + 2:02x}:00.0", "NVIDIA H100 80GB HBM3", numa), nic]
        below = [
            bridge(
                f"0000:{bus + 1:02x}:{index:02x}.0",
                [end],
                (32.0, 16),
                numa=numa,
                vendor=0x1000,
                device=0xC030,
            )
            for index, end in enumerate(ends)
        ]
        up = bridge(f"0000:{bus:02x}:00.0", below, (32.0, 16), numa=numa, vendor=0x1000, device=0xC030)
        devices.append(bridge(f"0000:00:{pair + 1:02x}.0", [up], (32.0, 16), numa=numa, device=0x352A))
    return Machine(name, ("a maker", "server"), devices, nodes=2, cpus=128, memory=2048 * GIB)


HEALTHY = [
    instance("p4d.24xlarge", "NVIDIA A100-SXM4-40GB", 100, (8.0, 16), 4, (2, 1), 0xEFA1, gpu_link=(8.0, 16)),
    instance("p5.48xlarge", "NVIDIA H100 80GB HBM3", 100, (16.0, 8), 8, (1, 4), 0xEFA2),
    instance("p5e.48xlarge", "NVIDIA H200", 100, (16.0, 8), 8, (1, 4), 0xEFA2),
    instance("p5en.48xlarge", "NVIDIA H200", 200, (32.0, 8), 8, (1, 2), 0xEFA3),
    instance("p6-b200.48xlarge", "NVIDIA B200", 400, (32.0, 16), 8, (1, 1), 0xEFA3),
    instance("p6-b300.48xlarge", "NVIDIA B300 SXM6 AC", 400, (32.0, 16), 8, (1, 2), 0xEFA3),
    g5(),
    two_sockets(),
]
