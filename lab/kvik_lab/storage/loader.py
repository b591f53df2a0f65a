"""Loads a file again and again, cold each time, and prints what it saw as a line of JSON: `loader.py SPEC`.

Where a file system is to be mounted, it is in a mount namespace of this process, so that it is gone with the
process, whatever ends it. This file needs nothing but the standard library, so that its text can be sent to
any machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEW_MOUNTS, RECURSIVE, PRIVATE = 0x20000, 0x4000, 0x40000  # unshare(2), mount(2)
MOUNT_LIMIT = 60.0  # seconds
SAMPLE, EACH = 4096, 1 << 20  # bytes of each MiB that go into the digest
EVICTIONS = (0.0, 0.001, 0.01, 0.1)  # seconds before each try
# mountstats of a mount over RDMA: bytes that came by RDMA, behind `rdma` on the line `xprt:`.
RDMA_REPLY = 14


class LoadError(Exception):
    """What cannot be mounted or loaded; the text says what to do."""


@contextlib.contextmanager
def mounted(storage: dict[str, str]) -> Iterator[Path]:
    """Where the file's path begins."""
    if storage["type"] == "none":
        yield Path("/")
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None):
        why = os.strerror(ctypes.get_errno())
        raise LoadError(f"no mount namespace can be made: {why}; mounting takes root")
    # Nothing here removes what is in the folder: a file system that stays mounted would lose its files.
    folder = tempfile.mkdtemp(prefix="kvik-storage-")
    try:
        mount(storage, folder)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], timeout=MOUNT_LIMIT, check=False)
    finally:
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def mount(storage: dict[str, str], folder: str) -> None:
    """Mount it, for reading only."""
    # With the server's address among the options the kernel needs no help.
    alone = ["-i"] if any(one.startswith("addr=") for one in storage["options"].split(",")) else []
    options = ",".join(filter(None, ("ro", storage["options"])))
    argv = ["mount", *alone, "-t", storage["type"], "-o", options, storage["source"], folder]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=MOUNT_LIMIT, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LoadError(f"`{' '.join(argv)}` ended with {done.returncode}: {said}")


def found_mount(path: Path) -> dict[str, str]:
    """The mount that a path is on: its folder, file system, and the options that hold."""
    best: dict[str, str] = {"folder": "", "type": "", "options": ""}
    path = path.resolve()  # a link may lead to another file system, as those of a model cache do
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        folder = left.split()[4].encode().decode("unicode_escape").encode("latin-1").decode()
        kind, _, options = [*right.split(), "", "", ""][:3]
        inside = folder == "/" or str(path) == folder or str(path).startswith(f"{folder}/")
        if inside and len(folder) >= len(best["folder"]):
            best = {"folder": folder, "type": kind, "options": options}
    return best


