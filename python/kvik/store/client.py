"""``kvik.Store``: puts and gets of a serving engine, over the native client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from kvik import _native
from kvik._native import Engine, Layout, PageSet
from kvik.store.names import AckName, Choice, Member, Namespace, PolicyName, Stored, StoreOptions
from kvik.store.tenants import Tenant

_T = TypeVar("_T")

_DEADLINE_S = 5.0
# Between two attempts to meet a store: the first, and the longest.
_PAUSES_S = (0.05, 1.0)
_LEAST_S = 0.001
# Whoever is not there now may come.
_MAY_COME = (
    _native.PeerUnreachable, _native.PeerLost, _native.PeerRestarted, _native.StoreUnavailable,
    _native.DeadlineExceeded,
)  # fmt: skip


def addresses(address: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """The servers of a store as the native client takes them."""
    if isinstance(address, os.PathLike):
        return [f"file:{os.fspath(address)}"]
    return [address] if isinstance(address, str) else list(address)


class Store:
    """Blocks of one namespace in a store.

    Made by ``embedded`` or ``connect``. Keys are bytes, 32 for each block, one after the other, as ``keys``
    gives them; a call names at most 1,024. Keys alone begin a prompt: of blocks amid a prompt, ``before`` has
    all keys before them, from the prompt's start. A store of several servers finds by it where they lie; with
    fewer keys it looks elsewhere, and finds nothing. ``deadline`` of a call is in seconds; None means 5.
    """

    def __init__(
        self, client: _native.StoreClient, namespace: Namespace, layout: Layout, tenant: str = "default"
    ) -> None:
        self._client = client
        self._space = client.open(tenant, namespace, layout)
        self.namespace = namespace
        self.layout = layout
        self.tenant = tenant

    @classmethod
    def embedded(
        cls,
        engine: Engine,
        namespace: Namespace,
        layout: Layout,
        *,
        memory: int | str = "1GiB",
        log: str | os.PathLike[str] | None = None,
        log_size: int | str = "16GiB",
        object: str | None = None,  # noqa: A002 - the tier's name, as log is
        object_size: int | str = "1TiB",
        object_batch: int | str = "32MiB",
        policy: PolicyName = "selector",
        tenants: Sequence[Tenant] = (),
        tenant: str = "default",
    ) -> Store:
        """A store within this process, which ends with the last ``Store`` that was made of it.

        namespace: what the blocks are of. layout: of the pages that are put and read: its layers, slices and
        bytes of a run are the shape of every block. memory: bytes of blocks, or text such as "1GiB", from
        1 MiB. log: a directory for blocks that outlive the process; None for none. log_size: bytes that it
        may take there. object: the address of an object store below both, such as "s3://BUCKET/PREFIX" or
        "file:///FOLDER", which no other store has; None for none; credentials come from the environment.
        object_size: bytes that its objects may take. object_batch: bytes of an object. policy: which block
        makes room for another one. tenants: those with a quota or with regions of their own. tenant: whose
        blocks they are, for quotas and figures.

        Raises InvalidArgument; StorageFailed where another process has the log open, or the disk refuses.
        """
        options = StoreOptions(
            memory=memory,
            log=log,
            log_size=log_size,
            object=object,
            object_size=object_size,
            object_batch=object_batch,
            policy=policy,
            tenants=tenants,
        )
        return cls(_native.StoreClient.embedded(engine, options), namespace, layout, tenant)

    @classmethod
    def connect(
        cls,
        engine: Engine,
        address: str | os.PathLike[str] | Sequence[str],
        namespace: Namespace,
        layout: Layout,
        *,
        copies: int = 1,
        tenant: str = "default",
        deadline: float | None = None,
        again: bool = True,
    ) -> Store:
        """The store that ``kvik store serve`` serves at an address, such as "store.example:7500".

        address: where one server is, or several: a sequence of addresses, or one text with commas between
        them; a path, or "file:PATH", of a file with an address a line, which is read again when it changes;
        "dns:NAME:PORT" for all addresses of a name; or "etcd:http://HOST:PORT/PREFIX" (or https; with the
        certificates and user of the variables ETCDCTL_*) for those that ``kvik store serve --etcd`` enters
        there. All clients have to name a server alike. copies: of several servers, how many keep each block.
        namespace, layout, tenant: as for ``embedded``. deadline: seconds
        for meeting them; None means 5. again: whether a store that is not there is tried again until then,
        with whoever is in its list by that time; of several servers one has to be there. False is for those
        who try again by themselves.

        A store that is lost is met again by itself. Until then calls raise StoreUnavailable at once: its
        blocks are misses. Only what waits while it stops answering waits for its deadline.

        Of several servers, one that is lost costs its blocks: gets end before them, puts count them as
        refused, unless another copy answers for them. Calls raise StoreUnavailable where no server is left;
        `clear`, `clear_tenant` and `remove` also where one of them has not done it.

        Raises PeerUnreachable, SecretMismatch and what else meeting an engine can say; StoreUnavailable where
        what listens there is no store, or none of several servers answers.
        """
        client = _connected(engine, addresses(address), copies, deadline, again)
        return cls(client, namespace, layout, tenant)

    def members(self) -> list[Member]:
        """The servers of the store at present: none of one that is embedded."""
        return [Member(*member) for member in self._client.members()]

    def within(
        self, namespace: Namespace, layout: Layout | None = None, *, tenant: str | None = None
    ) -> Store:
        """The same store, for blocks of another namespace. Raises ShapeMismatch, InvalidArgument."""
        tenant = self.tenant if tenant is None else tenant
        return Store(self._client, namespace, layout or self.layout, tenant)

    def keys(self, tokens: _native.Ids, extra: bytes = b"", items: Sequence[tuple[int, bytes]] = ()) -> bytes:
        """The keys of all whole blocks of a prompt, 32 bytes each.

        tokens, extra, items: as for `kvik.content_chain`. Raises PageOutOfRange for a token that is not a
        number from 0 to 2^32-1.
        """
        return _native.block_keys(self.namespace, tokens, extra, list(items))

    def keys_of(self, hashes: Sequence[bytes]) -> bytes:
        """The keys of blocks that a serving engine calls by hashes of its own.

        hashes: of at least 16 bytes each, over all tokens up to the block's end. Raises InvalidArgument.
        """
        return _native.block_keys_of(self.namespace, list(hashes))

    def put(
        self,
        keys: bytes,
        pages: PageSet,
        *,
        before: bytes = b"",
        ack: AckName = "stored",
        deadline: float | None = None,
    ) -> Put:
        """Begin to put blocks that follow one another. Their pages must stay as they are until it has ended.

        pages: one for each key. before: all keys of the prompt before these. ack: what ``Put.acknowledged``
        waits for.

        Raises InvalidArgument, ShapeMismatch for pages of another shape, EngineClosed.
        """
        return Put(self._space.put(keys, pages, before, ack, deadline))

    def get(self, keys: bytes, pages: PageSet, *, before: bytes = b"", deadline: float | None = None) -> Get:
        """Begin to read the longest run of blocks that the store has, from the first key on, into pages.

        pages: one for each key; what is not read stays as it is, but for a block that is found to be another,
        and of several servers for blocks behind one that is missing: only what is counted is good.
        before: all keys of the prompt before these.

        Raises InvalidArgument, ShapeMismatch, EngineClosed.
        """
        return Get(self._space.get(keys, pages, before, deadline))

    def choose(self, blocks: int, recompute: float) -> Choice:
        """Whether so many blocks are better fetched than computed.

        recompute: seconds that computing takes, as the caller knows it. They are compared with what the
        engine has measured of its own transfers with the store (`Engine.estimate`), and what gets took beside
        that. Nothing is sent; whether the store has the blocks is not asked. What is unknown is fetched. Of
        what computing would be faster at the second is fetched all the same, then one after 2, 4 and 8 more,
        and from then on one in 16: by that it is seen when fetching has become faster, or was only measured
        at a bad moment. Of a store within the process nothing is measured.

        Raises InvalidArgument for seconds below 0, EngineClosed.
        """
        fetch, reason, nbytes, estimate = self._space.choose(blocks, recompute)
        estimated, queued = (None, 0) if estimate is None else estimate
        return Choice(fetch, reason, nbytes, estimated, queued, recompute)

    def choices(self) -> dict[str, int]:
        """How often ``choose`` has given each reason, over all namespaces of this client."""
        return self._client.choices()

    def contains(self, keys: bytes, *, before: bytes = b"") -> list[bool]:
        """Of each key whether the store has its block."""
        return self._space.contains(keys, before)

    def prefetch(self, keys: bytes, *, before: bytes = b"") -> int:
        """Have blocks brought into the store's memory: how many are there, from the first key on.

        A store that is slow answers within five seconds, with what is there by then.
        """
        return self._space.prefetch(keys, before)

    def remove(self, keys: bytes) -> int:
        """Take blocks out, and all that come after them: how many went.

        Of several servers all are asked, and each copy counts; of what comes after, the rest of the segment
        goes at least (64 blocks, counted from the prompt's start): name the keys of what is to go behind it.
        """
        return self._space.remove(keys)

    def pin(self, keys: bytes, seconds: float, *, before: bytes = b"") -> int:
        """Keep blocks in memory for so long, whoever else needs room; 0 lets go of them.

        Gives how many are kept, from the first key on: one that is not in memory ends it, and so does one
        with which more than half of what the tenant may have would be kept.
        """
        return self._space.pin(keys, before, seconds)

    def clear(self) -> int:
        """Take out all blocks of this namespace: how many went."""
        return self._space.clear()

    def clear_tenant(self) -> int:
        """Take out all blocks of this tenant: how many went."""
        return self._client.clear_tenant(self.tenant)

    def stat(self) -> dict[str, int]:
        """What has happened in the whole store since it began, and what is there now, by name.

        Of several servers it is the sum over those that answer.
        """
        return self._client.stat()

    def metrics(self) -> str:
        """All figures of the whole store in the Prometheus text format: docs/reference/metrics.md.

        Of several servers those that answer, with the label ``member`` for each.
        """
        return self._client.metrics()


class Put:
    """A put that was begun. Use ``wait()``, or ``await`` it; dropped, it ends.

    Cancelling a task that awaits it cancels it.
    """

    def __init__(self, native: _native.StorePutting) -> None:
        self._native = native

    def acknowledged(self, timeout: float | None = None) -> Stored | None:
        """Wait for what was asked to be acknowledged.

        None: the store has taken the put up (``ack="accepted"``), and nothing is stored yet.
        timeout: seconds; WaitTimeout when it passes first, and the put goes on.
        """
        counts = self._native.acknowledged(timeout)
        return None if counts is None else Stored(*counts)

    def wait(self, timeout: float | None = None) -> Stored:
        """Wait for its end, after which the pages are the caller's again.

        timeout: seconds; WaitTimeout when it passes first, and the put goes on. Raises what went wrong
        otherwise: DeadlineExceeded, PeerLost; PagesQuarantined where the store may still read the pages.
        """
        return Stored(*self._native.wait(timeout))

    def cancel(self) -> None:
        """Ask for the end: nothing more is stored. After ``wait`` the pages are the caller's again.

        Takes up to five seconds where the store does not answer: in an event loop cancel the task that awaits
        it instead.
        """
        self._native.cancel(True)

    def __await__(self) -> Generator[object, None, Stored]:
        return _awaited(self.wait, lambda: self._native.cancel(False)).__await__()


class Get:
    """A get that was begun. Iterate over it, ``wait()``, or ``await`` it; dropped, it ends.

    Each turn of the iteration gives how many blocks are there and verified by then, from the first key on.
    Cancelling a task that awaits it cancels it.
    """

    def __init__(self, native: _native.StoreGetting) -> None:
        self._native = native

    @property
    def verified(self) -> int:
        """How many blocks are there and verified, from the first key on."""
        return self._native.verified

    def next(self, timeout: float | None = None) -> int | None:
        """Wait for more blocks: how many are there and verified by then; None when no more come.

        timeout: seconds; WaitTimeout when it passes first, and the get goes on. Raises ChecksumMismatch for a
        block that is not what was put: those that were verified before it are good. With any other error than
        WaitTimeout the get has ended: nothing lands in the pages any more.
        """
        return self._native.next(timeout)

    def __iter__(self) -> Iterator[int]:
        while (there := self.next()) is not None:
            yield there

    def wait(self) -> int:
        """Wait for all of them: how many there are, from the first key on. Raises as ``next``."""
        for _ in self:
            pass
        return self.verified

    def cancel(self) -> None:
        """Ask for the end: no more blocks come. Once ``wait`` has returned, nothing lands in the pages.

        Waits for what is on its way: in an event loop cancel the task that awaits it instead.
        """
        self._native.cancel(True)

    def __await__(self) -> Generator[object, None, int]:
        return _awaited(self.wait, lambda: self._native.cancel(False)).__await__()


def _connected(
    engine: Engine, servers: list[str], copies: int, deadline: float | None, again: bool
) -> _native.StoreClient:
    """A client that has met its store. The engine tries an address for three seconds, and once."""
    began, left, pause = time.monotonic(), deadline, _PAUSES_S[0]
    while True:
        try:
            return _native.StoreClient.connect(engine, servers, copies, left)
        except _MAY_COME:
            until = began + (_DEADLINE_S if deadline is None else deadline)
            rest = until - time.monotonic()
            if not again or rest <= _PAUSES_S[0]:
                raise
        # Nobody tells when it comes. The last attempts are close to the deadline.
        time.sleep(min(pause, rest / 4))
        pause = min(2 * pause, _PAUSES_S[1])
        left = max(until - time.monotonic(), _LEAST_S)


async def _awaited(wait: Callable[[], _T], cancel: Callable[[], None]) -> _T:
    """Only what has ended leaves the caller's pages alone: so a task that is cancelled, however often, learns
    of its own end after it. ``cancel`` is called on the loop and only asks: the thread that waits ends it."""
    # A future, and no task: whoever ends a loop cancels all of its tasks, and a thread goes on.
    waiting = asyncio.get_running_loop().run_in_executor(None, wait)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError as error:
            cancelled = error
            cancel()
    if cancelled is None:
        return waiting.result()
    if not waiting.cancelled():
        waiting.exception()  # seen: what became of it is of no interest any more
    raise cancelled
