"""V9: nothing went wrong: errors, retries, preemption, a full client, a busy neighbour, a clock that
jumps."""

from __future__ import annotations

from itertools import pairwise

from kvik_lab.gates.case import Case, growth, invalid, not_seen, passed, split, suspect, total, worst
from kvik_lab.gates.limits import (
    CLIENT_CPU,
    CLIENT_CPU_FULL,
    CLIENT_LAG,
    CLOCK_SLEW,
    CLOCK_STEP,
    OTHERS_CPU,
)
from kvik_lab.records import Clock, Counters, Finding, Node, Request, Role, RunRecord

# Counters that are to stay as they are, with what each says and what to do.
_STILL = {
    "vllm:num_preemptions_total": ("preemptions", "give the engine more KV memory, or send less at once"),
    "vllm:kvik_loads_failed_total": (
        "KV loads of ranks that failed",
        "see decode's log for the error's code",
    ),
    "vllm:kvik_requests_recomputed_total": ("requests whose KV was refused", "see decode's log for why"),
    "vllm:kvik_grants_expired_total": ("grants of ranks that nobody used", "see why decode did not fetch it"),
    "vllm:nixl_num_failed_transfers_total": ("NIXL transfers that failed", "see the engines' logs"),
    "vllm:nixl_num_failed_notifications_total": ("NIXL notifications that failed", "see the engines' logs"),
    "vllm:nixl_num_kv_expired_reqs_total": ("requests whose KV expired", "see why decode did not fetch it"),
    "kvik_router_upstream_errors_total": ("engine failures that the router saw", "see the router's log"),
    "kvik_router_recomputed_total": ("prompts that the router let decode compute", "see its label `reason`"),
    "kvik_router_stale_connections_total": ("requests that the router sent again", "see the router's log"),
    "kvik_reconnects_total": ("sessions with a peer that broke and came back", "see the network's losses"),
    "kvik_nic_failed_operations_total": ("operations of a NIC that failed", "see the engine's log"),
    "kvik_lab_nfs_retransmissions_total": ("NFS requests that were sent again", "see the network's losses"),
    "node_cpu_core_throttles_total": ("throttled cores", "cool the node, or fix its clock below the limit"),
}
_ENGINE = ("vllm:", "kvik_", "http_")


def v9(case: Case) -> Finding:
    """See the module."""
    parts = (_counters, _repeated, _client, _warm_up, _neighbours, _clocks)
    found = worst([_errors(case.record), *(finding for part in parts for finding in part(case.record))])
    return not_seen(case.record, found, "requests sent again, and its own CPU time and delays")


def _errors(record: RunRecord) -> Finding:
    requests = record.requests
    failed = [one for one in requests if not one.ok]
    if failed:
        why = failed[0].error or f"HTTP {failed[0].status}"
        return invalid(
            "V9",
            f"{len(failed)} of {len(requests)} requests failed, the first with: {why[:200]}",
            "find the cause in the logs of the roles, and run again",
            len(failed),
            0,
        )
    again = [one.attempts for one in requests if one.attempts > 1]
    if again:
        return invalid(
            "V9",
            f"{len(again)} requests were sent more than once, up to {max(again)} times: their times are not "
            f"those of "
            "one request",
            "switch retries off: an error is a result",
            len(again),
            0,
        )
    backwards = next((one for one in requests if _backwards(one)), None)
    if backwards is not None:
        what = f"{backwards.id} has a token before it was sent, or before another token"
        return invalid("V9", what, "take all times from one monotonic clock")
    return passed("V9", f"{len(requests)} requests, none failed, none was sent again")


def _backwards(request: Request) -> bool:
    times = [one for one in (request.sent, *request.tokens, request.end) if one is not None]
    return any(b < a for a, b in pairwise(times))


def _counters(record: RunRecord) -> list[Finding]:
    found = []
    sources: list[Role | Node] = [*record.roles, *record.nodes]
    for source in sources:
        lost = _went_back(source.before, source.after)
        if lost is not None:
            said = f"{source.name}: {lost} is lower after the run: its process was started anew meanwhile"
            found.append(invalid("V9", said, "find out why it ended; a run has one start"))
            continue
        for counter, (what, remedy) in _STILL.items():
            grown = growth(source.before, source.after, counter)
            if grown:
                found.append(suspect("V9", f"{source.name}: {grown:.0f} {what}", remedy, grown, 0.0))
    return found


def _repeated(record: RunRecord) -> list[Finding]:
    """Engines answered as many requests as were sent: more were sent again on the way, or by another
    client."""
    client = record.client
    if client is None or client.driver != "builtin":
        return []  # other drivers send requests of which they keep no record
    asked, found = len(record.requests), []
    for kind in ("prefill", "decode", "unified"):
        counted = total(record.role(kind), "vllm:request_success_total")
        if counted is not None and counted > asked:
            what = (
                f"{kind} answered {counted:.0f} requests, and {asked} were sent: {counted - asked:.0f} more"
            )
            remedy = "find who sends again (a proxy that retries), or which other client is there"
            found.append(invalid("V9", what, remedy, counted, asked))
    return found


