"""What confines this process: its control groups, the processors that it may use, and the container it is in.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`, `memory.max`) and cgroup-v1
(`cpu.cfs_quota_us`, `memory.limit_in_bytes`); proc(5) for `status` and `mountinfo`; for the marks of
containers, systemd's src/basic/virt.c, and where Docker, containerd, CRI-O, Podman and the kubelet keep what
they mount.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvik.doctor.model import Limits
from kvik.doctor.reader import Reader

GROUPS = "/sys/fs/cgroup"
CONTROLLERS = ("cpu", "cpu,cpuacct", "memory")
# By controller and whether it is of the old interface.
_FILES = {
    ("cpu", True): ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ("cpu", False): ("cpu.max",),
    ("memory", True): ("memory.limit_in_bytes",),
    ("memory", False): ("memory.max",),
}
_NO_LIMIT = 1 << 62  # The old interface writes it as the largest number of whole pages.
# What the path of a control group, or a place on the host, has in it where a container's engine made it.
ENGINES = re.compile(r"\b(docker|kubepods|kubelet|containerd|crio|libpod|podman|overlay-containers|lxc)\b")
# What each engine mounts over the image's own files. A host has the engines' places too, and not here.
_MOUNTED = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/dev/termination-log")


def read_groups(reader: Reader, limits: Limits) -> Limits:
    """The limits, with those of the control groups that hold this process, the least of all above it."""
    paths = _paths(reader.text("/proc/self/cgroup") or "")
    status = reader.text("/proc/self/status") or ""
    allowed = re.search(r"^Cpus_allowed_list:\s*([0-9,-]{1,4096})$", status, re.MULTILINE)
    limits = replace(limits, cpus_allowed=allowed[1] if allowed else None)
    for controller, limit in (("cpu", _quota), ("memory", _memory)):
        old = controller in paths
        root = f"{GROUPS}/{controller}" if old else GROUPS
        path = paths.get(controller, paths.get(""))
        if path is None or not reader.names(root):
            continue  # That it is absent is noted.
        found = [
            limit(
                [
                    reader.text(f"{root}{group}/{name}", optional=True) or ""
                    for name in _FILES[controller, old]
                ]
            )
            for group in _above(path)
        ]
        least = min((one for one in found if one is not None), default=None)
        if controller == "cpu":
            limits = replace(limits, cpu_quota_known=True, cpu_quota=least)
        else:
            limits = replace(
                limits, memory_limit_known=True, memory_limit=None if least is None else int(least)
            )
    return limits


def _paths(text: str) -> dict[str, str]:
    """By controller: the group; that of the unified hierarchy by the empty name."""
    found = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _above(path: str) -> Iterator[str]:
    """A group and those that hold it. What a container calls by its host's path is at the mount's root."""
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _quota(texts: list[str]) -> float | None:
    """Processors, of `QUOTA PERIOD` in one file or two; None without a limit. A group without the controller
    has no such file, and no limit."""
    words = " ".join(texts).split()
    if len(words) != 2 or not all(re.fullmatch(r"[0-9]{1,18}", word) for word in words):
        return None
    quota, period = map(int, words)
    return quota / period if quota and period else None


def _memory(texts: list[str]) -> float | None:
    limit = int(texts[0]) if re.fullmatch(r"[0-9]{1,19}", texts[0]) else _NO_LIMIT
    return limit if limit < _NO_LIMIT else None


def container_marks(reader: Reader) -> tuple[str, ...]:
    """By what this is known for a container; empty on a host, as far as can be seen.

    A root of another file system than an overlay says nothing: Docker has others, and a mark of a container's
    engine tells. A machine that was made from an image may have `/.dockerenv` and be none."""
    found = []
    for line in (reader.text("/proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[1] == "/" and fields[2] == "overlay":
            found.append("root on overlay")
    found += [
        path
        for path in ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
        if reader.text(path, optional=True) is not None
    ]
    group = ENGINES.search(reader.text("/proc/1/cgroup") or "")
    found += [f"control group of {group[1]}"] if group else []
    engines = {
        name for name in map(_engine, (reader.text("/proc/self/mountinfo") or "").splitlines()) if name
    }
    found += [f"mounts of {name}" for name in sorted(engines)]
    return tuple(dict.fromkeys(found))


def _engine(line: str) -> str | None:
    """Whose mount a line of `mountinfo` is: told by its root, which is the place on the host."""
    fields = line.split()
    if len(fields) < 5:
        return None
    if fields[4].startswith("/run/secrets/kubernetes.io"):
        return "kubelet"
    name = ENGINES.search(fields[3]) if fields[4] in _MOUNTED else None
    return name[1] if name else None


def not_there(reader: Reader) -> tuple[str, ...]:
    """Of what transfers need of a host: what is not in this container."""
    absent = [path for path in ("/dev/infiniband", "/sys/class/infiniband") if not reader.names(path)]
    if not any(re.fullmatch(r"nvidia\d+", name) for name in reader.names("/dev")):
        reader.miss("/dev/nvidia0", "absent")
        absent.append("/dev/nvidia*")
    return tuple(absent)


def without_names(path: str) -> str:
    """A path of a control group's file with a word for each name: those of containers and users are in it."""
    if not path.startswith(f"{GROUPS}/"):
        return path
    *groups, last = path.removeprefix(f"{GROUPS}/").split("/")
    root = [groups.pop(0)] if groups and groups[0] in CONTROLLERS else []
    return "/".join([GROUPS, *root, *("group" for _ in groups), last])


def own_groups(text: str) -> str:
    """`/proc/self/cgroup` in the same words."""
    lines = (line.rpartition(":") for line in text.splitlines())
    return "\n".join(f"{head}:{re.sub(r'[^/]+', 'group', path)}" for head, _, path in lines)


def engines_of_groups(text: str) -> str:
    """`/proc/1/cgroup` with the name of the container's engine only."""
    found = ENGINES.search(text)
    return f"0::/{found[1]}" if found else "0::/"


def engines_of_mounts(text: str) -> str:
    """`/proc/self/mountinfo` with what says whose mounts they are."""
    names = sorted({name for name in map(_engine, text.splitlines()) if name})
    return "\n".join(f"1 1 0:1 /{name}/x {_MOUNTED[0]} rw" for name in names)
