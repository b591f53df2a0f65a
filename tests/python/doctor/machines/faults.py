"""One fault each, planted into a machine. The key is the code by which `kvik doctor` must name it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from tests.python.doctor.machines.desktops import V1
from tests.python.doctor.machines.modules import cmis, qsfp
from tests.python.doctor.machines.recording import Device, Machine


def _first(machine: Machine, *kinds: str) -> Device:
    return machine.those(*kinds)[0]


def _narrow_nic(machine: Machine) -> None:
    nic = _first(machine, "nic", "efa")
    nic.now = (nic.now[0], nic.now[1] // 4) if nic.now else None


def _slow_nic(machine: Machine) -> None:
    nic = _first(machine, "nic", "efa")
    nic.now = (2.5, nic.now[1]) if nic.now else None


def _narrow_gpu(machine: Machine) -> None:
    gpu = _first(machine, "gpu")
    gpu.now = (gpu.now[0], 4) if gpu.now else None


def _nics_on_one_node(machine: Machine) -> None:
    for nic in machine.those("nic", "efa"):
        nic.numa = 0


def _acs(machine: Machine) -> None:
    for device in machine.every():
        if device.kind == "bridge" and any(below.kind == "gpu" for below in device.below):
            device.acs = 0b1100
            return


def _translating(machine: Machine) -> None:
    machine.iommu = "DMA-FQ"
    machine.cmdline = machine.cmdline.replace(" iommu=pt", " intel_iommu=on")


def _small_mtu(machine: Machine) -> None:
    _first(machine, "nic").mtu = 1500


def _lost_packets(machine: Machine) -> None:
    _first(machine, "nic").counters["out_of_sequence"] = 200_000


def _lost_by_the_cloud(machine: Machine) -> None:
    _first(machine, "efa").counters["rx_drops"] = 200_000


def _bad_cable(machine: Machine) -> None:
    _first(machine, "nic").counters["symbol_error"] = 4711


def _no_peer_memory(machine: Machine) -> None:
    machine.nvidia_open = False
    machine.modules = tuple(name for name in machine.modules if "peermem" not in name)


def _no_address(machine: Machine) -> None:
    nic = _first(machine, "nic")
    nic.gids = tuple((gid, kind) for gid, kind in nic.gids if kind == V1 or gid.startswith("fe80:"))


def _slower_port(machine: Machine) -> None:
    _first(machine, "nic").rate = "100 Gb/sec (4X EDR)"


def _into_container(machine: Machine) -> None:
    machine.root = "overlay"


def _container_without_rdma(machine: Machine) -> None:
    _into_container(machine)
    machine.rdma_files = False


def _container_without_gpus(machine: Machine) -> None:
    _into_container(machine)
    machine.gpu_files = False


def _old_library(machine: Machine) -> None:
    _into_container(machine)
    machine.libcuda = "535.104.05"


def _no_driver(machine: Machine) -> None:
    nic = _first(machine, "nic", "efa")
    nic.name = nic.driver = ""


def _far_firmware(machine: Machine) -> None:
    _first(machine, "nic", "efa").numa = -1


Fault = Callable[[Machine], None]


def _bar1(machine: Machine) -> None:
    _first(machine, "gpu").bar1 = 256 << 20


def _memlock(machine: Machine) -> None:
    machine.memlock = str(8 << 20)


def _port_down(machine: Machine) -> None:
    _first(machine, "nic", "efa").state = "1: DOWN"


def _clock(machine: Machine) -> None:
    machine.clock = "hpet"


def _nfs(machine: Machine) -> None:
    machine.mounts = ("192.0.2.20:/models /models nfs4 rw,vers=4.2,proto=tcp 0 0",)


def _cpu_quota(machine: Machine) -> None:
    machine.cpu_max = "50000 100000"


def _memory_limit(machine: Machine) -> None:
    machine.memory_max = str(512 << 20)


def _slow_module(machine: Machine) -> None:
    nic = _first(machine, "nic")
    slower = {"100": qsfp(code=0x10, mbd=10_300), "400": cmis((0x0F, 0x0B))}
    nic.cable = slower[nic.rate.split()[0]]


def _wheel_with_verbs(machine: Machine) -> None:
    # Of nixl_cu13 1.5.1, which was built where drivers are in /usr/lib64.
    machine.packages += ("nixl_cu13.libs/libibverbs-1de1263b.so.1.14.48.0",)
    machine.words["/libibverbs-1de1263b.so.1.14.48.0"] = "/usr/lib64/libibverbs"


def _wheel_with_fabric(machine: Machine) -> None:
    machine.packages += ("mooncake_transfer_engine.libs/libfabric-0a1b2c3d.so.1.28.0",)


def _old_fabric(machine: Machine) -> None:
    machine.words["/libfabric.so.1.27.0"] = "FABRIC_1.0\nFABRIC_1.6"


# By name of the fault: the code that must come first, and what plants it.
FAULTS: dict[str, tuple[str, Fault]] = {
    "nic-narrow": ("nic-link-narrow", _narrow_nic),
    "nic-slow": ("nic-link-narrow", _slow_nic),
    "gpu-narrow": ("gpu-link-narrow", _narrow_gpu),
    "nics-on-one-node": ("nic-across-numa", _nics_on_one_node),
    "acs": ("acs-on-path", _acs),
    "iommu": ("iommu-translates", _translating),
    "memlock": ("memlock-low", _memlock),
    "mtu": ("mtu-small", _small_mtu),
    "lost-packets": ("port-errors", _lost_packets),
    "lost-by-the-cloud": ("port-errors", _lost_by_the_cloud),
    "bad-cable": ("port-errors", _bad_cable),
    "bar1": ("bar1-small", _bar1),
    "no-peer-memory": ("no-peer-memory", _no_peer_memory),
    "no-address": ("roce-gid-missing", _no_address),
    "slower-port": ("port-rate-low", _slower_port),
    "port-down": ("nic-port-down", _port_down),
    "no-driver": ("nic-without-driver", _no_driver),
    "container-without-rdma": ("container-lacks-devices", _container_without_rdma),
    "container-without-gpus": ("container-lacks-devices", _container_without_gpus),
    "old-library": ("library-older-than-driver", _old_library),
    "numa-unknown": ("numa-unknown", _far_firmware),
    "clock": ("clock-slow", _clock),
    "nfs": ("nfs-over-tcp", _nfs),
    "cpu-quota": ("cpu-quota-low", _cpu_quota),
    "memory-limit": ("memory-limit-low", _memory_limit),
    "slow-module": ("module-slow", _slow_module),
    "verbs-twice": ("library-twice", _wheel_with_verbs),
    "fabric-twice": ("library-twice", _wheel_with_fabric),
    "old-fabric": ("nccl-plugin-unmet", _old_fabric),
}
ON_ALL = ("bar1", "memlock", "no-peer-memory", "port-down", "no-driver", "container-without-rdma",
          "container-without-gpus", "old-library", "clock", "iommu", "cpu-quota", "memory-limit")  # fmt: skip
WITH_LINKS = ("nic-narrow", "nic-slow", "gpu-narrow")
WITH_SWITCH = ("acs",)
TWO_NODES = ("nics-on-one-node", "numa-unknown")
ROCE = ("mtu", "lost-packets", "bad-cable", "no-address", "nfs", "verbs-twice", "slow-module")
EFA = ("fabric-twice", "old-fabric", "lost-by-the-cloud")


def planted(machine: Machine, fault: str) -> Machine:
    """A copy with the fault."""
    copy = deepcopy(machine)
    FAULTS[fault][1](copy)
    copy.name = f"{machine.name}+{fault}"
    return copy


def fitting(machine: Machine) -> list[str]:
    """The faults that this machine can have."""
    links = any(device.now for device in machine.those("gpu"))
    chosen = list(ON_ALL)
    chosen += WITH_LINKS if links else ()
    chosen += TWO_NODES if machine.nodes > 1 else ()
    chosen += ROCE if machine.those("nic") else ()
    chosen += EFA if machine.those("efa") else ()
    chosen += WITH_SWITCH if links and machine.nodes > 1 else ()
    chosen += ("slower-port",) if len(machine.those("nic")) > 1 else ()
    return chosen
