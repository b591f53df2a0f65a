"""A Slurm of one node: its controller, and beyond a cable, in a network namespace, the node."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvik.roles.hosts import CABLE, CannotError, Host, two_hosts
from kvik.roles.processes import Process

LIMIT = 120.0  # seconds for a daemon to be there
DAEMONS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
CONFIG = """
ClusterName=kvik
SlurmctldHost={host}({right})
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=beyond NodeHostname={host} NodeAddr={left} CPUs=4 RealMemory=1000
PartitionName=main Nodes=beyond Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """Who stands on `right` asks Slurm for the node, which is at the other end of the cable."""

    left: Host
    right: Host
    config: Path

    def cable(self, state: str) -> None:
        """`down`: what is sent is lost, and nobody is told; `up` mends it."""
        self.left.run("ip", "link", "set", CABLE, state)

    def ask(self, *command: str) -> str:
        """One of Slurm's commands."""
        with self.right.inside():
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
        return done.stdout


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """The cluster, for as long as the block lasts. `CannotError` where it cannot be made."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    there = {name: shutil.which(name, path=path) for name in DAEMONS}
    if missing := [DAEMONS[name] for name, found in there.items() if found is None]:
        raise CannotError(f"not installed: {', '.join(missing)}")
    with two_hosts() as (left, right), contextlib.ExitStack() as stack:
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o755)
        key, socket, config = folder / "munge" / "key", folder / "munge" / "socket", folder / "slurm.conf"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        config.write_text(
            CONFIG.format(folder=folder, host=platform.node().partition(".")[0], left=left.v4, right=right.v4)
        )
        os.environ["SLURM_CONF"] = str(config)
        stack.callback(os.environ.pop, "SLURM_CONF")
        files = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        commands = {
            "munged": (right, ["--foreground", "--force", f"--socket={socket}", *files]),
            "slurmctld": (right, ["-D", "-c"]),
            "slurmd": (left, ["-D", "-N", "beyond"]),
        }
        for name, (host, options) in commands.items():
            with host.inside():
                daemon = Process(name, [str(there[name]), *options], folder / f"{name}.out", grace=5.0)
            stack.callback(daemon.stop)
            if name == "munged":
                daemon.wait_until(socket.exists, time.monotonic() + LIMIT)
        cluster = Cluster(left, right, config)
        daemon.wait_until(lambda: _idle(cluster), time.monotonic() + LIMIT)
        yield cluster


def _idle(cluster: Cluster) -> bool:
    with contextlib.suppress(subprocess.CalledProcessError):
        return "idle" in cluster.ask("sinfo", "--noheader", "--format=%T")
    return False
