"""Part 6: what each NIC moved in the parts that measure, and whether its operations failed."""

from __future__ import annotations

from kvik.bench.errors import CheckError
from kvik.selftest.counts import NicCounts, summed
from kvik.selftest.part import Part, Say, checked
from kvik.selftest.sides import Session


def nics(part: Part, session: Session, say: Say) -> None:
    """Both sides' counts. Bytes are counted where a transfer is begun, so they are this side's alone."""
    pairs = [pair for counted in session.counted.values() for pair in counted]
    part.data |= {
        "parts": sorted(session.counted),
        "this_side": summed(here for here, _ in pairs),
        "other_side": summed(there for _, there in pairs),
    }
    if not session.plan.uses_nics:
        part.state = "left out"
        part.said = f"transport {session.plan.transport} was asked for, which does not have to use NICs"
        return
    if not pairs:
        part.state, part.said = "failed", "no part that measures came to its end, so nothing was counted"
        return
    here: NicCounts = part.data["this_side"]
    for name, one in here.items():
        checked(part, f"NIC {name} took part", lambda one=one: _took_part(one), say)  # type: ignore[misc]
    for name, one in part.data["other_side"].items():
        checked(part, f"NIC {name} of the other side", lambda one=one: _sound(one), say)  # type: ignore[misc]
    if not here:
        part.state, part.said = "failed", "the engine has no NICs in its metrics"
        return
    moved = sum(one["in"] + one["out"] for one in here.values())
    part.settle(
        f"all {len(here)} of this side moved pages, {moved / 1e9:.2f} GB together; no operation failed"
    )


def _sound(one: dict[str, float]) -> str:
    if one["failed"]:
        raise CheckError(
            f"{one['failed']:.0f} of its operations failed; what they were to move was posted again"
        )
    if not one["up"]:
        raise CheckError("its port is down")
    return "no operation failed"


def _took_part(one: dict[str, float]) -> str:
    if not one["in"] + one["out"]:
        raise CheckError("it moved nothing: other NICs did all the work")
    said = _sound(one)
    return f"{one['in'] / 1e9:.3f} GB in, {one['out'] / 1e9:.3f} GB out, {said}"
