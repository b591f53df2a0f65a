"""One rank's process: its kvik engine, its shard of the KV memory, and what steps do to it.

It does what the front says, in order, and sleeps in between; it knows chain values and page numbers, never
tokens. KV comes into its memory in two ways: a `fill` of a step, which the front counts as computed, or a
load over kvik. Loads and grants go on while no step runs, and their ends are reported at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

import kvik
from kvik.emulator import wire
from kvik.emulator.content import KvFunction
from kvik.emulator.memory import pool_memory, words_of
from kvik.emulator.store_option import StorePlan
from kvik.emulator.store_rank import Loaded, StoreRank
from kvik.emulator.watch import Watch, unwatched
from kvik.emulator.wire import Message
from kvik.handover import native
from kvik.handover.config import ConnectorConfig
from kvik.handover.protocol import RankPlace, StepPlan
from kvik.handover.report import ReportFile
from kvik.handover.worker import WorkerSide
from kvik.roles.keeper import PR_SET_PDEATHSIG
from kvik.shapes import ModelShape

logger = logging.getLogger("kvik.emulator")


@dataclass(frozen=True)
class Setup:
    """What a rank is told first. Sizes in pages; `connector` is the connector's extra config."""

    role: str
    shape: ModelShape
    tp: int
    tp_rank: int
    dp_rank: int
    page_tokens: int
    pages: int
    plain_memory: bool
    connector: dict[str, Any]
    store: StorePlan | None
    log_level: int


class Rank:
    """The state of the process."""

    def __init__(self, setup: Setup, front: socket.socket) -> None:
        self._front = front
        self._selector = selectors.DefaultSelector()
        self._selector.register(front, selectors.EVENT_READ)
        self._watch = Watch(self._wait_for)
        layout = setup.shape.of_rank(setup.page_tokens, setup.tp, setup.tp_rank)
        memory = pool_memory(setup.shape, layout, setup.pages, plain=setup.plain_memory)
        config = ConnectorConfig.from_extra(setup.connector)
        self._worker = WorkerSide(
            self._watch.native(native.load()),
            config,
            role=f"emulator-{setup.role}",
            place=RankPlace(tp=setup.tp_rank, tp_size=setup.tp, dp=setup.dp_rank),
            report=ReportFile(config.report_file),
        )
        self._worker.register([memory])
        self._words = words_of(memory)
        self._kv = KvFunction(layout.layers, list(layout.heads), self._words.shape[4])
        self._store = self._open_store(setup)

    def _open_store(self, setup: Setup) -> StoreRank | None:
        if setup.store is None:
            return None
        engine, region, pages = self._worker.opened()
        namespace = setup.store.namespace(setup.shape, setup.page_tokens, setup.tp, setup.tp_rank)
        # What a store does is told by itself, and not watched.
        store = StoreRank(setup.store.option, namespace, unwatched(engine), cast(kvik.Region, region), pages)
        self._selector.register(store.fd, selectors.EVENT_READ)
        return store

    def run(self) -> None:
        """Serve until the front closes or dies."""
        hello = wire.plain(self._worker.hello())
        wire.send(self._front, Message("hello", {"hello": hello}))
        while True:
            for key, _ in self._selector.select(self._watch.look_in()):
                if key.fileobj is self._front:
                    message = wire.receive(self._front)
                    if message is None:
                        self._close()
                        return
                    self._obey(message)
                elif self._store is not None and key.fd == self._store.fd:
                    self._store.quiet()
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            self._watch.forget_ended()
            self._report()

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._worker.close()

    def _obey(self, message: Message) -> None:
        if message.kind == "step":
            self._step(message)
        elif message.kind == "plan":
            self._worker.begin_step(wire.build(StepPlan, message.fields["plan"]))
        elif message.kind in ("fetch", "put") and self._store is not None:
            keys, pages = message.arrays[0].tobytes(), message.arrays[1].view(np.uint32)
            if message.kind == "fetch":
                self._store.fetch(message.fields["id"], keys, pages, message.fields["recompute"])
            else:
                self._store.put(message.fields["number"], keys, pages)
        elif message.kind == "flip":
            self._flip(**message.fields)
        elif message.kind == "signal":
            os.kill(os.getpid(), int(message.fields["number"]))
        else:
            raise wire.WireError(f"the front sent {message.kind!r}, which this rank does not know")

    def _step(self, message: Message) -> None:
        """fills: [first token], with arrays of pages and chain values. reads: [first, last], with pages."""
        arrays = iter(message.arrays)
        for (first,) in message.fields["fills"]:
            pages, chain = next(arrays).view(np.uint32), next(arrays).view(np.uint64)
            self._kv.fill(self._words, pages, first, chain)
        digests = [
            self._kv.read(self._words, next(arrays).view(np.uint32), first, last)
            for first, last in message.fields["reads"]
        ]
        wire.send(self._front, Message("stepped", {}, [np.array(digests, dtype=np.uint64)]))

    def _flip(self, page: int, place: int) -> None:
        """A fault: one bit of a page is wrong. `place` is taken modulo the page's words."""
        layers, _, heads, tokens, words = self._words.shape
        layer, head, token, word = np.unravel_index(
            place % (layers * heads * tokens * words), (layers, heads, tokens, words)
        )
        self._words[layer, page, head, token, word] ^= np.uint64(1 << (place % 64))
        logger.warning("fault: flipped a bit of page %d, layer %d, head %d", page, layer, head)

    def _wait_for(self, transfer: Any) -> None:
        self._selector.register(transfer.done_fd(), selectors.EVENT_READ)

    def _report(self) -> None:
        """Tell the front what has ended, if anything has."""
        sent, received = self._worker.collect()
        fields = {
            "sent": sorted(sent),
            "received": sorted(received),
            "parked": self._worker.take_parked_ends(),
            "invalid": sorted(self._worker.take_invalid_blocks()),
            "failures": self._worker.take_failures(),
            "stats": self._worker.take_stats().data,
        }
        if any(fields.values()):
            wire.send(self._front, Message("report", fields))
        if self._store is not None and (ended := self._store.take_ended()):
            news = {
                "fetched": [asdict(one) for one in ended if isinstance(one, Loaded)],
                "ended": [asdict(one) for one in ended if not isinstance(one, Loaded)],
            }
            wire.send(self._front, Message("store", news))


def main() -> None:
    """`python -m kvik.emulator.rank FD`: serve the front at the other end of that socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the front's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so is the end of its process group
    # One that was stopped (a fault) goes on when the front dies, and ends as the others do.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    front = socket.socket(fileno=int(sys.argv[1]))
    first = wire.receive(front)
    if first is None:
        return
    setup: Setup = wire.build(Setup, first.fields["setup"])
    logging.basicConfig(
        level=setup.log_level, format=f"%(levelname)s dp{setup.dp_rank} rank{setup.tp_rank} %(message)s"
    )
    try:
        rank = Rank(setup, front)
    except Exception as error:
        # Whatever it is, the front has to know: it is what its user sees.
        wire.send(front, Message("failed", {"text": f"{type(error).__name__}: {error}"}))
        if isinstance(error, kvik.KvikError):  # a setting that cannot be had: the text says it all
            sys.exit(1)
        raise
    rank.run()


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit("the front has gone")
