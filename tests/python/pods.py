"""Pods of rendered manifests as processes of this machine, told exactly what their containers are told.

Each has an address of loopback of its own, for all of its ports. Where `Container` is used, it also has what
a container has of a file system: one that cannot be written but for its volumes, with its own /etc/hosts, and
no capabilities.
"""

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.python.manifests import Workload

LIMIT = 60.0
HELD = ("PATH", "LD_LIBRARY_PATH")  # of this process's environment; a container has its own
SECRET = "a secret of this test only"  # noqa: S105
# Of this machine's /etc, what names of hosts and libraries are found by.
_ETC = ("group", "host.conf", "ld.so.cache", "nsswitch.conf", "passwd")
_DATA = "/var/lib/kvik"
_SERVERS = "/etc/kvik/store"
# 1: its /etc, 2: its /var/lib, 3: further folders that may be written, 4...: the command.
_SCRIPT = f"""
set -e
mount --bind "$1" /etc
mount --bind "$2" /var/lib
mount --bind "$2/kvik" {_DATA}
for folder in $3; do mount --bind "$folder" "$folder"; done
for folder in / /etc /var/lib; do mount -o remount,bind,ro "$folder"; done
shift 3
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all -- "$@"
"""


@dataclass
class Pod:
    """One pod as a process."""

    name: str
    address: str
    workload: Workload
    process: "subprocess.Popen[str]"
    log: Path

    def wait_ready(self) -> None:
        """Wait until it says that it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # or nothing, when it ended
        ready = line.startswith(("listening on", "kvik store serves on"))
        assert ready, f"{self.name} does not listen: {self.log.read_text()[-2000:]}"

    @property
    def url(self) -> str:
        """Where its HTTP is."""
        return self.url_of("http")

    def url_of(self, port: str) -> str:
        """Where one of its ports is."""
        return f"http://{self.address}:{self.workload.ports[port]}"

    def probe(self, kind: str) -> int:
        """Ask as the kubelet does; the status of the answer."""
        get = self.workload.container[kind]["httpGet"]
        return status_of(self.url_of(get["port"]) + get["path"])

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def status_of(url: str) -> int:
    """The HTTP status of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:  # noqa: S310  (http only)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@dataclass(frozen=True)
class Cluster:
    """What pods take from a cluster besides their own manifest."""

    objects: Sequence[Mapping[str, Any]] = ()
    """Where their ConfigMaps are."""
    secrets: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {"kvik-secret": {"KVIK_SECRET": SECRET}}
    )

    def config(self, name: str) -> dict[str, str]:
        """The data of a ConfigMap."""
        (found,) = [
            item["data"]
            for item in self.objects
            if item["kind"] == "ConfigMap" and item["metadata"]["name"] == name
        ]
        return dict(found)

    def environment(self, workload: Workload, name: str, address: str) -> dict[str, str]:
        """The variables of the container of one pod, as the kubelet sets them."""
        fields = {"status.podIP": address, "metadata.name": name}
        found: dict[str, str] = {}
        for source in workload.container.get("envFrom", ()):
            found |= self.secrets[source["secretRef"]["name"]]
        for entry in workload.container["env"]:
            match entry:
                case {"value": text}:
                    value = text
                case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    value = fields[path]
                case {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
                    value = self.secrets[secret][key]
                case {"valueFrom": {"configMapKeyRef": {"name": config, "key": key}}}:
                    value = self.config(config)[key]
                case _:
                    raise AssertionError(f"{workload.name}: where is the value of {entry}?")
            found[entry["name"]] = value
        return found


class Container:
    """A file system for one pod. Its volume for data outlives the process."""

    def __init__(self, workload: Workload, cluster: Cluster, folder: Path) -> None:
        self._etc, self._var = folder / "etc", folder / "var"
        self._etc.mkdir(parents=True)
        (self._var / "kvik").mkdir(parents=True)
        for name in _ETC:
            if Path("/etc", name).exists():
                shutil.copy(Path("/etc", name), self._etc)
        self._hosts = self._etc / "hosts"
        self._hosts.touch()
        mounts = {mount["mountPath"]: mount["name"] for mount in workload.container.get("volumeMounts", ())}
        if _SERVERS in mounts:
            self._config(_volume(workload, mounts.pop(_SERVERS)), cluster)
        self._has_data = mounts.pop(_DATA, None) is not None
        self._written = list(mounts)
        assert self._written in ([], ["/tmp"]), "this knows no other volumes"  # noqa: S108 (not written here)

    def _config(self, volume: Mapping[str, Any], cluster: Cluster) -> None:
        folder = self._etc / _SERVERS.removeprefix("/etc/")
        folder.mkdir(parents=True)
        data = cluster.config(volume["configMap"]["name"])
        for item in volume["configMap"]["items"]:
            (folder / item["path"]).write_text(data[item["key"]])

    def names(self, lines: Iterable[tuple[str, str]]) -> None:
        """What names of hosts stand for, as a cluster's DNS tells: pairs of address and name."""
        self._hosts.write_text("".join(f"{address} {name}\n" for address, name in lines))

    @property
    def data(self) -> Path:
        """The volume for data."""
        assert self._has_data
        return self._var / "kvik"

    def command(self, words: Sequence[str]) -> list[str]:
        """A command within it."""
        unshare = ["unshare", "--mount", "--propagation", "private"]
        inner = ["sh", "-c", _SCRIPT, "sh", str(self._etc), str(self._var), " ".join(self._written), *words]
        return [*unshare, *inner]


def _volume(workload: Workload, name: str) -> Mapping[str, Any]:
    (found,) = [volume for volume in workload.pod["volumes"] if volume["name"] == name]
    return dict(found)


def need_containers() -> None:
    """Skip the test where a process cannot be given a file system of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("mount namespaces take root, `unshare` and `setpriv`")
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace can be made: {tried.stderr.strip()}")


def start(
    workload: Workload,
    name: str,
    address: str,
    folder: Path,
    *,
    cluster: Cluster | None = None,
    container: Container | None = None,
    names: Mapping[str, str] | None = None,
) -> Pod:
    """Start one pod.

    names: what in its arguments is written otherwise, where no container has names of hosts.
    """
    declared = (cluster or Cluster()).environment(workload, name, address)
    words = [sys.executable, "-m", "kvik.cli", *workload.arguments(declared)]
    for text, other in (names or {}).items():
        words = [word.replace(text, other) for word in words]
    log = folder / f"{name}.log"
    with log.open("a") as err:
        process = subprocess.Popen(
            container.command(words) if container else words,
            env={key: os.environ[key] for key in HELD if key in os.environ} | declared,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=err,
        )
    return Pod(name, address, workload, process, log)
