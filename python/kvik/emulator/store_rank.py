"""A rank's half of a store: its blocks read into pages of its pool, and written from them, on threads.

What is asked for ends within its deadline, and is told of exactly once: `take_ended`, after `fd` has become
readable. When a load has ended, nothing lands in its pages any more; when a put has, nobody reads them.
A store that cannot be met at the start is met later; until then what is asked of it fails at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import kvik
from kvik.emulator.content import PageNumbers
from kvik.emulator.store_option import StoreOption
from kvik.handover.native import error_code
from kvik.store import Put

logger = logging.getLogger("kvik.emulator")

KEY_BYTES = 32
MOST_KEYS = 1024  # of one call
# Loads at a time, each a thread; puts, which nobody waits for, leave them the wire.
LOADERS, PUTTERS = 4, 1
# A put has this long: nobody waits for it, but it holds pages.
PUT_DEADLINE_S = 30.0
# Between two tries to meet a store that was never met: the first, and the longest.
BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 2.0
UNSTATED = "unstated"  # the choice where no time to compute was stated


@dataclass(frozen=True)
class Loaded:
    """A load has ended: how many blocks are there, from the first on, verified.

    reason: why it was tried or not, as in `kvik.store.Choice`. cause: what it failed of, or empty.
    """

    request_id: str
    blocks: int
    seconds: float
    reason: str
    cause: str
    estimated: float | None


@dataclass(frozen=True)
class Stored:
    """A put has ended. cause: what it failed of, or empty."""

    number: int
    stored: int
    known: int
    refused: int
    cause: str


class StoreRank:
    """See the module."""

    def __init__(
        self,
        option: StoreOption,
        namespace: kvik.Namespace,
        engine: kvik.Engine,
        region: kvik.Region,
        layout: kvik.Layout,
    ) -> None:
        self._option = option
        self._namespace = namespace
        self._engine = engine
        self._region = region
        self._layout = layout
        self._ended: deque[Loaded | Stored] = deque()
        self._closing = threading.Event()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loads = ThreadPoolExecutor(LOADERS, "emulator-load")
        self._puts = ThreadPoolExecutor(PUTTERS, "emulator-put")
        self._store: kvik.Store | None = None
        if not option.address:
            self._store = kvik.Store.embedded(engine, namespace, layout, memory=option.memory)
        elif not self._meet(logging.WARNING):
            threading.Thread(target=self._meet_later, name="emulator-meet", daemon=True).start()

    # A load.

    def fetch(self, request_id: str, keys: bytes, pages: PageNumbers, recompute: float | None) -> None:
        """Begin to read the last blocks of these keys, which begin a prompt, into pages.

        recompute: seconds that computing them takes; None: do not ask.
        """
        until = time.monotonic() + self._option.deadline
        self._loads.submit(self._fetch, request_id, keys, pages.copy(), recompute, until)

    def _fetch(
        self, request_id: str, keys: bytes, pages: PageNumbers, recompute: float | None, until: float
    ) -> None:
        began = time.monotonic()
        blocks, reason, cause, estimated = 0, UNSTATED, "", None
        try:
            store, fetch = self._met(), True
            if recompute is not None:
                choice = store.choose(pages.size, recompute)
                fetch, reason, estimated = choice.fetch, choice.reason, choice.estimated
            if fetch:
                blocks, cause = self._read(store, keys, pages, until)
        except Exception as error:  # whatever it is, its request must not wait for ever
            cause = _cause(error)
        self._tell(Loaded(request_id, blocks, time.monotonic() - began, reason, cause, estimated))

    def _read(self, store: kvik.Store, keys: bytes, pages: PageNumbers, until: float) -> tuple[int, str]:
        """How many blocks are there, and why not more where that is not the store's answer."""
        there, start = 0, len(keys) // KEY_BYTES - pages.size
        for first in range(0, pages.size, MOST_KEYS):
            some, before = pages[first : first + MOST_KEYS], (start + first) * KEY_BYTES
            left = until - time.monotonic()
            if left <= 0:
                return there, kvik.DeadlineExceeded.code
            get = store.get(
                keys[before:][: some.size * KEY_BYTES],
                self._region.pages(self._layout, some),
                before=keys[:before],
                deadline=left,
            )
            try:
                get.wait()
            except kvik.KvikError as error:
                # Blocks that were verified by then are good.
                return there + get.verified, error.code
            there += get.verified
            if get.verified < some.size:
                break
        return there, ""

    # A put.

    def put(self, number: int, keys: bytes, pages: PageNumbers) -> None:
        """Begin to give the store what it does not have of these blocks, which begin a prompt."""
        self._puts.submit(self._put, number, keys, pages.copy())

    def _put(self, number: int, keys: bytes, pages: PageNumbers) -> None:
        stored, known, refused, cause = 0, 0, 0, ""
        try:
            store = self._met()
            for first in range(0, pages.size, MOST_KEYS):
                some = pages[first : first + MOST_KEYS]
                names = keys[first * KEY_BYTES :][: some.size * KEY_BYTES]
                counts = _end(
                    store.put(
                        names,
                        self._region.pages(self._layout, some),
                        before=keys[: first * KEY_BYTES],
                        deadline=PUT_DEADLINE_S,
                    )
                )
                stored, known, refused = (
                    stored + counts.stored, known + counts.known, refused + counts.refused,
                )  # fmt: skip
        except Exception as error:  # its pages must go back, whatever it is
            cause = _cause(error)
        self._tell(Stored(number, stored, known, refused, cause))

    # What has ended.

    def take_ended(self) -> list[Loaded | Stored]:
        """Loads and puts that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def quiet(self) -> None:
        """`fd` is not readable any more, until more has ended."""
        os.eventfd_read(self.fd)

    def _tell(self, ended: Loaded | Stored) -> None:
        self._ended.append(ended)
        os.eventfd_write(self.fd, 1)

    # The store.

    def close(self) -> None:
        """Begin nothing any more; what is under way ends with its engine."""
        self._closing.set()
        for threads in (self._loads, self._puts):
            threads.shutdown(wait=False, cancel_futures=True)
        self._store = None

    def _met(self) -> kvik.Store:
        if self._store is None:
            raise kvik.StoreUnavailable(f"the store at {self._option.address} was not met yet")
        return self._store

    def _meet(self, level: int) -> bool:
        """Try once to meet the store; that it cannot be met is logged at this level."""
        try:
            self._store = kvik.Store.connect(
                self._engine,
                self._option.address,
                self._namespace,
                self._layout,
                deadline=self._option.deadline,
                again=False,
            )
        except kvik.KvikError as error:
            logger.log(
                level, "the store at %s is not met, and is tried again: %s", self._option.address, error
            )
            return False
        return True

    def _meet_later(self) -> None:
        """On a thread, until it is met: from then on the client meets it again by itself."""
        backoff = BACKOFF_S
        while not self._closing.wait(backoff) and not self._meet(logging.DEBUG):
            backoff = min(backoff * 2, LONGEST_BACKOFF_S)


def _end(put: Put) -> kvik.Stored:
    """Wait until the pages are this side's again, however the put ends."""
    while True:
        try:
            return put.wait()
        except kvik.PagesQuarantined as error:
            logger.warning("pages of a put stay until the store has ended with them: %s", error)


def _cause(error: Exception) -> str:
    if not isinstance(error, kvik.KvikError):
        logger.exception("a call of the store has failed in a way that is no answer of it")
    return error_code(error)
