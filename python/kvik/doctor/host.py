"""Everything of a machine that is not its PCIe tree: NICs' ports, NUMA nodes, limits, mounts.

Sources: Linux Documentation/ABI/stable/sysfs-class-infiniband, Documentation/admin-guide/sysctl, proc(5).
"""

from __future__ import annotations

import re
from dataclasses import replace

from kvik.doctor.containers import read_groups
from kvik.doctor.model import (
    Limits,
    Mount,
    NetDevice,
    Nic,
    NumaNode,
    Nvme,
    PciDevice,
    Port,
)
from kvik.doctor.pci import ADDRESS, AMAZON, MELLANOX
from kvik.doctor.pci import ROOT as PCI
from kvik.doctor.reader import Reader

RDMA = "/sys/class/infiniband"
# Errors that cost a transfer something; `link_downed` counts every cable that was pulled, and is none.
COUNTERS = (
    "symbol_error", "port_rcv_errors", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    "port_xmit_packets", "port_rcv_packets",
)  # fmt: skip
HW_COUNTERS = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rx_icrc_encapsulated", "rx_drops",
    "retrans_timeout_events", "rx_pkts",
)  # fmt: skip
MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "efa", "efa_nv_peermem", "mlx5_core", "mlx5_ib",
           "rpcrdma", "amdgpu", "rdma_rxe")  # fmt: skip
_MODEL_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "ceph",
    "fuse.s3fs",
    "tmpfs",
    "ext4",
    "xfs",
    "btrfs",
    "beegfs",
)
_CAP_IPC_LOCK = 14  # linux/capability.h
_ALL_IDS = ["0", "0", "4294967295"]  # user_namespaces(7): the first namespace's map of users


def read_nics(reader: Reader, devices: dict[str, PciDevice]) -> tuple[Nic, ...]:
    """RDMA devices of the kernel, and PCI functions that should be one and are not.

    Virtual functions are for the virtual machines and containers that they are given to."""
    found = [_nic(reader, name, devices) for name in reader.names(RDMA) if not _is_iwarp(reader, name)]
    known = [devices[nic.address] for nic in found if nic.address]
    for device in devices.values():
        efa = device.vendor == AMAZON and device.device >> 4 == 0xEFA
        wanted = device.kind == "nic" and (device.vendor == MELLANOX or efa) and device.physical is None
        if wanted and device not in known and not any(_bonded(reader, device, other) for other in known):
            name = f"{'efa' if efa else 'mlx5'}@{device.address}"
            found.append(Nic(name, device.address, device.numa, device.driver or "none", (), None, None))
    return tuple(found)


def _is_iwarp(reader: Reader, name: str) -> bool:
    """Whether its connections are TCP's (`4: RNIC`): neither kvik nor NCCL can use it."""
    kind = reader.text(f"{RDMA}/{name}/node_type", optional=True) or ""
    if kind.startswith("4:"):
        reader.miss(f"{RDMA}/{name}", "left out: it speaks iWARP, and kvik needs InfiniBand, RoCE or EFA")
    return kind.startswith("4:")


def _bonded(reader: Reader, device: PciDevice, other: PciDevice) -> bool:
    """Whether two functions of a card are in one bond: mlx5 then has one RDMA device, at one of them, for the
    ports of both. Where the network devices are another namespace's, it may be so."""
    if device.card != other.card or device.driver is None:
        return False
    nets = [f"{PCI}/{one.address}/net" for one in (device, other)]
    masters = [{reader.target(f"{net}/{name}/master") for name in reader.names(net, True)} for net in nets]
    return not masters[0] or bool(masters[0] & masters[1] - {None})


def _nic(reader: Reader, name: str, devices: dict[str, PciDevice]) -> Nic:
    path = f"{RDMA}/{name}"
    target = reader.target(f"{path}/device")
    last = target.rpartition("/")[2] if target else ""
    device = devices.get(last)
    address = device.address if device else None
    if device is None and ADDRESS.fullmatch(last):
        reader.miss(
            f"{path}/device", f"leads to {last}, which is not among the PCI functions that carry data"
        )
    ports = tuple(
        _port(reader, f"{path}/ports/{port}", int(port))
        for port in reader.names(f"{path}/ports")
        if re.fullmatch(r"[0-9]{1,4}", port)
    )
    driver = (device.driver or "unknown") if device else "software"
    nets = reader.names(f"{path}/device/net", optional=True)
    mtu = reader.whole(f"{path}/device/net/{nets[0]}/mtu") if nets else None
    return Nic(
        name, address, device.numa if device else None, driver, ports, mtu, _node(reader, name)
    )  # fmt: skip


def _node(reader: Reader, name: str) -> str | None:
    for node in reader.names("/sys/class/infiniband_verbs"):
        if node.startswith("uverbs") and reader.text(f"/sys/class/infiniband_verbs/{node}/ibdev") == name:
            present = reader.names("/dev/infiniband")
            return f"/dev/infiniband/{node}" if node in present else None
    return None


