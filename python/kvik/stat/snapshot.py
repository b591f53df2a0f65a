"""From two snapshots of an engine's metrics to what happened between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvik._native import ProtocolError
from kvik.config.words import shown
from kvik.stat.engines import About

Labels = dict[str, str]

_START = "kvik_engine_start_time_seconds"
_GONE = "gone"
"""Stands for all peers that were forgotten: what was counted for one comes to it at once."""


class Samples:
    """Metrics at one time, from the Prometheus text format. Raises ProtocolError for what is not in it."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples[sample.name].append((sample.labels, sample.value))
        except ValueError as error:
            text = f"metrics are not in the Prometheus text format: {shown(str(error))}"
            raise ProtocolError(text) from error

    def series(self) -> Iterator[tuple[str, Labels, float]]:
        """All of them: the name, the labels and the value of each."""
        for name, found in self._samples.items():
            for labels, value in found:
                yield name, labels, value

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        return sum(self.by(name, lambda _: "", **labels).values())

    def by(self, name: str, key: Callable[[Labels], Any], **labels: str) -> dict[Any, float]:
        """The sums of the series with these labels, by what `key` makes of all their labels."""
        sums: dict[Any, float] = defaultdict(float)
        for found, value in self._samples.get(name, ()):
            if labels.items() <= found.items():
                sums[key(found)] += value
        return sums


class Snapshot(Samples):
    """An engine's metrics at one time."""

    def __init__(self, about: About, text: str) -> None:
        super().__init__(text)
        self.about = about


@dataclass(frozen=True)
class PeerRates:
    """What went between an engine and one peer over one transport. Rates are a second."""

    peer: str
    name: str
    transport: str
    in_bytes: float
    out_bytes: float
    transfers: float
    errors: int
    """Transfers and requests that failed, since the start."""


@dataclass(frozen=True)
class Rates:
    """What an engine did between two snapshots, and what it holds at the second."""

    about: About
    interval_s: float
    peers: tuple[PeerRates, ...]
    open: int
    grants_live: int
    grants_given: int
    grants_ended: dict[str, int]
    quarantined_pages: int
    sessions: int
    peer_states: dict[str, int]
    reconnects: int
    late_heartbeats: int
    refusals: dict[str, int]
    handshakes_refused: dict[str, int]
    memory_held: int
    memory_cap: int
    registered: int
    regions: int
    cpu_percent: dict[str, float]
    seconds: dict[str, float]
    """Mean seconds of the transfers that ended between the snapshots, by operation and transport."""

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs: bytes, seconds, and rates a second."""
        return asdict(self)


def rates(before: Snapshot, after: Snapshot) -> Rates:
    """Compare two snapshots of an engine.

    One that is started again at its address keeps its id: what it did is then all since that start.
    """
    if before.total(_START) != after.total(_START):
        before = Snapshot(replace(after.about, uptime_s=0.0), "")
    seconds = max(after.about.uptime_s - before.about.uptime_s, 1e-6)

    def rose(name: str, key: Callable[[Labels], Any], **labels: str) -> dict[Any, float]:
        earlier, later = before.by(name, key, **labels), after.by(name, key, **labels)
        # A peer that was forgotten meanwhile is counted under another name: nothing rose, rather than fell.
        return {what: max(value - earlier.get(what, 0.0), 0.0) for what, value in later.items()}

    return Rates(
        about=after.about,
        interval_s=seconds,
        peers=_peers(after, rose, seconds),
        open=int(after.total("kvik_transfers_open")),
        grants_live=int(after.total("kvik_grants_live")),
        grants_given=int(after.total("kvik_grants_given_total")),
        grants_ended=_counts(after, "kvik_grants_ended_total", "state"),
        quarantined_pages=int(after.total("kvik_quarantined_pages")),
        sessions=int(after.total("kvik_sessions_open")),
        peer_states=_counts(after, "kvik_peers", "state"),
        reconnects=int(after.total("kvik_reconnects_total")),
        late_heartbeats=int(after.total("kvik_heartbeats_late_total")),
        refusals=_counts(after, "kvik_refusals_total", "code"),
        handshakes_refused=_counts(after, "kvik_handshakes_refused_total", "code"),
        memory_held=int(after.total("kvik_memory_held_bytes")),
        memory_cap=int(after.total("kvik_memory_cap_bytes")),
        registered=int(after.total("kvik_registered_bytes")),
        regions=int(after.total("kvik_regions")),
        cpu_percent={
            thread: 100 * used / seconds
            for thread, used in rose("kvik_thread_cpu_seconds_total", lambda of: of["thread"]).items()
        },
        seconds=_means(rose),
    )


def _path(labels: Labels) -> tuple[str, str]:
    return labels["peer"], labels["transport"]  # and no name: a peer that gets one, or another, is the same


def _peers(after: Snapshot, rose: Any, seconds: float) -> tuple[PeerRates, ...]:
    came = rose("kvik_transfer_bytes_total", _path, direction="in")
    went = rose("kvik_transfer_bytes_total", _path, direction="out")
    ended = rose("kvik_transfers_total", _path)
    all_ended = after.by("kvik_transfers_total", _path)
    well = after.by("kvik_transfers_total", _path, outcome="ok")
    names = {of["peer"]: of["peer_name"] for name, of, _ in after.series() if name == "kvik_transfers_total"}
    rows = []
    for path, count in ended.items():
        per_s = 0.0 if path[0] == _GONE else 1 / seconds
        rows.append(
            PeerRates(
                peer=path[0],
                name=names[path[0]],
                transport=path[1],
                in_bytes=came.get(path, 0.0) * per_s,
                out_bytes=went.get(path, 0.0) * per_s,
                transfers=count * per_s,
                errors=int(all_ended[path] - well.get(path, 0.0)),
            )
        )
    return tuple(
        sorted(rows, key=lambda row: (-row.in_bytes - row.out_bytes, -row.transfers, row.name, row.peer))
    )


def _counts(snapshot: Snapshot, name: str, label: str) -> dict[str, int]:
    return {value: int(count) for value, count in sorted(snapshot.by(name, lambda of: of[label]).items())}


def _means(rose: Any) -> dict[str, float]:
    def kind(labels: Labels) -> str:
        return f"{labels['op']} {labels['transport']}"

    counts, sums = rose("kvik_transfer_seconds_count", kind), rose("kvik_transfer_seconds_sum", kind)
    return {what: sums[what] / count for what, count in counts.items() if count > 0}


def merged(snapshots: list[tuple[About, str]]) -> str:
    """The metrics of several engines as one exposition: each series says of which engine it is."""
    families: dict[str, list[str]] = {}
    for about, text in snapshots:
        name = about.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        own = f'engine="{about.engine}",engine_name="{name}"'
        family: list[str] = []
        fresh = False
        # A name may hold what `splitlines` takes for the end of a line; the format has one such sign.
        for line in filter(None, text.split("\n")):
            if line.startswith("# HELP "):
                title = line.split(" ", 3)[2]
                fresh = title not in families
                family = families.setdefault(title, [])
            if line.startswith("#"):
                if fresh:
                    family.append(line)
            else:
                family.append(_labelled(line, own))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(line: str, own: str) -> str:
    if line.startswith("kvik_engine_info"):
        return line  # It says so itself.
    head, brace, rest = line.partition("{")
    if brace and " " not in head:
        return f"{head}{{{own},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{own}}} {value}"
