"""Libraries of fabrics and GPUs: the host's, those of the serving engine's Python packages, and this
process's.

Of a few of them the file says what clashes are told by: libfabric and NCCL's plug-ins for it the versions of
its interface (`FABRIC_1.7`, in the linker's version tables), libibverbs where it looks for the drivers of
NICs (rdma-core, libibverbs/init.c: `VERBS_PROVIDER_DIR`). Wheels have copies under names of their own
(`libibverbs-1de1263b.so.1.14.48.0`, by auditwheel), which the linker takes for libraries of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvik.doctor.model import Library
from kvik.doctor.reader import Reader

_NAMES = (
    "libfabric|libibverbs|libefa|libmlx5|librdmacm|libcuda|libnccl-net(?:-[a-z]+)*|libnccl|librccl|libucp"
)
FILE = re.compile(rf"({_NAMES})(?:-[0-9a-f]{{8}})?\.so(?:\.([0-9][0-9.]*))?")
DRIVER = re.compile(r"lib(\w+)-rdmav[0-9]+\.so")
NCCL_WHEEL = re.compile(r"nvidia_nccl_cu[0-9]+-([0-9][0-9.]*)\.dist-info")
_INTERFACE = re.compile(r"\bFABRIC_1\.([0-9]{1,3})\b")
_DRIVERS_OF = re.compile(r"/[\w./-]+/libibverbs\b(?![.\w-])")
_FOLDERS = {
    "/usr/lib/x86_64-linux-gnu": "system",
    "/usr/lib/aarch64-linux-gnu": "system",
    "/usr/lib64": "system",
    "/usr/local/lib": "system",
    "/opt/amazon/efa/lib": "efa",
    "/opt/amazon/efa/lib64": "efa",
    # Where the EFA installer, and who builds it by its README, puts NCCL's plug-in.
    "/opt/amazon/ofi-nccl/lib": "efa",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu": "efa",
    "/opt/amazon/aws-ofi-nccl/lib": "efa",
    "/opt/aws-ofi-nccl/lib": "efa",
}


def read_libraries(reader: Reader) -> tuple[Library, ...]:
    """Those in the usual folders and in the engine's packages, and what this process has mapped."""
    found: dict[str, Library] = {}
    for folder, origin in _FOLDERS.items():
        names = reader.names(folder, optional=True)
        found.update((library.path, library) for library in _fullest(names, folder, origin))
    for site in reader.tree.sites():
        found.update((library.path, library) for library in _of_packages(reader, site))
    for line in (reader.text("/proc/self/maps") or "").splitlines():
        path = "".join(line.split(maxsplit=5)[5:])
        match = FILE.fullmatch(path.rpartition("/")[2])
        if match and match[2]:
            origin = "engine" if "site-packages" in path else "loaded"
            known = found.get(path, Library(match[1], match[2], path, origin))
            found[path] = replace(known, origin=origin)
    return tuple(_looked_into(reader, found[path]) for path in sorted(found))


def _fullest(names: list[str], folder: str, origin: str) -> Iterator[Library]:
    """Each library of a folder by its fullest names: `libfabric.so.1` is a link where `.so.1.27.0` is too."""
    by_name: dict[str, list[tuple[str, str]]] = {}
    for file in names:
        match = FILE.fullmatch(file)
        if match:
            by_name.setdefault(match[1], []).append((file, match[2] or ""))
    for name, files in by_name.items():
        full = [(file, version) for file, version in files if "." in version]
        for file, version in full or [max(files, key=lambda one: one[1])]:
            yield Library(name, version, f"{folder}/{file}", origin)


def package_folders(site: str, names: list[str]) -> Iterator[str]:
    """Where packages have libraries: what auditwheel took into a wheel, NVIDIA's NCCL, an older torch, and
    what conda has beside Python."""
    yield from (f"{site}/{name}" for name in names if name.endswith(".libs"))
    if "nvidia" in names:
        yield f"{site}/nvidia/nccl/lib"
    if "torch" in names:
        yield f"{site}/torch/lib"
    beside = site.rpartition("/")[0].rpartition("/")[0]
    if beside.endswith("/lib") and beside not in ("/usr/lib", *_FOLDERS):
        yield beside


def _of_packages(reader: Reader, site: str) -> Iterator[Library]:
    names = reader.names(site)
    wheels = [match[1] for match in map(NCCL_WHEEL.fullmatch, names) if match]
    for folder in package_folders(site, names):
        for library in _fullest(reader.names(folder, optional=True), folder, "engine"):
            # NVIDIA's wheel has `libnccl.so.2`, and its version in the wheel's own name.
            of_wheel = library.name == "libnccl" and len(wheels) == 1 and folder.startswith(f"{site}/nvidia/")
            yield replace(library, version=wheels[0]) if of_wheel else library


def _looked_into(reader: Reader, library: Library) -> Library:
    fabric = library.name == "libfabric" or library.name.startswith("libnccl-net")
    if not fabric and library.name != "libibverbs":
        return library
    # The first MiB, where the linker's tables and constants are.
    text = reader.text(library.path) or ""
    if fabric:
        versions = [int(found) for found in _INTERFACE.findall(text)]
        return replace(library, interface=max(versions, default=None))
    folder = next(iter(_DRIVERS_OF.findall(text)), None)
    if folder is None:
        return library
    there = map(DRIVER.fullmatch, reader.names(folder, optional=True))
    return replace(library, driver_folder=folder, drivers=tuple(match[1] for match in there if match))


def words(text: str) -> str:
    """What of a library's file is looked at, for recordings."""
    versions = {f"FABRIC_1.{number}" for number in _INTERFACE.findall(text)}
    return "\n".join(sorted({*versions, *_DRIVERS_OF.findall(text)}))
