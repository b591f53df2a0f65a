"""A process between two engines that harms what passes.

A forward is a port that leads to a port; an engine puts a forward into its tickets with `advertise`. Each
connection is two pumps, `up` from who dialled and `down` to it. What is said of a forward holds for those of
its connections that were chosen: all, the control connections, or the data channels (their greetings differ).
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from tests.faults.sheets import MARK
from tests.faults.starter import end_with_starter
from tests.python.peers import Peer, Pipe

SLICE = 256 << 10  # bytes at once
BUFFER = 256 << 10  # bytes that a socket holds, so that a slow connection is soon full
QUANTUM = 0.01  # seconds of its rate that pass a throttled connection at once
JOIN = 6  # the greeting of a data channel: the fifth byte of a connection
HANG = 60.0  # seconds after which it answers no more
RESET = struct.pack("ii", 1, 0)


@dataclass
class Rules:
    """What is done to what passes."""

    which: str = "all"  # connections: all, control, data
    delay: float = 0.0  # seconds before each slice goes on
    rate: float = 0.0  # bytes a second and direction; 0 is as fast as can be
    stalled: bool = False  # nothing is read any more
    # What comes is thrown away, and new connections are taken but not led on. A connection that lost
    # something is reset when this is over, as by a gateway that has forgotten it.
    silent: bool = False
    flip: int = 0  # bits to flip, in so many slices from now on
    cut_after: int = -1  # close after so many more bytes


@dataclass(eq=False)
class Wire:
    """One connection through a forward."""

    ends: tuple[socket.socket, socket.socket]
    kind: str = "control"
    lost: bool = False
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def close(self, reset: bool) -> None:
        """Close both ends, with a RST or in order, once nothing here waits for them any more."""
        for task in self.tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(0.001, self._close, reset)

    def _close(self, reset: bool) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.close()


class Forward:
    """A port that leads to another one."""

    def __init__(self, target: tuple[str, int], host: str, seed: int) -> None:
        self.target = target
        self.rules = Rules()
        self.wires: set[Wire] = set()
        self.marks = 0
        self.random = random.Random(seed)
        self.due = {"up": 0.0, "down": 0.0}
        self.changed = asyncio.Event()
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.listener.bind((host, 0))
        self.listener.listen(256)
        self.listener.setblocking(False)
        self.task = asyncio.ensure_future(self._accept())

    def harmed(self, wire: Wire) -> Rules:
        """The rules, if they are for this connection."""
        return self.rules if self.rules.which in ("all", wire.kind) else Rules()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            inner, _ = await loop.sock_accept(self.listener)
            task = asyncio.ensure_future(self._serve(inner))
            _running.add(task)
            task.add_done_callback(_running.discard)

    async def _serve(self, inner: socket.socket) -> None:
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outer = socket.socket()
        outer.setblocking(False)
        outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        wire = Wire((inner, outer))
        self.wires.add(wire)
        try:
            await self._unless_silent(wire)
            await asyncio.get_running_loop().sock_connect(outer, self.target)
        except OSError:
            self._drop(wire, reset=True)
            return
        up = asyncio.ensure_future(self._pump(wire, inner, outer, "up"))
        down = asyncio.ensure_future(self._pump(wire, outer, inner, "down"))
        wire.tasks += [up, down]
        await asyncio.wait([up, down])
        self._drop(wire, reset=False)

    async def _unless_silent(self, wire: Wire) -> None:
        while self.harmed(wire).silent:
            await self._change()

    async def _pump(self, wire: Wire, source: socket.socket, sink: socket.socket, direction: str) -> None:
        loop = asyncio.get_running_loop()
        first = direction == "up"
        with contextlib.suppress(OSError):
            while True:
                rules = self.harmed(wire)
                if rules.stalled:
                    await self._change()
                    continue
                size = SLICE if not rules.rate else max(1024, int(rules.rate * QUANTUM))
                data = await loop.sock_recv(source, size)
                if not data:
                    break
                if first:
                    wire.kind, first = ("data" if data[4:5] == bytes([JOIN]) else "control"), False
                self.marks += data.count(MARK)
                await self._pass_on(wire, sink, direction, data)
            sink.shutdown(socket.SHUT_WR)

    async def _pass_on(self, wire: Wire, sink: socket.socket, direction: str, data: bytes) -> None:
        rules = self.harmed(wire)
        if rules.delay:
            await asyncio.sleep(rules.delay)
        if rules.rate:
            await self._turn(direction, len(data) / rules.rate)
        rules = self.harmed(wire)
        if rules.silent:
            wire.lost = True
            return
        if rules.flip > 0:
            rules.flip -= 1
            data = self._flipped(data)
        if 0 <= rules.cut_after < len(data):
            data, rules.cut_after = data[: rules.cut_after], -1
            await asyncio.get_running_loop().sock_sendall(sink, data)
            self._drop(wire, reset=False)
            return
        if rules.cut_after >= 0:
            rules.cut_after -= len(data)
        await asyncio.get_running_loop().sock_sendall(sink, data)

    async def _turn(self, direction: str, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self.due[direction] = max(now, self.due[direction]) + seconds
        await asyncio.sleep(self.due[direction] - now)

    def _flipped(self, data: bytes) -> bytes:
        harmed = bytearray(data)
        harmed[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(harmed)

    async def _change(self) -> None:
        changed = self.changed
        await changed.wait()

    def _drop(self, wire: Wire, reset: bool) -> None:
        self.wires.discard(wire)
        wire.close(reset)

    # ---- what it can be told ----

    def set(self, **rules: Any) -> None:
        """From now on, these rules hold and no others."""
        self.rules = dataclasses.replace(Rules(), **rules)
        for wire in [wire for wire in self.wires if wire.lost]:
            self._drop(wire, reset=True)
        self.changed.set()
        self.changed = asyncio.Event()

    def cut(self, reset: bool, which: str = "all", number: int = -1) -> int:
        """Cut connections, or one of them; how many there were."""
        chosen = [wire for wire in self.wires if which in ("all", wire.kind)]
        if number >= 0 and chosen:
            chosen = [chosen[number % len(chosen)]]
        for wire in chosen:
            self._drop(wire, reset)
        return len(chosen)


_running: set["asyncio.Task[None]"] = set()


def proxy(pipe: Pipe) -> None:
    """The process; it ends with its starter."""
    end_with_starter()
    asyncio.run(_obey(pipe))


async def _obey(pipe: Pipe) -> None:
    forwards: dict[int, Forward] = {}
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb"))
    while line := await reader.readline():
        heard = json.loads(line)
        call, port = heard.pop("call"), heard.pop("port", 0)
        if call == "open":
            forward = Forward((heard["host"], heard["to"]), heard["host"], heard.get("seed", 0))
            port = forward.listener.getsockname()[1]
            forwards[port] = forward
            pipe.say(port=port)
        elif call == "set":
            forwards[port].set(**heard)
            pipe.say()
        elif call == "cut":
            pipe.say(cut=forwards[port].cut(**heard))
        elif call == "marks":
            pipe.say(marks=forwards[port].marks)
            forwards[port].marks = 0
        await asyncio.sleep(0)


class Proxy:
    """The other end: starts the process and tells it what to do."""

    def __init__(self) -> None:
        self.peer = Peer(proxy)

    def open(self, to: int, host: str = "127.0.0.1", seed: int = 0) -> int:
        """A new forward; its port."""
        return int(self._ask(call="open", host=host, to=to, seed=seed)["port"])

    def set(self, port: int, **rules: Any) -> None:
        """Let these `Rules` hold at a forward."""
        self._ask(call="set", port=port, **rules)

    def cut(self, port: int, *, reset: bool, which: str = "all", number: int = -1) -> int:
        """Cut connections of a forward; how many."""
        return int(self._ask(call="cut", port=port, reset=reset, which=which, number=number)["cut"])

    def marks(self, port: int) -> int:
        """How often bytes of a source that was free again went through since the last question."""
        return int(self._ask(call="marks", port=port)["marks"])

    def _ask(self, **call: Any) -> dict[str, Any]:
        self.peer.say(**call)
        return self.peer.hear(HANG)

    def close(self) -> None:
        """End it."""
        self.peer.__exit__()
