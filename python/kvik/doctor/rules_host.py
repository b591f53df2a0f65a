"""Rules about NICs' ports, drivers, limits, mounts and libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from kvik.doctor.cost import Traffic, roce_share
from kvik.doctor.model import Cost, Finding, Library, Machine, NetDevice, Nic, PciDevice, Port
from kvik.doctor.pci import NVIDIA

_HARD_ERRORS = (
    "symbol_error", "port_rcv_errors", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    "rx_icrc_encapsulated",
)  # fmt: skip
_RETRIES = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rx_drops",
    "retrans_timeout_events",
)
_PACKETS = ("port_rcv_packets", "rx_pkts")
_RETRY_SHARE = 1e-6  # of packets; fewer cost nothing that can be measured
_MTUS = (4096, 2048, 1024, 512, 256)
_MTU_HEADERS = 104  # IPv6 40, UDP 8, BTH 12, largest extension 28, ICRC 4, and a VLAN's bytes to spare
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem", "amdgpu")
_NO_FORMULA = "no formula: depends on the traffic"


def host_findings(machine: Machine, traffic: Traffic) -> Iterator[Finding]:
    """All of this module."""
    for nic in machine.nics:
        yield from _devices(machine, nic)
        for port in nic.ports:
            if port.active:
                yield from _port(nic, port)
    yield from _ports_down(machine.devices, machine.nics)
    yield from _rates(machine)
    yield from _cables(machine.nets, machine.nics)
    yield from _memory(machine)
    yield from _gpu_software(machine)
    if traffic.load:
        yield from _mounts(machine)


def _devices(machine: Machine, nic: Nic) -> Iterator[Finding]:
    broken = Cost(100.0, "the NIC is not used at all", fails=True)
    if not nic.ports:
        yield Finding(
            "container-lacks-devices" if machine.container and nic.driver != "none" else "nic-without-driver",
            nic.name,
            f"the PCI function is there (driver {nic.driver}), and no RDMA device of the kernel belongs "
            f"to it",
            broken,
            "Load its RDMA driver (mlx5_ib, efa); in a container, give it the host's RDMA devices.",
            "kv,collectives",
        )
    elif nic.address and nic.node is None and machine.gpu_nodes is not None:
        yield Finding(
            "container-lacks-devices" if machine.container else "nic-without-device-file",
            nic.name,
            "the RDMA device is seen, and its file in /dev/infiniband is not there",
            broken,
            "Start the container with the devices of /dev/infiniband (`--device=/dev/infiniband`, or the "
            "device "
            "plugin's resource); on a host, load ib_uverbs.",
            "kv,collectives",
        )


def _port(nic: Nic, port: Port) -> Iterator[Finding]:
    yield from _errors(nic, port)
    if port.layer != "Ethernet" or nic.driver == "efa":
        return
    if port.gids and not any(gid.startswith("ipv4") and not gid.endswith("/v1") for gid in port.gids):
        if not any(gid in ("other/v2", "other/unknown") for gid in port.gids):
            yield Finding(
                "roce-gid-missing", nic.name,
                f"port {port.number} has {len(port.gids)} GIDs and none for RoCE v2 with an address of a "
                f"network",
                Cost(100.0, "no queue pair connects to another host", fails=True),
                "Give the port's network device an IP address; RoCE v2 makes a GID of it.", "kv,collectives",
            )  # fmt: skip
    elif not port.gids:
        yield Finding(
            "roce-gid-missing", nic.name, f"port {port.number} has no GID at all",
            Cost(100.0, "no queue pair connects to another host", fails=True),
            "Bring the port's network device up and give it an IP address.", "kv,collectives",
        )  # fmt: skip
    if nic.mtu is not None:
        rdma = next((mtu for mtu in _MTUS if mtu + _MTU_HEADERS <= nic.mtu), _MTUS[-1])
        if rdma < _MTUS[0]:
            lost = (1 - roce_share(rdma) / roce_share(_MTUS[0])) * 100
            rate = (port.rate_gbits or 0) / 8
            yield Finding(
                "mtu-small", nic.name,
                f"its network device has an MTU of {nic.mtu}, which leaves {rdma} bytes an RDMA packet "
                f"of 4096",
                Cost(lost, "RoCE v2: 82 bytes of headers a packet", rate * roce_share(rdma) or None,
                     rate * roce_share(_MTUS[0]) or None),
                "Set the MTU to 9000 (4200 at least) on the network device, the peer's and every switch "
                "port between.",
                "kv,collectives",
            )  # fmt: skip


def _errors(nic: Nic, port: Port) -> Iterator[Finding]:
    hard = {name: port.counters[name] for name in _HARD_ERRORS if port.counters.get(name)}
    # Of EFA the second. Without either nobody knows how many packets those are of.
    known = [max(port.counters[name], 0) for name in _PACKETS if name in port.counters]
    packets = max(known, default=0)
    retries = {
        name: count
        for name in _RETRIES
        if known and (count := port.counters.get(name)) is not None and count > _RETRY_SHARE * packets
    }
    if hard or retries:
        said = ", ".join(f"{name} {count}" for name, count in {**hard, **retries}.items())
        share = sum(retries.values()) / packets * 100 if packets else None
        yield Finding(
            "port-errors", nic.name, f"port {port.number} has counted since its start: {said}",
            Cost(min(share, 100.0) if share is not None else None, "retried packets of all that came" if share
                 is not None else _NO_FORMULA),
            "The cables and switches are the cloud's: ask there, with the instance and the time."
            if nic.driver == "efa"
            else "Change the cable or module for one of the NIC's vendor; where packets are lost without "
            "symbol errors, set up priority flow control for RoCE on NIC and switch.",
            "kv,collectives",
        )  # fmt: skip


def _ports_down(devices: Mapping[str, PciDevice], all_nics: Iterable[Nic]) -> Iterator[Finding]:
    """Cards without any link: an unused second port is nobody's fault."""
    cards: dict[str, list[Nic]] = {}
    for nic in all_nics:
        if nic.address and nic.ports:
            cards.setdefault(devices[nic.address].card, []).append(nic)
    for nics in cards.values():
        ports = [port for nic in nics for port in nic.ports]
        if any(port.active for port in ports):
            continue
        # The link is there: InfiniBand's subnet manager has not given it an address.
        waiting = next((port.state for port in ports if port.state.endswith(("INIT", "ARMED"))), None)
        yield Finding(
            "nic-port-down", nics[0].name,
            f"a port has a link, and no subnet manager has set it up: {waiting}" if waiting
            else f"no port has a link: {ports[0].state}",
            Cost(100.0, "the NIC is not used at all", fails=True),
            "Run a subnet manager on the switch, or `opensm` on one host of the subnet." if waiting
            else "Plug the cable in, look at the switch's port, and bring the network device up.",
            "kv,collectives",
        )  # fmt: skip


