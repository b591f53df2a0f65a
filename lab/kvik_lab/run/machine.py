"""A machine's facts, counters and clocks, and which processes of a study are on it, as JSON: `python
machine.py [MARK]`.

`MARK` is the study's value of `KVIKLAB_STUDY`, which every process of it has in its environment.
Counters have the names of node-exporter. This file needs nothing but the standard library, so that its
text can be sent to any machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "KVIKLAB_STUDY"
_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")  # proc(5), /proc/stat
_NIC = {0: "receive_bytes", 2: "receive_errs", 3: "receive_drop", 8: "transmit_bytes", 11: "transmit_drop"}


def facts() -> dict[str, object]:
    """What does not change while a run lasts. Nothing that names a person or a path."""
    found: dict[str, object] = {
        "host": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
        "cores_usable": len(os.sched_getaffinity(0)),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "emulated": _emulated(),
        "memory_bytes": int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024,
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }
    for device in sorted(Path("/sys/class/net").iterdir()):
        with contextlib.suppress(OSError, ValueError):
            found[f"nic_{device.name}_mbit"] = int((device / "speed").read_text())
    if shutil.which("nvidia-smi"):
        found["gpus"] = _lines(["nvidia-smi", "-L"])
        busy = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
        found["gpu_processes"] = _lines(busy)
    return found


def _emulated() -> str | None:
    """Where the processor is a program: then no time is one of hardware."""
    cpu = _first("/proc/cpuinfo", "model name") or ""
    return "a processor in software" if "QEMU TCG" in cpu else None


def counters(mark: str | None) -> dict[str, float]:
    """What grows: CPU time by mode, bytes of network devices, and the CPU time of the study's own
    processes."""
    found: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    for mode, value in zip(_MODES, first, strict=False):
        found[f'node_cpu_seconds_total{{mode="{mode}"}}'] = int(value) / tick
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        device, _, rest = line.partition(":")
        values = rest.split()
        for at, name in _NIC.items():
            found[f'node_network_{name}_total{{device="{device.strip()}"}}'] = float(values[at])
    if mark is not None:
        found["kvik_lab_own_cpu_seconds_total"] = sum(_cpu(pid) for pid in own(mark)) / tick
    return found


def own(mark: str) -> list[int]:
    """The processes that have the study's mark, but this one."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return sorted(found)


def _cpu(pid: int) -> int:
    """Ticks of a process and of its children that have ended (proc(5), fields 14 to 17 of stat)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(one) for one in fields[11:15])
    return 0


def _first(path: str, key: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


def _text(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None


def _lines(command: list[str]) -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    return []


def main(arguments: list[str]) -> int:
    """Print all of it."""
    mark = arguments[0] if arguments else None
    looked = {
        "facts": facts(),
        "counters": counters(mark),
        "wall": time.time_ns(),
        "monotonic": time.monotonic_ns(),
        "own": own(mark) if mark else [],
    }
    print(json.dumps(looked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