def _went_back(before: Counters, after: Counters) -> str | None:
    """A counter of an engine that is lower afterwards; gauges may be."""
    for series, value in before.items():
        name, _ = split(series)
        counts = name.endswith(("_total", "_count")) and name.startswith(_ENGINE)
        if counts and after.get(series, value) < value:
            return series
    return None


def _client(record: RunRecord) -> list[Finding]:
    client = record.client
    if client is None:
        return []
    found = []
    if client.cpu_seconds is not None and client.wall_seconds:
        share = client.cpu_seconds / client.wall_seconds
        if share > CLIENT_CPU:
            kind = invalid if share > CLIENT_CPU_FULL else suspect
            what = f"the client used {share:.0%} of a CPU: its own work is in the times of tokens"
            found.append(kind("V9", what, "send less, or share the load between drivers", share, CLIENT_CPU))
    if client.largest_lag is not None and client.largest_lag > CLIENT_LAG:
        what = f"the client's loop ran up to {client.largest_lag * 1e3:.1f} ms late"
        found.append(suspect("V9", what, "give the client a CPU of its own", client.largest_lag, CLIENT_LAG))
    return found


def _warm_up(record: RunRecord) -> list[Finding]:
    """One that was to go on until its times kept a level, and reached its bound."""
    warmup = None if record.client is None else record.client.warmup
    if warmup is None or warmup.rule == "count" or warmup.level_from is not None:
        return []
    what = (
        f"the warm-up ended at its bound of {warmup.requests} requests: their {warmup.metric} kept no level"
    )
    remedy = (
        "raise warmup.max, or find what still changes: `kvik lab series` shows the levels of a table's starts"
    )
    return [suspect("V9", what, remedy, float(warmup.requests))]


def _neighbours(record: RunRecord) -> list[Finding]:
    # What the kernel does for a file system or a socket belongs to no process, so where a run is nothing
    # else, only programs are seen.
    kernel = () if record.stated.mode in ("storage", "transfer") else ("system", "irq", "softirq")
    return [finding for node in record.nodes if (finding := _others(node, kernel)) is not None]


def _others(node: Node, kernel: tuple[str, ...]) -> Finding | None:
    """What others than the run's processes used of a node's CPUs, and what a hypervisor took."""

    def used(*modes: str) -> float | None:
        found = [growth(node.before, node.after, "node_cpu_seconds_total", mode=mode) for mode in modes]
        known = [one for one in found if one is not None]
        return sum(known) if len(known) == len(modes) else None

    busy, idle = used("user", "nice", *kernel), used("idle", "iowait")
    own = growth(node.before, node.after, "kvik_lab_own_cpu_seconds_total")
    if busy is None or idle is None or own is None:
        return None
    steal = used("steal") or 0.0
    whole = busy + idle + steal + (0.0 if kernel else used("system", "irq", "softirq") or 0.0)
    if whole <= 0:
        return None
    share = max(0.0, busy - own + steal) / whole
    if share <= OTHERS_CPU:
        return passed("V9", f"{node.name}: others used {share:.1%} of its CPUs", share, OTHERS_CPU)
    return suspect(
        "V9",
        f"{node.name}: others than the run's processes used {share:.0%} of its CPUs",
        "end what else runs there, or give the run CPUs of its own, and run again",
        share,
        OTHERS_CPU,
    )


def _clocks(record: RunRecord) -> list[Finding]:
    client, nodes = record.client, record.nodes
    clocks = [(node.name, node.clock) for node in nodes if node.clock is not None]
    if client is not None and client.clock is not None:
        clocks.append(("the client's node", client.clock))
    found = [finding for name, clock in clocks if (finding := _stepped(name, clock)) is not None]
    if len(nodes) < 2:
        return found
    for name, clock in clocks:
        if clock.offset is not None and abs(clock.offset) > CLOCK_STEP:
            what = f"{name}: its clock is {clock.offset * 1e3:+.3f} ms off, so stamps of nodes do not compare"
            remedy = "synchronise the nodes (chrony) before the run"
            found.append(suspect("V9", what, remedy, clock.offset, CLOCK_STEP))
    return found


def _stepped(name: str, clock: Clock) -> Finding | None:
    wall, monotonic = clock.wall_after - clock.wall_before, clock.monotonic_after - clock.monotonic_before
    if monotonic < 0:
        what = f"{name}: its monotonic clock is lower after the run: it was started anew meanwhile"
        return invalid("V9", what, "find out why the node restarted")
    allowed = CLOCK_STEP + CLOCK_SLEW * monotonic / 1e9
    stepped = max(abs(wall - monotonic) / 1e9, clock.largest_step)
    if stepped <= allowed:
        return None
    return suspect(
        "V9",
        f"{name}: the wall clock was set by {stepped * 1e3:.1f} ms during the run, so that dates do not "
        f"compare",
        "stop what sets the clock (ntpdate, a hypervisor's agent); let chrony slew it",
        stepped,
        allowed,
    )
