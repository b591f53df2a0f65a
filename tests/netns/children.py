"""What runs on a host for a test: an engine that reads what it is told to, or one that may not start.

They are functions for `tests.python.peers.Peer`, as is `tests.python.peers.owner`.
"""

from typing import Any

import numpy as np

import kvik
from tests.netns.hosts import Host
from tests.python.peers import Peer, Pipe, owner, random_bytes

SECRET = "a secret of two hosts"  # noqa: S105 - of these tests alone
LIMIT = 60.0  # seconds for anything that should take a moment, on a machine that stands still


def reader(pipe: Pipe, *, pages: int = 8, page_bytes: int = 4096, **options: Any) -> None:
    """An engine that reads the tickets it hears, and says the report or the error of each."""
    with kvik.Engine(**options) as engine:
        region = engine.allocate(pages * page_bytes)
        view = np.frombuffer(memoryview(region), np.uint8)
        local = region.pages(kvik.Layout(pages, page_bytes), range(pages))
        pipe.say(id=engine.id)
        while (heard := pipe.hear())["do"] != "bye":
            view[:] = 0
            try:
                report = engine.read(local, kvik.Ticket(heard["ticket"]), deadline=heard["deadline"]).wait()
            except kvik.KvikError as error:
                pipe.say(code=error.code, text=str(error), untouched=not view.any())
            else:
                same = bool((view == random_bytes(view.size, heard["seed"])).all())
                pipe.say(
                    same=same, bytes=report.bytes, transport=report.transport, mechanism=report.mechanism,
                    checks=report.checks, rejected_transports=report.rejected_transports,
                )  # fmt: skip
        del view


def starter(pipe: Pipe, **options: Any) -> None:
    """An attempt to start an engine."""
    try:
        with kvik.Engine(**options) as engine:
            pipe.say(addresses=engine.addresses)
    except kvik.KvikError as error:
        pipe.say(code=error.code, text=str(error))


def own(host: Host, **arguments: Any) -> Peer:
    """Start an owner of pages on a host; its first word has the ticket."""
    with host.inside():
        return Peer(owner, **arguments)


def read(host: Host, ticket: str, *, seed: int = 1, **options: Any) -> dict[str, Any]:
    """Read a ticket with a fresh engine on a host; its report or its error."""
    with host.inside(), Peer(reader, **options) as peer:
        peer.hear(LIMIT)
        said = ask(peer, do="read", ticket=ticket, seed=seed, deadline=LIMIT)
        peer.say(do="bye")
        assert peer.end(LIMIT) == 0
        return said


def ask(peer: Peer, **message: Any) -> dict[str, Any]:
    """What a peer says to this; of a read, after its deadline at the latest."""
    peer.say(**message)
    return peer.hear(LIMIT + message.get("deadline", 0.0))


def start(host: Host, **options: Any) -> dict[str, Any]:
    """Try to start an engine on a host; its addresses or its error."""
    with host.inside(), Peer(starter, **options) as peer:
        return peer.hear(LIMIT)
