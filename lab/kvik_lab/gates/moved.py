"""V2: as many bytes of KV were moved as the prompts have. V7: by the transport that is stated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvik_lab.gates.case import (
    Case,
    first_total,
    growth,
    invalid,
    length,
    passed,
    split,
    suspect,
    total,
    unchecked,
    worst,
)
from kvik_lab.gates.limits import BYTES_FAR, BYTES_NEAR, DEVICE_HIGH, DEVICE_LOW, TRANSPORT_SHARE
from kvik_lab.records import Finding, Node, Role

_ENGINE_BYTES = "kvik_transfer_bytes_total"
_LOADED = ("vllm:kvik_loaded_bytes_total", "vllm:nixl_bytes_transferred_sum")
_RDMA = "node_infiniband_port_data_transmitted_bytes_total"
_NETWORK = "node_network_transmit_bytes_total"
_NICS = frozenset({"libfabric", "verbs", "plugin"})  # as which kvik's engines count what `nics` moved
_MAY_BE_RDMA = _NICS | {"nics", "rdma", "roce", "infiniband", "efa", "ucx"}


def v2(case: Case) -> Finding:
    """The bytes that decode took in are tokens * bytes a token, in whole blocks."""
    if not case.disaggregated:
        return unchecked("V2", f"a run of mode {case.stated.mode} hands nothing over")
    if case.stated.kv_bytes_per_token is None:
        return unchecked("V2", "kv_bytes_per_token is not stated", "state it, so that bytes are held to it")
    if not case.record.role("decode"):
        return unchecked("V2", "no decode engine's counters are in the record")
    moved = _moved(case)
    if moved is None:
        return suspect(
            "V2",
            "decode does not count the bytes that it loaded, so that KV was moved at all is not shown",
            "record its /metrics, or the counters of its kvik engines, before and after the run",
        )
    low, high = _expected(case)
    seen = f"decode took in {moved:,.0f} bytes of KV, and the prompts have {low:,.0f} to {high:,.0f}"
    middle = (low + high) / 2
    if low * (1 - BYTES_NEAR) <= moved <= high * (1 + BYTES_NEAR):
        return passed("V2", seen, moved, middle)
    remedy = (
        "see that the servers have the model and KV type that the study states, that no prompt was found in "
        "a cache "
        "(V1), and that decode computed none itself (V3)"
    )
    far = moved < low * (1 - BYTES_FAR) or moved > high * (1 + BYTES_FAR)
    return (invalid if far else suspect)("V2", seen, remedy, moved, middle)


def _moved(case: Case) -> float | None:
    decode = case.record.role("decode")
    loaded = first_total(decode, _LOADED)
    return total(decode, _ENGINE_BYTES, direction="in") if loaded is None else loaded


def _expected(case: Case) -> tuple[float, float]:
    """At least and at most: a block that is not whole may be moved or computed, and so may the last token's;
    and what a decode engine's own cache has by design may be moved again or not."""
    token, block = case.stated.kv_bytes_per_token or 0, case.stated.block_tokens
    tokens = [length(request) or 0 for request in case.answered]
    low = sum((one - 1) // block * block for one in tokens if one) * token
    high = sum(math.ceil(one / block) * block for one in tokens) * token
    return low * (1 - case.stated.prefix_hit_share), high


def v7(case: Case) -> Finding:
    """The KV went over the transport and the devices that are stated."""
    wanted, interfaces = case.stated.transport, case.stated.interfaces
    if wanted is None and interfaces is None:
        return unchecked("V7", "neither a transport nor interfaces are stated")
    if not case.disaggregated or not case.record.role("decode"):
        return unchecked("V7", "nothing was handed over, or no decode engine's counters are in the record")
    looked = (
        _by_engine(case.record.role("decode"), wanted) if wanted else None,
        _by_device(case, interfaces) if interfaces else None,
        _no_rdma(case, wanted) if wanted else None,
        _by_report(case.record.role("prefill", "decode"), wanted) if wanted else None,
    )
    shown = [one for one in looked if one is not None]
    if shown:
        return worst(shown)
    return suspect(
        "V7",
        f"that KV went over {wanted or 'the stated interfaces'} is not shown: neither engines nor devices "
        f"count it",
        "record the counters of kvik's engines (`kvik stat --prometheus`), or those of the nodes' network "
        "devices",
    )


def _by_engine(roles: Sequence[Role], wanted: str) -> Finding | None:
    """What kvik's engines say, which count bytes by transport."""
    return over(wanted, "decode took in", bytes_by_transport(roles, "in"))


def over(wanted: str, who: str, by_transport: Mapping[str, float]) -> Finding | None:
    """Whether the bytes that engines count went over the transport that is stated; None without any."""
    whole = sum(by_transport.values())
    if whole <= 0:
        return None
    share = sum(moved for name, moved in by_transport.items() if _fits(name, wanted)) / whole
    seen = ", ".join(f"{moved:,.0f} bytes by {name}" for name, moved in sorted(by_transport.items()) if moved)
    if share >= TRANSPORT_SHARE:
        return passed("V7", f"{who} {seen}", share, 1.0)
    return invalid(
        "V7",
        f"{who} {seen}, and {wanted} is stated",
        "see the engines' logs for why the transport was not used, and name one transport, not a list",
        share,
        1.0,
    )


def _fits(name: str, wanted: str) -> bool:
    """Whether what is named so is what is stated: an engine is told of `nics`, and names their kind."""
    return name == wanted or (wanted == "nics" and name in _NICS)


def bytes_by_transport(roles: Sequence[Role], *directions: str) -> dict[str, float]:
    """What the engines of these roles moved in these directions, `in` and `out`."""
    found: dict[str, float] = {}
    for role in roles:
        for series, value in role.after.items():
            name, labels = split(series)
            has = dict(labels)
            if name == _ENGINE_BYTES and has.get("direction") in directions:
                transport = has.get("transport", "unknown")
                found[transport] = found.get(transport, 0.0) + value - role.before.get(series, 0.0)
    return found


def _by_device(case: Case, devices: tuple[str, ...]) -> Finding | None:
    """The stated devices carried the bytes."""
    moved = _moved(case)
    if not moved or not case.record.nodes:
        return None
    carried = _carried(case.record.nodes, devices)
    names = ", ".join(devices)
    if carried is None:
        return suspect(
            "V7", f"no node counts bytes of {names}", "see the devices' names in the nodes' counters"
        )
    share = carried / moved
    seen = f"{names} carried {carried:,.0f} bytes, and the KV has {moved:,.0f}"
    if share < DEVICE_LOW:
        return invalid("V7", seen, "see the route between the nodes, and the transport's device", share, 1.0)
    if share > DEVICE_HIGH:
        return suspect("V7", f"{seen}: something else used them", "find it, and run again", share, 1.0)
    return passed("V7", seen, share, 1.0)


def _carried(nodes: Sequence[Node], devices: tuple[str, ...]) -> float | None:
    """Sent bytes, each once: by the node that sent them."""
    found = [
        one
        for node in nodes
        for device in devices
        for name in (_NETWORK, _RDMA)
        if (one := growth(node.before, node.after, name, device=device)) is not None
    ]
    return sum(found) if found else None


def _no_rdma(case: Case, wanted: str) -> Finding | None:
    """RDMA devices carried nothing of a run that is to do without them."""
    moved = _moved(case)
    if wanted.lower() in _MAY_BE_RDMA or not moved:
        return None
    over = sum(growth(node.before, node.after, _RDMA) or 0.0 for node in case.record.nodes)
    if over <= (1 - TRANSPORT_SHARE) * moved:
        return None
    return invalid(
        "V7",
        f"RDMA devices sent {over:,.0f} bytes, and {wanted} is stated",
        "set the transport explicitly (NIXL over UCX: UCX_TLS=tcp,self,sm)",
        over,
        0.0,
    )


def _by_report(roles: Sequence[Role], wanted: str) -> Finding | None:
    """What roles say of themselves can only contradict: a setting is no proof."""
    for role in roles:
        said = role.reported.get("transport")
        if said is not None and not _fits(str(said), wanted):
            what = f"{role.name} says that it uses {said}, and {wanted} is stated"
            return invalid("V7", what, "set its transport option")
    return None
