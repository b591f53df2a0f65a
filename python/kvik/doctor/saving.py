"""Records what a reading of a machine looked at, without what names it or its owner.

Taken out: serial numbers, MAC addresses, GUIDs and GIDs (of a GID its kind is kept), UUIDs, host names, IP
addresses, where file systems are mounted from and to, names of control groups, users' paths, processes. What
is kept says what parts the machine has, how they are connected, and how fast.
"""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from kvik.doctor import cables, containers
from kvik.doctor.examining import examine
from kvik.doctor.host import MODULES, gid_class
from kvik.doctor.libraries import FILE, NCCL_WHEEL, words
from kvik.doctor.pci import extended_capabilities
from kvik.doctor.tree import FORMAT, SITE, RecordingReader, Tree

_GIDS = {
    "ipv4": "0000:0000:0000:0000:0000:ffff:c000:0201",  # 192.0.2.1, of no network (RFC 5737)
    "link-local": "fe80:0000:0000:0000:0000:0000:0000:0001",
    "other": "2001:0db8:0000:0000:0000:0000:0000:0001",  # of no network (RFC 3849)
}
_SERIAL_NUMBER = 0x03  # extended capability; of NICs it holds the MAC
# enx001122334455, rocex0011..., and no number such as 0x0000000012345678
_NAMED_BY_ADDRESS = re.compile(r"(?<=[a-z]x)[0-9a-f]{12}(?:[0-9a-f]{4})?\b")
_NAMING = (
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "uuid"),
    (re.compile(r"\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5,}\b", re.IGNORECASE), "mac"),
    (re.compile(r"\b[0-9a-f]{4}(?::[0-9a-f]{4}){3,7}\b", re.IGNORECASE), "guid"),
    (re.compile(r"\b[0-9a-f]{1,4}(?::{1,2}[0-9a-f]{1,4}){4,7}\b", re.IGNORECASE), "address"),
    (re.compile(r"(?<!\.so\.)\b\d{1,3}(?:\.\d{1,3}){3}\b"), "address"),
)
_LIBRARIES = re.compile(r"/lib[a-z0-9_-]+\.so[0-9.]*$")
_PUBLIC = ("/usr/", "/opt/amazon/", "/opt/aws-ofi-nccl/", "/lib")


def save(tree: Tree, name: str, host: str | None = None) -> dict[str, Any]:
    """The document of a machine, as `tree.load` reads it. `host`: the name to take out, by default this
    host's.

    `name` stands in the document as it is given.
    """
    reader = RecordingReader(tree)
    examine(reader)
    # A host may be called as a part of a path is (dev, node), and without that path nothing would be found.
    without, clean_text = _cleaner(""), _cleaner(socket.gethostname() if host is None else host)
    moved = _mover(reader)

    def clean(path: str) -> str:
        return without(containers.without_names(moved(path)))

    files: dict[str, str] = {}
    binary: dict[str, str] = {}
    for path, content in sorted(reader.files.items()):
        if path.endswith("/config"):
            binary[clean(path)] = base64.b64encode(without_serial(content)).decode("ascii")
        elif path.startswith(cables.ETHTOOL):
            kept = cables.without_serial(content) if path.endswith("/module") else content
            binary[clean(path)] = base64.b64encode(kept).decode("ascii")
        else:
            files[clean(path)] = clean_text(_kept(path, content.decode("utf-8", errors="replace")))
    for path in _seen(reader, moved):
        files.setdefault(clean(path), "")
    return {
        "format": FORMAT,
        "name": name,
        "files": files,
        "links": {
            clean(path): clean(target)
            for path, target in sorted(reader.links.items())
            if path.startswith((*_PUBLIC, "/sys", "/proc", "/dev"))
        },
        "binary": binary,
        "unread": {
            clean(path): reason for path, reason in sorted(reader.unread.items()) if reason != "absent"
        },
        "commands": {},
    }


def _mover(reader: RecordingReader) -> Callable[[str], str]:
    """Puts the engine's packages, and what conda has beside Python, where a recording has them: their own
    places are a user's paths."""
    beside = SITE.rpartition("/")[0].rpartition("/")[0]
    places = [(reader.resolve(site), SITE) for site in reader.sites()]
    places += [
        (here.rpartition("/")[0].rpartition("/")[0], beside)
        for here, _ in places
        if not here.startswith(_PUBLIC)
    ]

    def moved(path: str) -> str:
        for here, there in places:
            if path == here or path.startswith(f"{here}/"):
                return there + path[len(here) :]
        return path

    return moved


