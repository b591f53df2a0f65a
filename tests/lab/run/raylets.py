"""Ray on two hosts, each a network namespace: its head, and a second node, which can be ended and started."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvik.roles.hosts import CannotError, Host, two_hosts
from kvik.roles.processes import Process

PORT = 6379
LIMIT = 120.0  # seconds for a node to be there
NODE = (
    "start", "--block", "--disable-usage-stats", "--num-cpus=2", "--object-store-memory=80000000",
)  # fmt: skip


@dataclass
class Raylets:
    """The head is at the end of the cable where `right` is, and the second node beyond it."""

    left: Host
    right: Host
    folder: Path
    second: Process | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def address(self) -> str:
        """What a study asks."""
        return f"{self.right.v4}:{PORT}"

    def start_second(self) -> None:
        """The second node, which has a resource `beyond`."""
        options = [
            f"--address={self.address}",
            f"--node-ip-address={self.left.v4}",
            '--resources={"beyond": 1}',
        ]
        self.second = self.node("second", self.left, options)

    def node(self, name: str, host: Host, options: Sequence[str]) -> Process:
        """One node; it runs when Ray says so."""
        log = self.folder / f"{name}.out"
        log.write_text("")
        command = [sys.executable, "-m", "ray.scripts.scripts", *NODE, *options]
        with host.inside():
            node = Process(name, command, log, grace=5.0)
        self._stack.callback(node.stop)
        node.wait_until(lambda: "Ray runtime started" in node.said(), time.monotonic() + LIMIT)
        return node


@contextlib.contextmanager
def raylets() -> Iterator[Raylets]:
    """Both nodes, for as long as the block lasts. `CannotError` where they cannot be had."""
    if importlib.util.find_spec("ray") is None:
        raise CannotError("`ray` is not installed")
    # Sockets are in it, so its path is short.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, two_hosts() as (left, right):
        made = Raylets(left, right, Path(folder))
        with made._stack:
            options = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
            made.node("head", right, [*options, f"--node-ip-address={right.v4}"])
            made.start_second()
            yield made
