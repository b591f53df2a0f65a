"""Where a run of the fault lab takes place: two sides with memory, and a connection that can be harmed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvik.roles.hosts import Host, Rate, two_hosts
from tests.faults import sheets
from tests.faults.pair import Pair
from tests.faults.plan import NBYTES, Plan
from tests.faults.sheets import Bytes, Sheet
from tests.faults.side import Handle, Reply
from tests.python.peers import stop

MOST = 3  # transfers of a run
RATE = 24 << 20  # bytes a second over TCP, so that a transfer lasts long enough to be hit
SMALL = 64 << 10
SECRET = "a secret of the fault lab"  # noqa: S105 - of these tests alone


class Scene:
    """A pair of sides through the proxy."""

    def __init__(self) -> None:
        self.pair: Any = self.make()
        self.content = sheets.old(NBYTES, 1)
        self.sheets: dict[tuple[str, str], Sheet] = {}
        for side in ("here", "there"):
            self.hold(side)

    def make(self) -> Any:
        """Start the sides."""
        pair = Pair("auto")
        for forward in pair.forwards.values():
            pair.proxy.set(forward, rate=RATE)
        return pair

    def side(self, name: str) -> Handle:
        """A side's handle."""
        handle: Handle = self.pair.sides[name]
        return handle

    def hold(self, side: str) -> None:
        """Give a side its memory: what it allocates itself, what it has from here, and a little for later."""
        handle = self.side(side)
        for name in [f"{kind}{i}" for kind in "am" for i in range(MOST)]:
            self._hold(side, handle, name)
        handle.ask("hold", name="later", nbytes=SMALL)

    def _hold(self, side: str, handle: Handle, name: str) -> None:
        if (side, name) in self.sheets:
            self.sheets.pop((side, name)).close()
        if name.startswith("a"):
            said = handle.ask("hold", name=name, nbytes=NBYTES)
            self.sheets[side, name] = Sheet.allocated_at(said["pid"], said["address"], NBYTES)
        else:
            self.sheets[side, name] = Sheet.make(NBYTES)
            handle.ask("hold", name=name, nbytes=NBYTES, path=self.sheets[side, name].path)

    def view(self, side: str, name: str) -> Bytes:
        """A side's memory."""
        return self.sheets[side, name].view

    def same(self, plan: Plan, name: str) -> bool:
        """Whether all bytes are in place."""
        want = sheets.expected(self.content, plan.page_bytes, plan.op, plan.order)
        return bool(np.array_equal(self.view(plan.target, name), want))

    # ---- faults ----

    def harm(self, plan: Plan, grants: list[str]) -> None:
        """Make the fault of a plan happen."""
        there = self.side("there")
        if plan.fault == "kill":
            os.kill(there.pid, signal.SIGKILL)
        elif plan.fault == "stop":
            stop(there.pid)
        elif plan.fault == "pause":
            stop(there.pid)
            time.sleep(plan.rules["seconds"])
            os.kill(there.pid, signal.SIGCONT)
        elif plan.fault == "unmap":
            self.unmap(plan, grants)
        elif plan.fault in ("reset", "close"):
            self.pair.proxy.cut(self.pair.forwards[plan.owner], reset=plan.fault == "reset", **plan.rules)
        else:
            self.pair.proxy.set(self.pair.forwards[plan.owner], **{"rate": RATE, **plan.rules})

    def unmap(self, plan: Plan, grants: list[str]) -> None:
        """Take the source's memory away, in order or without a word, and put other memory to the address."""
        there = self.side("there")
        if plan.rules["revoked"] and plan.owner == "there":
            for grant in grants:
                there.ask("revoke", grant=grant, timeout=5.0)
        for i in range(plan.transfers):
            there.ask("pull_away", name=f"m{i}")

    def heal(self, plan: Plan) -> None:
        """Undo it: afterwards both sides run and reach each other."""
        if plan.fault == "kill":
            self.pair.start_again("there")
            self.hold("there")
        elif plan.fault == "stop":
            os.kill(self.side("there").pid, signal.SIGCONT)
        elif plan.fault == "unmap":
            for i in range(plan.transfers):
                sheet = self.sheets["there", f"m{i}"]
                self.side("there").ask("come_back", name=f"m{i}", path=sheet.path)
        elif self.pair.forwards:
            self.pair.proxy.set(self.pair.forwards[plan.owner], rate=RATE)

    def counts(self) -> dict[str, Reply]:
        """What both sides hold."""
        return {name: self.side(name).ask("counts") for name in ("here", "there")}

    def close(self) -> None:
        """End everything."""
        self.pair.close()
        for sheet in self.sheets.values():
            sheet.close()


class HostPair:
    """Two engines on two hosts, which are network namespaces, and the cable between them."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.hosts = dict(zip(("here", "there"), hosts, strict=True))
        self.forwards: dict[str, int] = {}
        self.sides = {name: self._launch(name).ready() for name in self.hosts}

    def _launch(self, name: str) -> Handle:
        host = self.hosts[name]
        with host.inside():
            return Handle(listen=f"{host.v4}:0", secret=SECRET, transport="auto", name=name)

    def close(self) -> None:
        """End both."""
        for handle in self.sides.values():
            handle.close()


class Hosts(Scene):
    """The same on two hosts: the fault is the cable, which is pulled out."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.hosts = hosts
        super().__init__()

    def make(self) -> Any:
        """Start the sides, each on its host."""
        for host in self.hosts:
            host.shape(Rate.parse(f"{RATE * 8 / 1e6:.0f}mbit"))
        return HostPair(self.hosts)

    def harm(self, plan: Plan, grants: list[str]) -> None:  # noqa: ARG002 - as above
        """Pull the cable out."""
        self.hosts[1].run("ip", "link", "set", "eth0", "down")

    def heal(self, plan: Plan) -> None:  # noqa: ARG002 - as above
        """Put it in again."""
        self.hosts[1].run("ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """A scene on two hosts; raises `CannotError` where none can be made."""
    with two_hosts() as made:
        scene = Hosts(made)
        try:
            yield scene
        finally:
            scene.close()
