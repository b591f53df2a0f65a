"""A machine's facts, counters and clocks, and which processes of a study are on it, as JSON: `python
machine.py [MARK]`.

`MARK` is the study's value of `KVIKLAB_STUDY`, which every process of it has in its environment, or one that
it descends from: a process that gives itself a title (vLLM's workers do) writes it over its environment.
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
_KERNEL_THREAD = 0x00200000  # of field 9 of stat
EXEC_LIMIT = 1.0  # seconds that a process may be inside execve and is waited for
EXEC_LOOKS = 20  # that it is looked at, however late this process gets its turns
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
    """The processes that have the study's mark, and those that descend from them, but this one."""
    return sorted(_with_children(marked(f"{VARIABLE}={mark}")) - {os.getpid()})


def _with_children(pids: list[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                children.setdefault(int(stat(folder)[4 - 3]), []).append(int(folder.name))
    found, new = set[int](), list(pids)
    while new:
        pid = new.pop()
        if pid not in found:
            found.add(pid)
            new += children.get(pid, ())
    return found


def marked(entry: str) -> list[int]:
    """The processes that have this entry in their environment.

    Within execve the environment of a process reads as empty, so it is read again.
    """
    found = []
    folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    until, looks = time.monotonic() + EXEC_LIMIT, 0
    while folders and (looks < EXEC_LOOKS or time.monotonic() < until):
        if looks:
            time.sleep(0.002)
        looks += 1
        unsure = []
        for folder in folders:
            with contextlib.suppress(OSError, IndexError):  # it has ended, or is another user's
                before = stat(folder)
                environment = (folder / "environ").read_bytes()
                if entry.encode() in environment.split(b"\0"):
                    found.append(int(folder.name))
                elif not _is_all(environment, before, stat(folder)):
                    unsure.append(folder)
        folders = unsure
    return sorted(found)


def _is_all(environment: bytes, before: list[bytes], after: list[bytes]) -> bool:
    """Whether that was the whole environment of a process, by what its stat said before and after."""
    bounds = slice(50 - 3, 52 - 3)  # env_start and env_end
    if environment:
        return before[bounds] == after[bounds]  # else it was that of the program before, or a part of it
    if after[0] in b"ZXx" or int(after[9 - 3]) & _KERNEL_THREAD:
        return True
    # It has none, as after `env -i`. Within execve that looks alike for a moment, but does not sleep.
    start, end = after[bounds]
    return start == end != b"0" and after[0] not in b"RD"


def stat(folder: Path) -> list[bytes]:
    """The fields of a process's stat from the third one on, its state (proc(5)); the name before them may
    have any bytes."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()


def _cpu(pid: int) -> int:
    """Ticks of a process and of its children that have ended (proc(5), fields 14 to 17 of stat)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return sum(int(one) for one in stat(Path(f"/proc/{pid}"))[11:15])
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