def _rates(machine: Machine) -> Iterator[Finding]:
    """A port slower than those of the same NICs beside it."""
    best: dict[tuple[int, int], float] = {}
    ports = [
        (nic, port, (machine.devices[nic.address].vendor, machine.devices[nic.address].device))
        for nic in machine.nics
        for port in nic.ports
        if nic.address and port.active and (port.rate_gbits or 0.0) > 0.0
    ]
    for _, port, kind in ports:
        best[kind] = max(best.get(kind, 0.0), port.rate_gbits or 0.0)
    for nic, port, kind in ports:
        rate = port.rate_gbits or 0.0
        if rate < best[kind]:
            yield Finding(
                "port-rate-low", nic.name,
                f"port {port.number} runs at {rate:g} Gbit/s, the same NICs beside it at {best[kind]:g}",
                Cost((1 - rate / best[kind]) * 100, "rates of the ports", rate / 8, best[kind] / 8),
                "Look at the cable, the module and the switch port's speed.", "kv,collectives",
            )  # fmt: skip


def _cables(nets: Iterable[NetDevice], nics: Iterable[Nic]) -> Iterator[Finding]:
    """A module or cable of a lower rate than its port's, which the link can then never have."""
    by_address = {nic.address: nic for nic in nics if nic.address}
    for net in nets:
        nic, cable = by_address.get(net.address), net.cable
        if nic is None or cable is None or cable.rate_gbits is None:
            continue
        port = max(net.able_mbits or 0, net.speed_mbits or 0) / 1000
        if cable.rate_gbits < port:
            yield Finding(
                "module-slow", nic.name,
                f"the {cable.form} in {net.name} ({cable.vendor} {cable.part}) is for {cable.rate_gbits} "
                f"Gbit/s, and the port can {port:g}",
                Cost((1 - cable.rate_gbits / port) * 100, "SFF-8636, CMIS: what the module says of itself",
                     cable.rate_gbits / 8, port / 8),
                "Plug in a cable or module of the port's rate; the switch's port has to have it too.",
                "kv,collectives",
            )  # fmt: skip


