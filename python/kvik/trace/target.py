"""The target of a replay: the target of a benchmark, with regions that lie as the recorded ones did.

Started as ``python -m kvik.trace.target OPTIONS`` with a socket as standard input, or by hand with
``kvik trace replay --listen HOST:PORT``. Lists of page ids cross the control connection in pieces.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import kvik
from kvik.bench.control import Message
from kvik.bench.errors import BenchError, CheckError
from kvik.bench.peer import Peer
from kvik.bench.target import Target, TargetOptions, main
from kvik.trace.file import Dims, PageIds, expanded
from kvik.trace.memory import Sparse, runs_of
from kvik.trace.pattern import Elements

MODULE = "kvik.trace.target"
_IDS_AT_ONCE = 2048


class ReplayTarget(Target):
    """Answers the orders of a replay beside those of a benchmark."""

    def __init__(self, options: TargetOptions, secret: str | None) -> None:
        super().__init__(options, secret)
        self._regions: dict[str, Sparse] = {}
        self._grants: list[kvik.Grant] = []
        self.orders |= {
            "region": self._region,
            "grant": self._grant_all,
            "paint": self._paint,
            "blank": self._blank,
            "compare": self._compare,
        }

    def _region(self, request: Message) -> Message:
        dims = _dims(request["dims"])
        beside = self._regions.values()
        sparse = Sparse(self.engine, dims, str(request["memory"]), int(request["ids"]), beside)
        self._regions[str(request["region"])] = sparse
        return {}

    def _grant_all(self, request: Message) -> Message:
        """A grant over all pages of a region, in some of their layers and slices."""
        sparse, elements = self._elements(request)
        right: kvik.RightName = "write" if request["right"] == "write" else "read"
        pages = sparse.pages(elements, range(sparse.dims.pages * elements.parts))
        expiry = float(request["expiry"])
        grant = self.engine.grant(pages, right=right, use="many", expiry=expiry, max_expiry=expiry)
        self._grants.append(grant)
        return {"ticket": str(grant.ticket)}

    def _paint(self, request: Message) -> Message:
        sparse, elements = self._elements(request)
        elements.paint(sparse.bytes, expanded(request["ids"]), int(request["salt"]))
        return {}

    def _blank(self, request: Message) -> Message:
        sparse, elements = self._elements(request)
        elements.poison(sparse.bytes, expanded(request["ids"]))
        return {}

    def _compare(self, request: Message) -> Message:
        sparse, elements = self._elements(request)
        ids, sources = expanded(request["ids"]), expanded(request["sources"])
        return {"wrong": elements.check(sparse.bytes, ids, sources, int(request["salt"]))}

    def _elements(self, request: Message) -> tuple[Sparse, Elements]:
        sparse = self._regions.get(str(request["region"]))
        if sparse is None:
            raise BenchError(f"there is no region {request['region']!r}")
        layers, slices = request["layers"], request["slices"]
        elements = Elements(
            sparse.dims,
            (int(layers[0]), int(layers[1])),
            (int(slices[0]), int(slices[1])),
            int(request["parts"]),
        )
        return sparse, elements


class ReplayPeer(Peer):
    """Requests to the target as methods."""

    def region(self, name: str, dims: Dims, memory: str, ids: int) -> None:
        """Make a region that lies like this, of which `ids` pages will be used."""
        self.connection.request("region", region=name, dims=asdict(dims), memory=memory, ids=ids)

    def grant(self, name: str, elements: Elements, right: str, expiry: float) -> str:
        """Grant all its pages; gives the ticket's text."""
        told = {**_said(name, elements), "right": right, "expiry": expiry}
        return str(self.connection.request("grant", **told)["ticket"])

    def paint(self, name: str, elements: Elements, ids: PageIds, salt: int) -> None:
        """Write the pattern into some ids."""
        for at in range(0, ids.size, _IDS_AT_ONCE):
            part = runs_of(ids[at : at + _IDS_AT_ONCE])
            self.connection.request("paint", **_said(name, elements), ids=part, salt=salt)

    def blank(self, name: str, elements: Elements, ids: PageIds) -> None:
        """Overwrite some ids."""
        for at in range(0, ids.size, _IDS_AT_ONCE):
            part = runs_of(ids[at : at + _IDS_AT_ONCE])
            self.connection.request("blank", **_said(name, elements), ids=part)

    def compare(self, name: str, elements: Elements, ids: PageIds, sources: PageIds, salt: int) -> None:
        """Have some ids compared with the pattern of others. Raises CheckError."""
        for at in range(0, ids.size, _IDS_AT_ONCE):
            end = at + _IDS_AT_ONCE
            part = {"ids": runs_of(ids[at:end]), "sources": runs_of(sources[at:end])}
            wrong = self.connection.request("compare", **_said(name, elements), **part, salt=salt)["wrong"]
            if wrong is not None:
                raise CheckError(f"at the target: {wrong}")


def _said(name: str, elements: Elements) -> dict[str, Any]:
    return {
        "region": name,
        "layers": elements.layers,
        "slices": elements.slices,
        "parts": elements.parts,
    }


def _dims(said: dict[str, Any]) -> Dims:
    offsets = said["layer_offsets"]
    return Dims(**{**said, "layer_offsets": None if offsets is None else tuple(offsets)})


if __name__ == "__main__":
    sys.exit(main(ReplayTarget))
