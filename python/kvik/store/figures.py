"""From metrics of a store to what operators want to know of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvik._native import ProtocolError
from kvik.config.words import shown
from kvik.stat.snapshot import Labels, Samples


@dataclass(frozen=True)
class Traffic:
    """What gets and puts did in one tier, for one tenant or for all of them."""

    lookups: int
    """Blocks that the tier was asked for."""
    hits: int
    misses: int
    hit_rate: float | None
    """Of 1; None where nothing was asked for."""
    in_bytes: int
    out_bytes: int


@dataclass(frozen=True)
class Times:
    """Quantiles of a histogram, in seconds, interpolated within its buckets."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Period:
    """What happened in a time. Of tiers: memory, log, object."""

    seconds: float | None
    """How long it was; None: since the store began."""
    tiers: dict[str, Traffic]
    tenants: dict[str, dict[str, Traffic]]
    """By tenant, then by tier."""
    latency: dict[str, dict[str, Times]]
    """By operation (get_first, get, put, load), then by tier."""
    reuse_gap: Times | None
    idle: Times | None
    refused_blocks: dict[str, int]
    refused_requests: dict[str, int]
    evicted: dict[str, int]
    corrupt: int
    shared_waits: int


@dataclass(frozen=True)
class Now:
    """What a store has at a time; bytes by tenant have the empty name for all tenants without a quota."""

    blocks: int
    memory_bytes: dict[str, int]
    quota_bytes: dict[str, int]
    pinned_bytes: dict[str, int]
    memory_taken: int
    memory_capacity: int
    lent_bytes: int
    policy: dict[str, str]
    """The policy that decides, by tenant in the same way."""
    log: dict[str, int] | None
    """Bytes, counts since the store began; None where there is no log."""
    object: dict[str, int] | None
    """The same of the object store."""


@dataclass(frozen=True)
class Server:
    """One of several servers: what it has, and its part of what was done in the interval."""

    up: bool
    """Whether it answers; the figures of one that does not are 0."""
    blocks: int
    memory_bytes: int
    memory_capacity: int
    lookups: int
    """Blocks that it was asked for."""
    hits: int
    out_bytes: int


@dataclass(frozen=True)
class Figures:
    """A store at one time, and what it did."""

    address: str
    now: Now
    interval: Period
    since_start: Period
    servers: dict[str, Server]
    """By name; none of a store of one server."""

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return asdict(self)


def figures(
    address: str, before: Samples, after: Samples, seconds: float, up: Mapping[str, bool] | None = None
) -> Figures:
    """Compare two looks at a store, ``seconds`` apart.

    up: of several servers, by name, whether they answer.

    Raises ProtocolError for metrics that are not those of a store, or of another version's.
    """
    try:
        periods = _period(before, after, seconds), _period(None, after, None)
        return Figures(address, _now(after), *periods, _servers(before, after, up or {}))
    except (KeyError, ValueError, OverflowError) as error:
        text = (
            f"the metrics of the store at {shown(address)} are not as this version of kvik has them "
            f"({type(error).__name__}: {shown(str(error))}): ask with the kvik that its server has"
        )
        raise ProtocolError(text) from error


def quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float:
    """The value below which a share of the observations lie, as Prometheus' ``histogram_quantile`` has it.

    buckets: bounds and how many observations are at most that, in order, infinity last. What lies above the
    last finite bound counts as that bound. There must be an observation.
    """
    rank = share * buckets[-1][1]
    bound = below = 0.0
    for upper, count in buckets:
        if count >= rank and count > below:
            return bound if math.isinf(upper) else bound + (upper - bound) * (rank - below) / (count - below)
        bound, below = (bound if math.isinf(upper) else upper), count
    return bound


_Key = Callable[[Labels], Any]
_Series = tuple[str, frozenset[tuple[str, str]]]
"""A name, and labels with their values."""

_COUNTERS = ("_total", "_bucket")


def _by_series(samples: Samples) -> dict[_Series, float]:
    return {(name, frozenset(labels.items())): value for name, labels, value in samples.series()}


def _member(series: _Series) -> str:
    """The server that it is of; nothing where there is one."""
    return dict(series[1]).get("member", "")


class _Rise:
    """How much counters have risen between two looks, or, without a first one, since the start.

    A server of which one has fallen was started again: all of its counters begin at 0. Of one that did not
    answer at the first look nobody knows what it did since: it has done nothing.
    """

    def __init__(self, before: Samples | None, after: Samples) -> None:
        self._after = after
        self._earlier = _by_series(before or Samples(""))
        later = _by_series(after)
        counters = {at: value for at, value in self._earlier.items() if at[0].endswith(_COUNTERS)}
        again = {_member(at) for at, value in counters.items() if later.get(at, 0.0) < value}
        known = {_member(at) for at in self._earlier}
        for at, value in later.items():
            if _member(at) in again:
                self._earlier.pop(at, None)
            elif before is not None and _member(at) not in known:
                self._earlier[at] = value

    def by(self, name: str, key: _Key) -> dict[Any, int]:
        rises: dict[Any, int] = defaultdict(int)
        for series, value in self._after.by(name, lambda of: tuple(of.items())).items():
            rises[key(dict(series))] += int(value - self._earlier.get((name, frozenset(series)), 0.0))
        return dict(rises)

    def by_label(self, name: str, label: str) -> dict[str, int]:
        return {what: count for what, count in self.by(name, lambda of: of[label]).items() if count}

    def total(self, name: str) -> int:
        return sum(self.by(name, lambda _: "").values())

    def times(self, name: str, key: _Key) -> dict[Any, Times]:
        """Quantiles of the histograms that have observations."""
        found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        buckets = self.by(f"{name}_bucket", lambda of: (key(of), float(of["le"])))
        for (what, bound), count in buckets.items():
            found[what].append((bound, count))
        told = {}
        for what, unsorted in found.items():
            counts = sorted(unsorted)
            if counts[-1][1] > 0:
                told[what] = Times(int(counts[-1][1]), quantile(0.5, counts), quantile(0.99, counts))
        return told


