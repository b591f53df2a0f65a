"""Images and other items of requests: by their bytes, while the engine's own caches know them by names.

A serving engine computes an item once, and keeps what it has made of it, and KV of prompts with it, by the
item's name: a digest of its own, or what a client said. A client can say one name for two contents. Then KV
that was computed for the second one may be of the first one's, and to keep it by the bytes of the second
would give it to everybody. So this remembers what each name stood for on this server. Where that was not
always the same, nothing that depends on it is kept or handed over; what was kept by its bytes is still found.

An item's bytes may be somewhere else: in memory that only the workers read, or nowhere, where KV is to come
from a server that had them. Then nothing is kept of a request, and a handover goes by the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvik.handover.protocol import RefusedError

logger = logging.getLogger("kvik.handover")

# More than an engine's caches have room for: who is forgotten here was forgotten there before.
MOST_NAMES = 262_144
MOST_AT_HAND = 4096  # items whose data object is known by sight
SEVERAL = b""  # in place of a content: the name has had others, or one that could not be read


class NoContentError(Exception):
    """There is no content to tell something by; the text says what is missing."""


def by_name(_feature: Any) -> bytes:
    """Of an engine that shows no data of items."""
    raise NoContentError("this serving engine does not show its data")


@dataclass
class _Item:
    """One item of one or more requests; `content` or `error`, once it was read."""

    name: bytes
    said: str
    content: bytes = b""
    error: str = ""

    @property
    def read(self) -> bool:
        return bool(self.content or self.error)


class Items:
    """Items by request. read: the bytes that stand for one, on a thread of this class; raises NoContentError
    where there are none."""

    def __init__(self, read: Callable[[Any], bytes], most_names: int = MOST_NAMES) -> None:
        self._read = read
        self._most_names = most_names
        self._lock = threading.Lock()
        self._requests: dict[str, list[_Item]] = {}
        self._meant: dict[bytes, bytes] = {}  # what a name stands for, the longest unused first
        self._unread: Counter[bytes] = Counter()
        self._at_hand: dict[bytes, tuple[weakref.ref[Any], _Item]] = {}
        self._waiting: queue.SimpleQueue[tuple[_Item, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def arrived(self, request: Any) -> None:
        """A request has arrived: from now on the engine may compute with its items."""
        features = getattr(request, "mm_features", None)
        if features:
            known = self._requests.setdefault(request.request_id, [])
            known += [self._item(feature) for feature in features[len(known) :]]

    def contents(self, request: Any) -> list[bytes] | None:
        """Of each item of a request, in their order; None while they are being read. Raises NoContentError
        where one cannot be."""
        items = self._of(request)
        for item in items:
            if item.error:
                raise NoContentError(item.error)
        return [item.content for item in items] if all(item.read for item in items) else None

    def are_read(self, request: Any) -> bool:
        """Whether all that can be read of a request's items was."""
        return all(item.read for item in self._of(request))

    def told(self, request: Any) -> list[str]:
        """What two servers compare of each item of a request: its content, where this one can read it, else
        its name. What was not read yet is read now."""
        told = []
        features = getattr(request, "mm_features", None) or ()
        for feature, item in zip(features, self._of(request), strict=True):
            if not item.read:
                self._take(item, *self._look(item, feature))
            told.append(item.content.hex() if item.content else f"named {feature.identifier}")
        return told

    def certain(self, request: Any) -> bool:
        """Whether KV that this server has of a request is of the request's own items, as far as they can be
        read; False while it is not known. Raises NoContentError where it may be of others."""
        items = self._of(request)
        with self._lock:
            if any(self._unread[item.name] for item in items):
                return False
            for item in items:
                if item.content != self._meant.get(item.name, SEVERAL):
                    raise NoContentError(
                        f"{item.said} was not always the same here, and vLLM's own caches go by that name; "
                        "give each content a uuid of its own, or none"
                    )
        return True

    def check(self, request: Any) -> None:
        """Whether KV of a request may be handed over: `RefusedError` where it is not `certain`."""
        try:
            if self.certain(request):
                return
        except NoContentError as error:
            raise RefusedError("image_uncertain", str(error)) from error
        raise RefusedError(
            "image_uncertain", "an image of the same name, of another request, is not read yet"
        )

    def forget(self, request: Any) -> None:
        """A request has ended."""
        self._requests.pop(request.request_id, None)

    def _of(self, request: Any) -> list[_Item]:
        self.arrived(request)
        return self._requests.get(request.request_id, [])

    def _item(self, feature: Any) -> _Item:
        """The item of a feature: read once for as long as the engine gives the same object for it."""
        said, data = str(feature.identifier), getattr(feature, "data", None)
        name = hashlib.sha256(said.encode(errors="surrogatepass")).digest()[:16]
        with self._lock:
            seen, item = self._at_hand.get(name, (None, None))
            known = item is not None and seen is not None and data is not None and seen() is data
            if item is not None and known and name in self._meant:
                self._mean(name, self._meant[name])  # used last
                return item
            item = _Item(name, f"{str(getattr(feature, 'modality', 'item'))[:40]} {said[:80]!r}")
            self._unread[name] += 1
            self._see(data, item)
        self._waiting.put((item, feature))
        if self._thread is None:
            # A daemon: nobody waits for it at the end of a process.
            self._thread = threading.Thread(target=self._run, name="kvik-items", daemon=True)
            self._thread.start()
        return item

    def _see(self, data: Any, item: _Item) -> None:
        self._at_hand.pop(item.name, None)
        with contextlib.suppress(TypeError):  # what cannot be referred to is read each time
            self._at_hand[item.name] = weakref.ref(data), item
        _bound(self._at_hand, MOST_AT_HAND)

    def _mean(self, name: bytes, content: bytes) -> None:
        """A name stands for a content, too."""
        before = self._meant.pop(name, content)
        self._meant[name] = content if before == content else SEVERAL
        _bound(self._meant, self._most_names)

    def _run(self) -> None:
        while True:
            item, feature = self._waiting.get()
            if not item.read:
                self._take(item, *self._look(item, feature))
            del feature  # its data may be large

    def _look(self, item: _Item, feature: Any) -> tuple[bytes, str]:
        """Content and error of an item."""
        try:
            return hashlib.sha256(self._read(feature)).digest(), ""
        except NoContentError as cannot:
            return b"", str(cannot)
        except Exception as failed:  # whatever it is, the next one has to be read
            logger.exception("kvik: %s could not be read", item.said)
            return b"", f"{item.said} could not be read: {failed}"

    def _take(self, item: _Item, content: bytes, error: str) -> None:
        with self._lock:
            if item.read:  # by the other thread, meanwhile
                return
            item.content, item.error = content, error
            self._mean(item.name, content or SEVERAL)
            self._unread[item.name] -= 1
            if not self._unread[item.name]:
                del self._unread[item.name]


def _bound(kept: dict[bytes, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
