"""Two hosts, each a network namespace with an sshd of its own, and the nodes of a study on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvik.roles.hosts import CABLE, CannotError, Host, two_hosts
from kvik.roles.processes import Process

PORT = 2222
LIMIT = 120.0  # seconds for an sshd to listen
CONFIG = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
ListenAddress {address}:{port}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxSessions 50
"""


@dataclass(frozen=True)
class Hosts:
    """Both hosts. `left` is reached over the cable; who stands on `right` reaches both."""

    left: Host
    right: Host
    options: tuple[str, ...]

    def nodes(self) -> str:
        """`nodes` of a study's `run`, as YAML."""
        options = ", ".join(f'"{one}"' for one in self.options)
        return "".join(
            f"    {name}: {{executor: ssh, host: root@{host.v4}, options: [{options}]}}\n"
            for name, host in (("one", self.left), ("two", self.right))
        )

    def cable(self, state: str) -> None:
        """`down`: what is sent is lost, and nobody is told; `up` mends it."""
        self.left.run("ip", "link", "set", CABLE, state)


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[Hosts]:
    """Both hosts, for as long as the block lasts. `CannotError` where they cannot be made."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        raise CannotError("`sshd` and `ssh` (packages openssh-server, openssh-client) are not installed")
    with two_hosts() as (left, right), contextlib.ExitStack() as stack:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as the package's service does
        for name in ("host", "user"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(make, check=True, timeout=LIMIT)
        public = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"[{one.v4}]:{PORT} {public}" for one in (left, right)))
        for host in (left, right):
            config = CONFIG.format(folder=folder, address=host.v4, port=PORT)
            # A session has an environment of its own; a tree that is tested without being installed is here.
            config += f"SetEnv PYTHONPATH={os.environ['PYTHONPATH']}\n" if "PYTHONPATH" in os.environ else ""
            (folder / f"{host.name}.conf").write_text(config)
            command = [sshd, "-D", "-e", "-f", str(folder / f"{host.name}.conf")]
            with host.inside():
                server = Process(f"sshd-{host.name}", command, folder / f"sshd-{host.name}.log", grace=2.0)
            stack.callback(server.stop)
            server.wait_until(lambda host=host: _listens(host), time.monotonic() + LIMIT)  # type: ignore[misc]
        options = (
            "-Fnone", f"-p{PORT}", f"-i{folder / 'user'}", f"-oUserKnownHostsFile={folder / 'known'}",
            "-oStrictHostKeyChecking=yes",
        )  # fmt: skip
        yield Hosts(left, right, options)


def _listens(host: Host) -> bool:
    with host.inside(), contextlib.suppress(OSError), socket.create_connection((host.v4, PORT), 1.0):
        return True
    return False
