"""A rank's two tiers: a store in the process' own memory, then one that is served.

Both read from and write to the serving engine's KV blocks themselves. What a tier cannot do is as if it had
nothing: a cache costs time, never an answer. A server that cannot be met at the start is met later, on a
thread, and so is one that is away when the namespace changes; one that is lost is met again by its client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvik.handover.native import error_code
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.plan import LINK_BYTES
from kvik.serving_cache.residents import KEY_BYTES, MOST_KEYS, Residents
from kvik.store.names import Namespace

logger = logging.getLogger("kvik.serving_cache")

# Between two tries to meet a server that was never met: the first, and the longest.
BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 2.0


class Stop:
    """Lets another thread end a load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._get: Any = None
        self.asked = False

    def ask(self) -> None:
        """End it."""
        with self._lock:
            self.asked = True
            if self._get is not None:
                self._get.cancel()

    def watch(self, get: Any) -> None:
        """This is what runs now."""
        with self._lock:
            self._get = get
            if self.asked:
                get.cancel()


@dataclass
class Loaded:
    """How many blocks have come from each tier, from the first one on, and why not more, by tier and code."""

    host: int = 0
    remote: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return self.host + self.remote


@dataclass
class Saved:
    """What became of a save's blocks in the tiers, by "host" or "remote" and "stored", "known" or "refused";
    and what failed, by tier and code. there: how many of the first ones each tier has now, by tier; gone:
    links of blocks that the process has not any more."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    gone: bytes = b""


class Behind:
    """What the serving engine's stream on a GPU was given before a step: blocks are read and written after
    it. In host memory nothing is to be waited for."""

    def __init__(self, native: Any, mark: Any = None, code: str = "") -> None:
        self._native, self._mark, self._code = native, mark, code

    def wait(self, until: float) -> str:
        """Until it is done, or the monotonic clock says `until`: the code of what went wrong, or nothing."""
        if self._mark is None:
            return self._code
        try:
            self._mark.wait(max(0.0, until - time.monotonic()))
        except self._native.WaitTimeout:
            return "deadline_exceeded"
        except self._native.KvikError as error:
            return error_code(error)
        return ""


class Tiers:
    """See the module. `native` is the module `kvik`; pages are those of `layout` in `region`. `stream`: for a
    region on a GPU, what gives the stream that the serving engine's work is launched on. `follows`: saves
    tell what is there afterwards, and what has gone."""

    def __init__(
        self,
        native: Any,
        config: CacheConfig,
        engine: Any,
        region: Any,
        layout: Any,
        stream: Callable[[], Any] | None = None,
        follows: bool = False,
    ) -> None:
        self._native = native
        self._config = config
        self._engine = engine
        self._region = region
        self._layout = layout
        self._stream = stream
        self._residents = Residents() if follows else None
        self._evicted = 0
        # The stores that the process has, of whatever namespace, and the same of the namespace of now.
        self._own: Any = None
        self._server: Any = None
        self._host: Any = None
        self._remote: Any = None
        self._lock = threading.Lock()
        self._namespace: Namespace | None = None
        self._closing = threading.Event()
        self._meeting = False
        self._tried = threading.Event()

    def set_namespace(self, namespace: Namespace) -> None:
        """What blocks are of from now on. Once; and again when it changes. A server hears of it on a thread:
        this waits for nobody."""
        with self._lock:
            self._namespace = namespace
            self._host = self._in_process(namespace)
            self._remote = None
            if self._config.address is not None and not self._meeting:
                self._tried.clear()
                self._meeting = True
                # A daemon: a process that ends does not wait for a server.
                threading.Thread(target=self._meet, name="kvik-meet-store", daemon=True).start()

    def _in_process(self, namespace: Namespace) -> Any:
        """The store in the process' own memory; none where it cannot be had, which is said."""
        if self._config.host_cache is None:
            return None
        try:
            self._own = self._own.within(namespace) if self._own is not None else self._native.Store.embedded(
                self._engine, namespace, self._layout,
                memory=self._config.host_cache, tenant=self._config.tenant,
            )  # fmt: skip
        except self._native.KvikError as error:
            logger.warning("kvik: nothing is kept in the memory of this process for now: %s", error)
            return None
        return self._own

    def close(self) -> None:
        """Begin nothing any more; what is under way ends with its engine."""
        self._closing.set()
        with self._lock:
            self._own = self._server = self._host = self._remote = None

    def behind(self) -> Behind:
        """What the serving engine's stream was given by now. For the thread that launches its work."""
        if self._stream is None:
            return Behind(self._native)
        try:
            return Behind(self._native, self._region.mark(self._stream()))
        except self._native.KvikError as error:
            logger.warning("kvik: no mark in the serving engine's stream: %s", error)
            return Behind(self._native, code=error_code(error))

    # What is there.

    def look(self, links: bytes) -> tuple[int, int, dict[str, str]]:
        """How many of these blocks are there from the first one on, how many of them in the process, and what
        failed."""
        failures: dict[str, str] = {}
        self._await_first_try()
        host = self._count("host", self._host, links, 0, failures)
        remote = self._count("remote", self._remote, links, host, failures)
        return host + remote, host, failures

    @property
    def has_server(self) -> bool:
        """Whether the server was met, so that it answers what it has."""
        return self._remote is not None

    def choose(self, blocks: int, rate: float) -> str:
        """Whether so many blocks of the server are better fetched, where so many tokens are computed in a
        second: the reason of `Store.choose`; nothing where that cannot be said."""
        store, namespace = self._remote, self._namespace
        if store is None or namespace is None:
            return ""
        try:
            return str(store.choose(blocks, blocks * namespace.block_tokens / rate).reason)
        except self._native.KvikError as error:
            logger.debug("kvik: fetching is not weighed against computing: %s", error)
            return ""

    def prefetch(self, links: bytes, host: int) -> None:
        """Have the server bring what only its disk has into its memory, before it is read."""
        store = self._remote
        try:
            for some, before in self._calls(store, links, host):
                store.prefetch(some, before=before)
        except self._native.KvikError as error:
            logger.debug("kvik: the store does not prefetch: %s", error)

    def _count(self, tier: str, store: Any, links: bytes, start: int, failures: dict[str, str]) -> int:
        there = 0
        try:
            for some, before in self._calls(store, links, start):
                found = store.contains(some, before=before)
                run = next((place for place, one in enumerate(found) if not one), len(found))
                there += run
                if run < len(found):
                    break
        except self._native.KvikError as error:
            failures[tier] = error_code(error)
        return there

    # Reading and writing.

    def load(self, links: bytes, blocks: Sequence[int], until: float, stop: Stop, behind: Behind) -> Loaded:
        """Read blocks into KV blocks, from the first one on, until the monotonic clock says `until`. When it
        has returned, nothing lands there any more. links: of the prompt, up to the last of these blocks."""
        loaded, pages = Loaded(), np.asarray(blocks, dtype=np.uint32)
        if code := behind.wait(until):
            loaded.failures["load"] = code
            return loaded
        loaded.host = self._read("host", self._host, links, pages, until, stop, loaded.failures)
        if loaded.host < pages.size and not stop.asked:
            rest = pages[loaded.host :]
            loaded.remote = self._read("remote", self._remote, links, rest, until, stop, loaded.failures)
        return loaded

    def _read(
        self,
        tier: str,
        store: Any,
        links: bytes,
        pages: npt.NDArray[np.uint32],
        until: float,
        stop: Stop,
        failures: dict[str, str],
    ) -> int:
        there = 0
        for call in self._calls(store, links, len(links) // LINK_BYTES - pages.size):
            if stop.asked:
                break
            some = pages[there : there + MOST_KEYS]
            if (left := until - time.monotonic()) <= 0:
                failures[tier] = "deadline_exceeded"
                break
            verified, code = self._get(store, call, some, left, stop)
            there += verified
            if code:
                failures[tier] = code
            if verified < some.size:
                break
        return there

    def _get(
        self, store: Any, call: tuple[bytes, bytes], pages: npt.NDArray[np.uint32], left: float, stop: Stop
    ) -> tuple[int, str]:
        (keys, before), into = call, self._region.pages(self._layout, pages)
        try:
            get = store.get(keys, into, before=before, deadline=left)
        except self._native.KvikError as error:
            return 0, error_code(error)
        stop.watch(get)
        try:
            return get.wait(), ""
        except self._native.KvikError as error:
            return get.verified, error_code(error)  # those that were verified by then are good

    def save(self, links: bytes, blocks: Sequence[int], until: float, behind: Behind) -> Saved:
        """Write KV blocks, which begin a prompt. When it has returned, nobody reads them any more."""
        saved, pages = Saved(), np.asarray(blocks, dtype=np.uint32)
        if code := behind.wait(until):
            saved.failures["save"] = code
            return saved
        self._await_first_try()
        for tier, store in (("host", self._host), ("remote", self._remote)):
            if store is not None:
                try:
                    self._write(tier, store, links, pages, until, saved)
                except self._native.KvikError as error:
                    saved.failures[tier] = error_code(error)
        if self._remote is None and self._config.address is not None:
            saved.failures["remote"] = "store_unavailable"  # it was not met, or does not know the namespace
        if self._residents is not None:
            self._follow(self._residents, links, saved)
        return saved

    def _follow(self, residents: Residents, links: bytes, saved: Saved) -> None:
        """Find out what is there after a save, and what has left the process' memory."""
        for tier, store in (("host", self._host), ("remote", self._remote)):
            if store is not None and tier not in saved.failures:
                # All of it, unless some were refused: then the tier knows which.
                refused = saved.counts.get(f"{tier}_refused", 0)
                whole = len(links) // LINK_BYTES
                saved.there[tier] = self._count(tier, store, links, 0, {}) if refused else whole
        if (store := self._host) is None:
            return
        try:
            residents.add(links, self._keys(store, links)[: saved.there.get("host", 0) * KEY_BYTES])
            evicted = store.stat()["evicted"]
            if evicted != self._evicted:
                saved.gone = b"".join(residents.gone(store.contains))
                self._evicted = evicted
        except self._native.KvikError as error:
            logger.debug("kvik: what has left the memory of this process is not known: %s", error)

    def _write(
        self, tier: str, store: Any, links: bytes, pages: npt.NDArray[np.uint32], until: float, saved: Saved
    ) -> None:
        for first, (keys, before) in enumerate(self._calls(store, links, 0)):
            some = pages[first * MOST_KEYS :][:MOST_KEYS]
            if (left := until - time.monotonic()) <= 0:
                saved.failures[tier] = "deadline_exceeded"
                return
            put = store.put(keys, self._region.pages(self._layout, some), before=before, deadline=left)
            counts = self._end(put)
            for name in ("stored", "known", "refused"):
                saved.counts[f"{tier}_{name}"] = saved.counts.get(f"{tier}_{name}", 0) + getattr(counts, name)

    def _end(self, put: Any) -> Any:
        """Wait until the pages are this side's again, however the put ends; but not when all ends."""
        while True:
            try:
                return put.wait()
            except self._native.PagesQuarantined as error:
                logger.warning("kvik: KV blocks stay until the store has ended with them: %s", error)
                if self._closing.is_set():
                    raise

    def _calls(self, store: Any, links: bytes, start: int) -> Iterator[tuple[bytes, bytes]]:
        """The keys of a prompt's blocks from `start` on, as many as one call may name, and all keys before
        them; nothing where there is no store."""
        if store is None or start * LINK_BYTES >= len(links):
            return
        keys = self._keys(store, links)
        for at in range(start * KEY_BYTES, len(keys), MOST_KEYS * KEY_BYTES):
            yield keys[at : at + MOST_KEYS * KEY_BYTES], keys[:at]

    def _keys(self, store: Any, links: bytes) -> bytes:
        hashes = [links[at : at + LINK_BYTES] for at in range(0, len(links), LINK_BYTES)]
        return bytes(store.keys_of(hashes))

    # The server.

    def _await_first_try(self) -> None:
        """A process hears of its blocks' namespace with a request, and the server is told then: so that one
        finds something, too."""
        if self._meeting:
            self._tried.wait(self._config.deadline)

    def _meet(self) -> None:
        """On a thread, until the server knows the namespace; from then on its client meets it by itself."""
        backoff, level = BACKOFF_S, logging.WARNING
        while not self._closing.is_set():
            namespace = self._namespace
            try:
                store = self._of(namespace)
            except self._native.KvikError as error:
                logger.log(
                    level,
                    "kvik: the store at %s is not met, and is tried again: %s",
                    self._config.address,
                    error,
                )
                self._tried.set()
                level = logging.DEBUG
                self._closing.wait(backoff)
                backoff = min(backoff * 2, LONGEST_BACKOFF_S)
                continue
            if self._met(store, namespace):
                return

    def _of(self, namespace: Namespace | None) -> Any:
        """The server's blocks of a namespace."""
        if self._server is not None:
            return self._server.within(namespace)
        return self._native.Store.connect(
            self._engine, self._config.address, namespace, self._layout,
            copies=self._config.copies, tenant=self._config.tenant, deadline=self._config.deadline,
            again=False,
        )  # fmt: skip

    def _met(self, store: Any, namespace: Namespace | None) -> bool:
        """Whether it is of the namespace that is still wanted."""
        with self._lock:
            if self._closing.is_set():
                return True
            self._server = store
            if self._namespace != namespace:
                return False
            self._remote, self._meeting = store, False
        self._tried.set()
        logger.info("kvik: the store at %s is met", self._config.address)
        return True