def counters(mount: dict[str, str]) -> dict[str, float]:
    """What grows with loads: of this process, and of a mount of NFS by the names of node-exporter."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                found["kvik_lab_read_bytes_total"] = float(value)
    if mount["type"].startswith("nfs"):
        found.update(nfs_counters(Path("/proc/self/mountstats").read_text(), mount["folder"]))
    return found


def nfs_counters(text: str, folder: str) -> dict[str, float]:
    """Of one mount, from mountstats; nothing where it is not there."""
    found: dict[str, float] = {}
    own = False
    for line in text.splitlines():
        words = line.split()
        if line.startswith("device "):
            own = words[4] == folder
        elif own and words:
            _add(found, words)
    return found


def _add(found: dict[str, float], words: list[str]) -> None:
    if words[0] == "xprt:":
        found[f'kvik_lab_nfs_transport{{protocol="{words[1]}"}}'] = 1.0
        if words[1] == "rdma" and len(words) > 1 + RDMA_REPLY + 1:
            found["kvik_lab_nfs_rdma_reply_bytes_total"] = float(words[2 + RDMA_REPLY])
    elif words[0] == "bytes:":
        found["node_mountstats_nfs_read_bytes_total"] = float(words[1])
        found["node_mountstats_nfs_total_read_bytes_total"] = float(words[5])
    elif words[0] == "READ:":
        found['node_mountstats_nfs_operations_requests_total{operation="READ"}'] = float(words[1])
        found['node_mountstats_nfs_operations_major_timeouts_total{operation="READ"}'] = float(words[3])
        found["kvik_lab_nfs_retransmissions_total"] = float(words[2]) - float(words[1])


def evict(path: Path) -> float:
    """Take a file out of the page cache; the share of its pages that are in there still.

    A page that somebody holds stays, and the kernel itself holds one for a moment, as when it moves pages
    together: seen in 1 of 3,000 tries, and in 1 of 300 beside a compaction. So it is tried again before one
    counts. Where no page goes it is not: a file system in memory has no other place for them, and a pause
    before each of its loads would set them apart from those of another one.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)  # what is not written yet would stay
        for pause in EVICTIONS:
            time.sleep(pause)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            share = resident(path)
            if share in (0.0, 1.0):
                break
    finally:
        os.close(handle)
    return share


def resident(path: Path) -> float:
    """The share of a file's pages that are in the page cache; all, where the kernel does not tell."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:
        count = -(-size // mmap.PAGESIZE)
        told = (ctypes.c_ubyte * count)()
        first = ctypes.c_char.from_buffer(pages)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), told)
        del first
        return 1.0 if failed else sum(one & 1 for one in bytes(told)) / count


def read_into(path: Path, memory: memoryview, request: int) -> int:
    """Read a file into memory; the bytes that it has, or those that came where that is fewer."""
    done = 0
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while done < len(memory):
            got = file.readinto(memory[done : done + request])
            if not got:
                break
            done += got
    return size if done == min(size, len(memory)) else done


def copy_into(path: Path, memory: memoryview, request: int) -> int:
    """The same from a mapping."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as pages, memoryview(pages) as mapped:
            for at in range(0, min(size, len(memory)), request):
                end = min(at + request, size, len(memory))
                memory[at:end] = mapped[at:end]
    return size


def one_load(path: Path, memory: memoryview, load: dict[str, Any]) -> dict[str, float]:
    """A load, cold."""
    share = evict(path)
    way = copy_into if load["by"] == "mmap" else read_into
    begun = time.perf_counter()
    size = way(path, memory, load["request"])
    return {"seconds": time.perf_counter() - begun, "bytes": float(size), "resident": share}


def digest(memory: memoryview) -> str:
    """Of a part of each MiB: that two arms loaded the same is seen without reading all of it again."""
    found = 0
    for at in range(0, len(memory), EACH):
        found = zlib.crc32(memory[at : at + SAMPLE], found)
    return f"{found:08x}"


def measured(storage: dict[str, str], load: dict[str, Any]) -> dict[str, Any]:
    """Mount, load as often as asked, and unmount."""
    with mounted(storage) as root:
        path = root / load["path"].lstrip("/")
        if not path.is_file() or not path.stat().st_size:
            raise LoadError(
                f"{load['path']}: is no file there, or an empty one; put the model's file there, "
                "or mend load.path"
            )
        place = found_mount(path)
        memory = memoryview(bytearray(load["bytes"]))
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1  # so that no load is the first to touch a page
        before = counters(place)
        loads = [one_load(path, memory, load) for _ in range(load["warmup"] + load["loads"])]
        after = counters(place)
        return {
            "mount": place, "loads": loads, "before": before, "after": after, "digest": digest(memory),
            "cpu_seconds": sum(os.times()[:4]),
        }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Print what was measured, or why nothing was."""
    asked = json.loads(arguments[0])
    try:
        found = measured(asked["storage"], asked["load"])
    except (LoadError, OSError, subprocess.SubprocessError) as error:
        print(f"the file cannot be loaded: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
