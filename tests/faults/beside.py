"""Live engines beside a fault: they read from the side that runs all the while, and must not notice it."""

from typing import Any

from tests.faults import crowd
from tests.faults.clock import HANG
from tests.faults.side import Handle

PAUSE = 0.02  # seconds between two reads of an engine, about
NAME = "beside"
EXPIRY = 24 * 3600.0  # seconds, of what they read


class Company:
    """So many engines, in a process of their own; what each run adds to their counts."""

    def __init__(self, engines: int, hub: Handle, transport: str, nics: str | None) -> None:
        self.peers = crowd.start(1, engines, transport, nics) if engines else []
        self.before = dict.fromkeys(("transfers_ok", "transfers_failed", "sessions_lost"), 0)
        if not self.peers:
            return
        hub.ask("hold", name=NAME, nbytes=crowd.PAGE * crowd.PAGES)
        granted = hub.ask("grant", name=NAME, page_bytes=crowd.PAGE, right="read", expiry=EXPIRY)
        for call in ("connect", "work"):
            self._ask(call=call, ticket=granted["ticket"], pause=PAUSE)
        self.news()

    def news(self) -> dict[str, int]:
        """Reads that succeeded since the last time, and what was hurt: reads that failed, sessions lost."""
        now = dict.fromkeys(self.before, 0)
        for said in self._ask(call="counts"):
            now = {name: count + int(said[name]) for name, count in now.items()}
        news = {name: now[name] - count for name, count in self.before.items()}
        self.before = now
        return {"beside": news["transfers_ok"], "hurt": news["transfers_failed"] + news["sessions_lost"]}

    def close(self) -> None:
        """End them."""
        for peer in self.peers:
            peer.__exit__()

    def _ask(self, **call: Any) -> list[dict[str, Any]]:
        for peer in self.peers:
            peer.say(**call)
        return [peer.hear(HANG) for peer in self.peers]