def _period(before: Samples | None, after: Samples, seconds: float | None) -> Period:
    rise = _Rise(before, after)
    tiers = _traffic(rise, lambda of: ("", of["tier"]))
    latency: dict[str, dict[str, Times]] = defaultdict(dict)
    for (op, tier), times in rise.times("kvik_store_operation_seconds", _op).items():
        latency[op][tier] = times
    return Period(
        seconds=seconds,
        tiers=tiers.get("", {}),
        tenants=_traffic(rise, lambda of: (of["tenant"], of["tier"])),
        latency=dict(latency),
        reuse_gap=rise.times("kvik_store_reuse_gap_seconds", lambda _: "").get(""),
        idle=rise.times("kvik_store_evicted_idle_seconds", lambda _: "").get(""),
        refused_blocks=rise.by_label("kvik_store_refused_blocks_total", "cause"),
        refused_requests=rise.by_label("kvik_store_refused_requests_total", "code"),
        evicted=rise.by_label("kvik_store_evicted_blocks_total", "policy"),
        corrupt=rise.total("kvik_store_corrupt_blocks_total"),
        shared_waits=rise.total("kvik_store_shared_waits_total"),
    )


def _op(labels: Labels) -> tuple[str, str]:
    return labels["op"], labels["tier"]


def _traffic(rise: _Rise, key: _Key) -> dict[str, dict[str, Traffic]]:
    lookups, hits = rise.by("kvik_store_lookups_total", key), rise.by("kvik_store_hits_total", key)
    misses = rise.by("kvik_store_misses_total", key)
    came, went = rise.by("kvik_store_in_bytes_total", key), rise.by("kvik_store_out_bytes_total", key)
    told: dict[str, dict[str, Traffic]] = defaultdict(dict)
    for (tenant, tier), asked in lookups.items():
        at = (tenant, tier)
        rate = hits[at] / asked if asked else None
        told[tenant][tier] = Traffic(asked, hits[at], misses[at], rate, came[at], went[at])
    return dict(told)


_LOG = ("capacity_bytes", "bytes", "segments", "unsynced_bytes", "copied_bytes_total", "dropped_blocks_total",
        "unwritten_blocks_total", "syncs_total", "quarantined_records_total", "failures_total")  # fmt: skip

_OBJECT = ("capacity_bytes", "bytes", "unsent_bytes", "dropped_blocks_total",
           "unwritten_blocks_total", "requests_total", "sent_bytes_total", "received_bytes_total",
           "quarantined_records_total", "failures_total", "shut", "open")  # fmt: skip


def _servers(before: Samples, after: Samples, up: Mapping[str, bool]) -> dict[str, Server]:
    if not up:
        return {}
    rise = _Rise(before, after)

    def now(name: str) -> dict[str, float]:
        return after.by(name, lambda of: of["member"])

    def in_memory(name: str) -> dict[str, int]:
        """What is not in memory is asked of the log: that would count twice."""
        of_both = rise.by(name, lambda of: (of["member"], of["tier"]))
        return {member: count for (member, tier), count in of_both.items() if tier == "memory"}

    blocks, used = now("kvik_store_blocks"), now("kvik_store_memory_bytes")
    capacity = now("kvik_store_memory_capacity_bytes")
    asked, went = in_memory("kvik_store_lookups_total"), in_memory("kvik_store_out_bytes_total")
    hits = rise.by("kvik_store_hits_total", lambda of: of["member"])
    return {
        name: Server(
            answers, *(int(found.get(name, 0)) for found in (blocks, used, capacity, asked, hits, went))
        )
        for name, answers in sorted(up.items())
    }


def _now(after: Samples) -> Now:
    def by_tenant(name: str) -> dict[str, int]:
        return {tenant: int(value) for tenant, value in after.by(name, lambda of: of["tenant"]).items()}

    def tier(name: str, figures: tuple[str, ...]) -> dict[str, int] | None:
        if not after.by(f"kvik_store_{name}_bytes", lambda _: ""):
            return None
        return {of.removesuffix("_total"): int(after.total(f"kvik_store_{name}_{of}")) for of in figures}

    far = tier("object", _OBJECT)
    return Now(
        blocks=int(after.total("kvik_store_blocks")),
        memory_bytes=by_tenant("kvik_store_memory_bytes"),
        quota_bytes=by_tenant("kvik_store_quota_bytes"),
        pinned_bytes=by_tenant("kvik_store_pinned_bytes"),
        memory_taken=int(after.total("kvik_store_memory_taken_bytes")),
        memory_capacity=int(after.total("kvik_store_memory_capacity_bytes")),
        lent_bytes=int(after.total("kvik_store_lent_bytes")),
        policy=dict(after.by("kvik_store_policy", lambda of: (of["tenant"], of["policy"])).keys()),
        log=tier("log", _LOG),
        object=far and far | {"count": int(after.total("kvik_store_objects"))},
    )
