"""What one must know of a machine to judge a figure measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np


def _lines(path: str) -> list[str]:
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


def memory_available() -> int | None:
    """Bytes that can be used without swapping, or ``None`` where the kernel does not say."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