def _port(reader: Reader, path: str, number: int) -> Port:
    counters: dict[str, int] = {}
    for folder, names in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
        for name in names:
            value = reader.whole(f"{path}/{folder}/{name}", optional=True)
            if value is not None:
                counters[name] = value
    if not counters:
        reader.miss(f"{path}/counters", "none of the error counters is there")
    layer = reader.text(f"{path}/link_layer") or "unknown"
    return Port(
        number=number,
        rate_gbits=reader.number(f"{path}/rate"),
        state=reader.text(f"{path}/state") or "unknown",
        layer=layer,
        gids=_gids(reader, path) if layer == "Ethernet" else (),
        counters=counters,
    )


def _gids(reader: Reader, path: str) -> tuple[str, ...]:
    found = []
    for index in reader.names(f"{path}/gids"):
        gid = reader.text(f"{path}/gids/{index}", optional=True)
        if not gid or not gid.replace(":", "").strip("0"):
            continue
        kind = reader.text(f"{path}/gid_attrs/types/{index}", optional=True) or ""
        version = {"RoCE v2": "/v2", "IB/RoCE v1": "/v1"}.get(kind, "/unknown")
        found.append(gid_class(gid) + version)
    return tuple(found)


def gid_class(gid: str) -> str:
    """`ipv4` (mapped), `link-local` or `other`: all that matters of a GID, and nothing that names a host."""
    if gid.startswith("0000:0000:0000:0000:0000:ffff:"):
        return "ipv4"
    return "link-local" if gid.startswith("fe80:") else "other"


def read_nvmes(reader: Reader, devices: dict[str, PciDevice]) -> tuple[Nvme, ...]:
    """NVMe controllers with a PCI function."""
    found = []
    for name in reader.names("/sys/class/nvme", optional=True):
        target = reader.target(f"/sys/class/nvme/{name}/device")
        address = target.rpartition("/")[2] if target else ""
        if address in devices:
            found.append(Nvme(name, address, devices[address].numa))
    return tuple(found)


def read_nets(reader: Reader) -> tuple[NetDevice, ...]:
    """Network devices with hardware behind them."""
    found = []
    for name in reader.names("/sys/class/net"):
        path = f"/sys/class/net/{name}"
        target = reader.target(f"{path}/device")
        if target is None:
            continue
        state = reader.text(f"{path}/operstate") or "unknown"
        # The kernel answers with an error where there is no link.
        speed = reader.whole(f"{path}/speed") if state == "up" else None
        speed = speed if speed is not None and speed > 0 else None
        found.append(NetDevice(name, target.rpartition("/")[2], reader.whole(f"{path}/mtu"), speed, state))
    return tuple(found)


def read_nodes(reader: Reader) -> tuple[NumaNode, ...]:
    """NUMA nodes."""
    root = "/sys/devices/system/node"
    found = []
    for name in reader.names(root):
        if re.fullmatch(r"node[0-9]{1,6}", name):
            memory = re.search(r"MemTotal:\s+([0-9]{1,18}) kB", reader.text(f"{root}/{name}/meminfo") or "")
            distances = (reader.text(f"{root}/{name}/distance") or "").split()
            found.append(
                NumaNode(
                    number=int(name[4:]),
                    cpus=reader.text(f"{root}/{name}/cpulist") or "",
                    memory_bytes=int(memory[1]) * 1024 if memory else None,
                    distances=tuple(int(word) for word in distances if re.fullmatch(r"[0-9]{1,9}", word)),
                )
            )
    return tuple(sorted(found, key=lambda node: node.number))


def read_limits(reader: Reader) -> Limits:
    """Limits of this process and of memory."""
    limits = Limits(
        ptrace_scope=reader.whole("/proc/sys/kernel/yama/ptrace_scope", optional=True),
        clock_source=reader.text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    )
    said = re.search(r"Max locked memory\s+(unlimited|[0-9]{1,18})\s", reader.text("/proc/self/limits") or "")
    if said:
        memlock = None if said[1] == "unlimited" else int(said[1])
        limits = replace(limits, memlock=memlock, memlock_known=True)
    caps = re.search(r"CapEff:\s+([0-9a-f]{1,16})", reader.text("/proc/self/status") or "")
    # In a user namespace of its own (rootless containers) a process has rights that do not count for this.
    ids = reader.text("/proc/self/uid_map", optional=True)
    if caps and (ids is None or ids.split() == _ALL_IDS):
        limits = replace(limits, locks_freely=bool(int(caps[1], 16) >> _CAP_IPC_LOCK & 1))
    limits = read_groups(reader, limits)
    memory = dict(re.findall(r"^(\w+):\s+([0-9]{1,18})\b", reader.text("/proc/meminfo") or "", re.MULTILINE))
    return replace(
        limits,
        memory_bytes=int(memory["MemTotal"]) * 1024 if "MemTotal" in memory else None,
        huge_pages=int(memory["HugePages_Total"]) if "HugePages_Total" in memory else None,
        huge_page_bytes=int(memory["Hugepagesize"]) * 1024 if "Hugepagesize" in memory else None,
    )


def read_mounts(reader: Reader) -> tuple[Mount, ...]:
    """File systems that models may be loaded from."""
    found = []
    for line in (reader.text("/proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[2] in _MODEL_FILE_SYSTEMS:
            proto = re.search(r"(?:^|,)proto=(tcp|rdma|udp)", fields[3])
            found.append(Mount(fields[1], fields[2], proto[1].replace("udp", "tcp") if proto else None))
    return tuple(found)
