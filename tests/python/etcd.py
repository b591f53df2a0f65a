"""An etcd of its own, for servers of a store that enter themselves there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvik.roles.ports import LOOPBACK, free_ports

LIMIT = 60.0


class Etcd:
    """An etcd, which can be killed and started again, with what it had or without."""

    def __init__(self, program: str, folder: Path, *arguments: str) -> None:
        self._program, self._folder, self._starts, self._arguments = program, folder, 0, arguments
        scheme = "https" if any(one.startswith("--cert-file") for one in arguments) else "http"
        self.address, peer = (f"{LOOPBACK}:{port}" for port in free_ports(2))
        self._client, self._peer = f"{scheme}://{self.address}", f"http://{peer}"
        self.url = f"{self._client}/kvik/store"
        self.process = self._start()

    @staticmethod
    def program() -> str | None:
        """The one that is installed."""
        return shutil.which("etcd")

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self._program, "--name=one", f"--data-dir={self._folder / str(self._starts)}",
                 f"--listen-client-urls={self._client}", f"--advertise-client-urls={self._client}",
                 f"--listen-peer-urls={self._peer}", f"--initial-advertise-peer-urls={self._peer}",
                 f"--initial-cluster=one={self._peer}", *self._arguments],
                stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=LIMIT)

    def again(self, *, empty: bool) -> None:
        self._starts += empty
        self.process = self._start()
