"""What one must know of a machine to judge a figure measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2, as seen from inside a container


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def cpu_model() -> str:
    """The processor's own name, as the kernel gives it."""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def memory_available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes that can be used without swapping: what the kernel says, or less where a control group
    limits it. ``None`` where the kernel does not say.
    """
    said = (line.partition(":") for line in _lines(meminfo))
    kernel = next((int(value.split()[0]) << 10 for name, _, value in said if name == "MemAvailable"), None)
    limit, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if kernel is None or not used or limit in ([], ["max"]):
        return kernel
    # Pages of files that nobody has used lately are counted as used, and are given up when memory is short.
    stats = dict(line.split() for line in _lines(cgroup / "memory.stat"))
    taken = int(used[0]) - int(stats.get("inactive_file", 0))
    return max(0, min(kernel, int(limit[0]) - taken))


def cores_usable() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def autogroups() -> bool | None:
    """Whether the kernel shares cores out by sessions where processes are in no control group; ``None`` where
    it cannot. Processes that yield in loops then keep others from a core."""
    said = _lines("/proc/sys/kernel/sched_autogroup_enabled")
    return said[0].strip() != "0" if said else None


def kvik_version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version("kvik")
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"


def collect() -> dict[str, Any]:
    """Facts of this process and its machine. Nothing that names the host, a path or a person."""
    return {
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": cores_usable(),
        "kernel": platform.release(),
        "autogroups": autogroups(),
        "machine": platform.machine(),
        "load_1min": os.getloadavg()[0],
        "memory_available": memory_available(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvik": kvik_version(),
    }
