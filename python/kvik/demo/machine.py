"""The memory that can be had here."""

from pathlib import Path

from kvik.demo.scene import SettingError
from kvik.demo.words import size

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2, as seen from inside a container


def check_memory(needed: int, what: str, instead: str) -> None:
    """`SettingError` unless `needed` bytes are free; `what` wants them, and `instead` wants less."""
    have = available_memory()
    if have < needed:
        raise SettingError(
            f"not enough memory: {what} want {size(needed)}, and {size(have)} are free; try {instead}"
        )


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that processes can still get: what the kernel says, or less where a control group limits it."""
    lines = (line.partition(":") for line in meminfo.read_text().splitlines())
    kernel = next(int(value.split()[0]) << 10 for name, _, value in lines if name == "MemAvailable")
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if not (limit.exists() and used.exists()) or limit.read_text().strip() == "max":
        return kernel
    # Pages of files that nobody has used lately are counted as used, and are given up when memory is short.
    stats = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    taken = int(used.read_text()) - int(stats.get("inactive_file", 0))
    return max(0, min(kernel, int(limit.read_text()) - taken))
