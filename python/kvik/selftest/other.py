"""The other side: the benchmark's target, which also lends pages one grant at a time and looks at its memory.

Started by ``kvik selftest`` as ``python -m kvik.selftest.other OPTIONS``, or on another host by
``kvik selftest --serve HOST:PORT``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvik
from kvik.bench.control import Message
from kvik.bench.errors import BenchError, CheckError
from kvik.bench.pages import PageIds
from kvik.bench.pattern import POISON, Bytes
from kvik.bench.peer import Peer
from kvik.bench.target import CLOSE_SECONDS, Target, TargetOptions, main
from kvik.selftest import hardware
from kvik.selftest.counts import nic_counts

MODULE = "kvik.selftest.other"
GRANTS_LIMIT = 64
EXPIRY_SECONDS = 600.0
_LOOK_BYTES = 4 << 20


def still_poisoned(buffer: Bytes, page_bytes: int, ids: PageIds) -> int | None:
    """The first byte outside pages `ids` that is not poison, or None."""
    outside = np.ones(buffer.size // page_bytes, dtype=bool)
    outside[ids] = False
    rows = buffer[: outside.size * page_bytes].reshape(outside.size, page_bytes)
    step = max(_LOOK_BYTES // page_bytes, 1)
    for first in range(0, outside.size, step):
        wrong = (rows[first : first + step] != POISON) & outside[first : first + step, None]
        if wrong.any():
            return first * page_bytes + int(np.argmax(wrong))
    tail = np.flatnonzero(buffer[rows.size :] != POISON)
    return rows.size + int(tail[0]) if tail.size else None


class SelftestTarget(Target):
    """The benchmark's target and the orders of the conformance part."""

    def __init__(self, options: TargetOptions, secret: str | None) -> None:
        super().__init__(options, secret)
        self._lent: dict[int, kvik.Grant] = {}
        self.orders |= {
            "about": self._about,
            "blank": self._blank,
            "outside": self._outside,
            "lend": self._lend,
            "revoke": self._revoke,
            "ended": self._ended,
            "unknown": self._unknown,
            "nics": self._nics,
        }

    def _about(self, _: Message) -> Message:
        return {"ports": hardware.to_json(hardware.ports()), "limits": hardware.limits()}

    def _blank(self, _: Message) -> Message:
        self.memory.bytes[:] = POISON
        return {}

    def _outside(self, request: Message) -> Message:
        plan, batches = self._batches(request)
        ids = np.concatenate([plan.target_ids(batch) for batch in batches] or [np.empty(0, np.uint32)])
        return {"wrong": still_poisoned(self.memory.bytes, plan.page_bytes, ids)}

    def _lend(self, request: Message) -> Message:
        if len(self._lent) >= GRANTS_LIMIT:
            raise BenchError(f"{GRANTS_LIMIT} grants are lent; a part needs fewer")
        layout = self.memory.layout(int(request["page_bytes"]))
        ids = np.arange(int(request["pages"]), dtype=np.uint32)
        right: kvik.RightName = "write" if request["right"] == "write" else "read"
        expiry = float(request["expiry"])
        grant = self.engine.grant(
            self.memory.pages(layout, ids),
            right=right,
            use="many" if request["use"] == "many" else int(request["use"]),
            expiry=expiry,
            max_expiry=expiry,
        )
        key = len(self._lent)
        self._lent[key] = grant
        return {"key": key, "ticket": str(grant.ticket)}

    def _revoke(self, request: Message) -> Message:
        grant = self._lent[int(request["key"])]
        began = time.monotonic()
        grant.revoke(timeout=CLOSE_SECONDS)
        return {"seconds": time.monotonic() - began, "state": grant.state}

    def _ended(self, request: Message) -> Message:
        return {"state": self._lent[int(request["key"])].wait(float(request["seconds"]))}

    def _unknown(self, request: Message) -> Message:
        template = self.engine.ticket_template(self.memory.layout(int(request["page_bytes"])))
        return {"ticket": str(template.with_grant(os.urandom(16).hex(), EXPIRY_SECONDS))}

    def _nics(self, _: Message) -> Message:
        return {"nics": nic_counts(self.engine.metrics())}


@dataclass(frozen=True)
class Lent:
    """A grant of the other side."""

    key: int
    ticket: str


class Other(Peer):
    """This side's handle on it."""

    def about(self) -> dict[str, Any]:
        """Its RDMA ports and limits."""
        answer = self.connection.request("about")
        return {"machine": self.facts, "ports": answer["ports"], "limits": answer["limits"]}

    def blank(self) -> None:
        """Overwrite all of its memory with poison."""
        self.connection.request("blank")

    def demand_untouched(self, first: int, count: int) -> None:
        """`CheckError` unless everything outside these batches is poison."""
        wrong = self.connection.request("outside", first=first, count=count)["wrong"]
        if wrong is not None:
            raise CheckError(f"the other side's byte {wrong} was changed, outside all pages of the transfer")

    def lend(
        self,
        pages: int,
        page_bytes: int,
        right: str = "read",
        use: int | str = "many",
        expiry: float | None = None,
    ) -> Lent:
        """Have it grant its first pages."""
        answer = self.connection.request(
            "lend",
            pages=pages,
            page_bytes=page_bytes,
            right=right,
            use=use,
            expiry=EXPIRY_SECONDS if expiry is None else expiry,
        )
        return Lent(int(answer["key"]), str(answer["ticket"]))

    def revoke(self, lent: Lent) -> tuple[float, str]:
        """Have it take a grant back: the seconds that took, and the grant's state."""
        answer = self.connection.request("revoke", key=lent.key)
        return float(answer["seconds"]), str(answer["state"])

    def ended(self, lent: Lent, seconds: float) -> str | None:
        """The state in which a grant ends within some seconds."""
        state = self.connection.request("ended", key=lent.key, seconds=seconds)["state"]
        return None if state is None else str(state)

    def unknown(self, page_bytes: int) -> str:
        """A ticket of a grant that it does not give: a transfer with it waits until its deadline."""
        return str(self.connection.request("unknown", page_bytes=page_bytes)["ticket"])

    def nics(self) -> dict[str, dict[str, float]]:
        """What its NICs counted."""
        return dict(self.connection.request("nics")["nics"])

    def cut(self) -> None:
        """End the control connection under whoever waits on it; the other side leaves by that."""
        with contextlib.suppress(OSError):  # It was closed already.
            self.connection.sock.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the process as a crash would: only one that this side started."""
        if self._child is None:
            raise BenchError("the other side is not this command's own process")
        self._child.kill()


if __name__ == "__main__":
    sys.exit(main(SelftestTarget))