def _memory(machine: Machine) -> Iterator[Finding]:
    limits = machine.limits
    low = limits.memlock_known and limits.memlock is not None and not limits.locks_freely
    memory = min(limits.memory_bytes or 1 << 40, limits.memory_limit or 1 << 40)
    if machine.nics and low and (limits.memlock or 0) < memory / 2:
        yield Finding(
            "memlock-low", "this process",
            f"it may lock {(limits.memlock or 0) >> 10} KiB, and memory for NICs is locked while it is "
            f"registered",
            Cost(None, "registration of more than that fails", fails=True),
            "Set memlock to unlimited: `ulimit -l`, LimitMEMLOCK= of systemd, `--ulimit memlock=-1` of a "
            "container.",
            "kv,collectives",
        )  # fmt: skip
    if limits.clock_source in ("hpet", "acpi_pm", "jiffies"):
        yield Finding(
            "clock-slow", "kernel", f"the clock source is {limits.clock_source}: each look at the clock "
                                    f"is a system call",
            Cost(None, _NO_FORMULA), "Find out from the kernel's log why tsc was rejected; update the "
                                     "firmware.",
            "kv,collectives",
        )  # fmt: skip


def _gpu_software(machine: Machine) -> Iterator[Finding]:
    nvidia = [gpu for gpu in machine.gpus if machine.devices[gpu.address].vendor == NVIDIA]
    if not nvidia:
        return
    closed = machine.gpu_driver and not machine.gpu_driver_open
    if machine.nics and closed and not any(m in machine.modules for m in _PEER_MODULES):
        yield Finding(
            "no-peer-memory", ", ".join(gpu.address for gpu in nvidia),
            "the GPU driver is the closed one (no dma-buf), and no peer memory module is loaded",
            Cost(50.0, "each byte passes host memory: it crosses the root complex twice and the host's "
                       "memory "
                 "twice"),
            "Load nvidia_peermem, or use the driver's open kernel modules.", "kv,collectives",
        )  # fmt: skip
    if machine.gpu_driver:
        yield from _older(machine.libraries, machine.gpu_driver)
    if machine.gpu_nodes == 0 and machine.gpu_driver:
        yield Finding(
            "container-lacks-devices" if machine.container else "gpu-without-device-file", "GPUs",
            f"{len(nvidia)} GPUs and their driver are seen, and no /dev/nvidia0 is there",
            Cost(100.0, "no GPU is used", fails=True),
            "Start the container with the GPUs (`--gpus all`); on a host, run nvidia-modprobe.",
            "kv,collectives,load",
        )  # fmt: skip


def _older(libraries: Iterable[Library], driver: str) -> Iterator[Finding]:
    # libcuda.so.1.1 is a name for the file, not a version of a driver. Of several in a folder the linker's
    # cache has the latest.
    cudas = [one for one in libraries if one.name == "libcuda" and numbers(one.version) > (100,)]
    latest = {one.path.rpartition("/")[0]: one for one in sorted(cudas, key=lambda one: numbers(one.version))}
    for library in latest.values():
        if numbers(library.version) < numbers(driver):
            yield Finding(
                "library-older-than-driver", library.path,
                f"libcuda is of {library.version}, and the kernel's driver of {driver}",
                Cost(None, "the driver refuses a library of another version", fails=True),
                "Let the container runtime mount the host's driver libraries, and take older copies out "
                "of the image.",
                "kv,collectives,load",
            )  # fmt: skip


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, to be compared."""
    return tuple(int(part) for part in version.split(".") if re.fullmatch(r"[0-9]{1,9}", part))


def _mounts(machine: Machine) -> Iterator[Finding]:
    if not any(nic.rate_gbits and nic.driver not in ("efa", "software") for nic in machine.nics):
        return
    for mount in machine.mounts:
        if mount.fstype.startswith("nfs") and mount.proto == "tcp":
            yield Finding(
                "nfs-over-tcp", mount.target, "it is mounted over TCP, and an RDMA NIC is there",
                Cost(5.0, "the article: 1 to 13 % of a run's elapsed time, which is load; tokens a "
                          "second do not change"),
                "If loading models matters, mount it with proto=rdma,port=20049 (the server must offer it).",
                "load",
            )  # fmt: skip