def _seen(reader: RecordingReader, moved: Callable[[str], str]) -> list[str]:
    """Names in folders whose listing is the fact: device files, libraries, modules."""
    found = []
    for folder, names in reader.folders.items():
        packages = moved(folder).startswith(SITE.partition("/lib/")[0])
        for name in names:
            if packages and NCCL_WHEEL.fullmatch(name):
                found.append(f"{folder}/{name}/METADATA")
            wanted = (
                (folder.startswith("/dev") and re.fullmatch(r"nvidia\d+|uverbs\d+|null", name))
                or (folder.startswith(_PUBLIC) and _LIBRARIES.search(f"/{name}"))
                or (packages and FILE.fullmatch(name))
                or (folder == "/sys/module" and name in MODULES)
                or (folder.startswith(containers.GROUPS) and name in ("cgroup.controllers", "cgroup.procs"))
                or folder.endswith(("/gids", "/counters"))
            )
            path = f"{folder}/{name}"
            if wanted and path not in reader.links and path not in reader.files and path not in reader.unread:
                found.append(path + ("/refcnt" if folder == "/sys/module" else ""))
    return found


def without_serial(config: bytes) -> bytes:
    """Config space with zeros for the device's serial number."""
    content = bytearray(config)
    for kind, at in extended_capabilities(config):
        if kind == _SERIAL_NUMBER:
            content[at + 4 : at + 12] = bytes(len(content[at + 4 : at + 12]))
    return bytes(content)


def _cleaner(host: str) -> Callable[[str], str]:
    names = {host, host.partition(".")[0]} - {"", "localhost"}
    hosts = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)))
    numbers: dict[str, str] = {}  # Two devices that are named by their addresses are two in the recording.

    def clean(text: str) -> str:
        text = _NAMED_BY_ADDRESS.sub(lambda found: numbers.setdefault(found[0], str(len(numbers))), text)
        for pattern, word in _NAMING:
            text = pattern.sub(partial(_without_name, word), text)
        return hosts.sub("host", text) if names else text

    return clean


def _without_name(word: str, found: re.Match[str]) -> str:
    """The word instead of what was found, unless it names nobody."""
    names_nobody = found[0] in _GIDS.values() or not found[0].strip("0:")
    return found[0] if names_nobody else word


def _kept(path: str, text: str) -> str:
    """Of files that say more than is needed, what is needed."""
    if "/gids/" in path:
        gid = text.strip()
        return _GIDS[gid_class(gid)] if gid.replace(":", "").strip("0") else gid
    if FILE.fullmatch(path.rpartition("/")[2]):
        return words(text)
    for end, keep in _KEEP.items():
        if path.endswith(end):
            return keep(text)
    return text


def _lines(pattern: str) -> Callable[[str], str]:
    return lambda text: "\n".join(found[0] for found in re.finditer(pattern, text, re.MULTILINE))


def _mounts(text: str) -> str:
    kept = []
    for index, line in enumerate(text.splitlines()):
        fields = line.split()
        if len(fields) >= 4:
            options = re.findall(r"(?:^|,)((?:proto|vers|rsize|wsize|nconnect)=[\w.]+)", fields[3])
            target = "/" if fields[1] == "/" else f"/mount{index}"
            kept.append(f"source{index} {target} {fields[2]} {','.join(['rw', *options])} 0 0")
    return "\n".join(kept)


def _maps(text: str) -> str:
    kept = []
    for line in text.splitlines():
        path = "".join(line.split(maxsplit=5)[5:])
        if _LIBRARIES.search(path):
            file = path.rpartition("/")[2]
            inside = "site-packages/" if "site-packages" in path else ""
            kept.append(
                f"0-1 r-xp 0 0:0 0 {path if path.startswith(_PUBLIC) else f'/elsewhere/{inside}{file}'}"
            )
    return "\n".join(sorted(set(kept)))


_KEEP: dict[str, Callable[[str], str]] = {
    "/mounts": _mounts,
    "/maps": _maps,
    "/proc/self/cgroup": containers.own_groups,
    "/proc/1/cgroup": containers.engines_of_groups,
    "/mountinfo": containers.engines_of_mounts,
    "/.containerenv": lambda _: "",
    "/uid_map": lambda text: text if text.split()[2:] == ["4294967295"] else "0 1 1",
    "/status": _lines(r"^(CapEff|Cpus_allowed_list):.*$"),
    "/limits": _lines(r"^(Limit|Max locked memory).*$"),
    "/information": _lines(r"^Model:.*$"),
    "/nvidia/version": _lines(r"^NVRM version:.*?Kernel Module.*?\s\d+[\d.]*"),
}
