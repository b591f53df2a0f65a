"""Events of an engine, its peers, and callbacks."""

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from kvik._native import Events

EventKind: TypeAlias = Literal[
    "peer_up",
    "peer_suspect",
    "peer_lost",
    "peer_restarted",
    "grant_ended",
    "pages_quarantined",
    "pages_returned",
    "transport_changed",
    "notification",
    "events_lost",
]
PeerStateName: TypeAlias = Literal["connecting", "up", "suspect", "draining", "dead"]

_REMOVE_LIMIT: Final = 1.0  # seconds for a call under way
_log = logging.getLogger("kvik.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. Which fields say something depends on the kind: see docs/events.md."""

    kind: EventKind
    """What happened."""
    peer: str = ""
    """Id of the engine that it is about, 32 hexadecimal digits."""
    incarnation: int = 0
    """The number of that engine's start."""
    name: str = ""
    """What that engine calls itself in logs."""
    reason: str = ""
    """Why, for a person."""
    code: str = ""
    """The code of the error behind it, such as `"peer_lost"`."""
    grant: str = ""
    """Id of the grant that it is about."""
    state: str = ""
    """How that grant ended, as `Grant.state` says it."""
    pages: int = 0
    """Pages that are in quarantine, or no longer."""
    transport: str = ""
    """The transport that is used."""
    instead_of: str = ""
    """The transport that was chosen first."""
    payload: bytes = b""
    """What a notification says."""
    lost: int = 0
    """How many events were dropped before this one."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer of an engine, as it stood when `Engine.peers` was called."""

    id: str
    """Id of its engine, 32 hexadecimal digits."""
    incarnation: int
    """The number of its start."""
    name: str
    """What it calls itself in logs; empty when it was not met yet."""
    address: str | None
    """Where this engine reached it; None when it came by itself."""
    state: PeerStateName
    """`"connecting"`, `"up"`, `"suspect"` (silent for more than half of the time until it is taken for dead),
    `"draining"` (closing in order) or `"dead"`."""
    silent_s: float | None
    """Seconds since something was heard from it, or since a dead one was lost; None when it was never met."""
    transports: tuple[str, ...]
    """What transfers with it can go over."""
    channels: int
    """Data channels that are open."""
    transfers: int
    """Transfers with it that are open, of either side."""
    reconnecting: bool
    """It was lost, and is dialled again in the background."""
    reason: str
    """Why it is dead; empty when it is not."""


class Subscription:
    """A callback that gets events, from `Engine.on_event`. It lasts until `remove`, or the engine's close."""

    def __init__(self, events: "Events", callback: Callable[[Event], object]) -> None:
        self._events = events
        self._thread = threading.Thread(
            target=_deliver, args=(events, callback), name="kvik-events", daemon=True
        )
        self._thread.start()

    @property
    def removed(self) -> bool:
        """Whether it gets no more events."""
        return self._events.closed

    def remove(self) -> None:
        """End it. A call that is under way is waited for, up to 1 s, unless it is the one that calls this."""
        self._events.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_REMOVE_LIMIT)


def _deliver(events: "Events", callback: Callable[[Event], object]) -> None:
    # The native module is loaded before this one is finished.
    from kvik._native import name_thread

    # A signal is for the main thread, which may be sleeping in a call that only its own signal interrupts.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    name_thread("kvik-events")
    with events:
        while (event := events._hand_on()) is not None:
            if events.closed:
                return
            try:
                callback(event)
            except Exception:
                _log.exception("a callback failed at an event of kind %s", event.kind)
