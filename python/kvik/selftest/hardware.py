"""What the kernel says of RDMA devices, and the limits that RDMA runs into."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEVICES = Path("/sys/class/infiniband")
NODES = Path("/dev/infiniband")
LIBRARIES = ("libfabric", "libibverbs", "libefa", "libmlx5", "libmlx4", "librdmacm", "libbnxt_re", "librxe")


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device, in the kernel's words."""

    device: str
    port: int
    driver: str
    link_layer: str
    state: str
    rate: str
    firmware: str
    numa_node: str

    @property
    def active(self) -> bool:
        """Whether it has a link."""
        return self.state.endswith("ACTIVE")


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def ports(devices: Path = DEVICES) -> list[Port]:
    """All ports of all RDMA devices of the kernel; none where it has no such devices."""
    found = []
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        driver = device / "device" / "driver"
        for port in sorted((device / "ports").glob("*")):
            if port.name.isdecimal():
                found.append(
                    Port(
                        device=device.name,
                        port=int(port.name),
                        driver=driver.resolve().name if driver.exists() else "software",
                        link_layer=_line(port / "link_layer"),
                        state=_line(port / "state"),
                        rate=_line(port / "rate"),
                        firmware=_line(device / "fw_ver"),
                        numa_node=_line(device / "device" / "numa_node"),
                    )
                )
    return found


def suggested(found: list[Port]) -> tuple[str, str] | None:
    """The `nics` that suits these ports, and why; None where nothing does."""
    if any(port.driver == "efa" for port in found):
        return "efa", "nothing was named, and the kernel has EFA devices"
    if any(port.active for port in found):
        return "verbs", "nothing was named, and the kernel has RDMA ports that are active"
    return None


def _limit(which: int) -> list[int | str]:
    return ["unlimited" if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]


def _huge_pages() -> dict[str, int]:
    fields = (line.split() for line in _line(Path("/proc/meminfo")).splitlines())
    return {f[0].rstrip(":"): int(f[1]) for f in fields if f[0].startswith(("HugePages_", "Hugepagesize"))}


def limits() -> dict[str, Any]:
    """Limits of this process, soft and hard, in bytes or counts, and the devices that it may open."""
    nodes = sorted(NODES.iterdir()) if NODES.is_dir() else []
    return {
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "realtime_priority": _limit(resource.RLIMIT_RTPRIO),
        "huge_pages": _huge_pages(),
        "dev_infiniband": {
            node.name: "may be opened" if os.access(node, os.R_OK | os.W_OK) else "no access"
            for node in nodes
            if not node.is_dir()
        },
    }


def libraries() -> list[str]:
    """Files of RDMA libraries that this process has loaded."""
    paths = (line.split(maxsplit=5)[5:] for line in _line(Path("/proc/self/maps")).splitlines())
    return sorted({path[0] for path in paths if path and Path(path[0]).name.startswith(LIBRARIES)})


def to_json(found: list[Port]) -> list[dict[str, Any]]:
    """The ports, for the report."""
    return [asdict(port) for port in found]
