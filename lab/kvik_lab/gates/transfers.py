"""What the gates ask of transfers without a serving system: V2 and V7, by what the initiator's engine counts
of the transfers that are measured and of those before them. What gates say of requests is silent here."""

from __future__ import annotations

from kvik_lab.gates.case import Case, invalid, passed, suspect, unchecked
from kvik_lab.gates.moved import bytes_by_transport, over
from kvik_lab.records import Finding, RunRecord

_SEE = "run the initiator with the kvik that has this lab: its result has the counters of both engines"


def _moved(record: RunRecord) -> dict[str, float]:
    return bytes_by_transport(record.role("load"), "in", "out")


def v2(case: Case) -> Finding:
    """The transfers moved the bytes that their pages have, each once."""
    wanted, moved = case.stated.moved_bytes, sum(_moved(case.record).values())
    if wanted is None:
        return unchecked("V2", "no bytes are stated")
    if not moved:
        return suspect("V2", "the initiator counts no bytes, so that any were moved is not shown", _SEE)
    seen = f"the initiator moved {moved:,.0f} bytes, and the transfers have {wanted:,}"
    if moved == wanted:
        return passed("V2", seen, moved, wanted)
    return invalid("V2", seen, "see the engines' logs for transfers that failed", moved, wanted)


def v7(case: Case) -> Finding:
    """The pages went over the transport that is stated."""
    wanted = case.stated.transport
    if wanted is None:
        return unchecked("V7", "no transport is stated")
    found = over(wanted, "the initiator moved", _moved(case.record))
    return found or suspect("V7", f"that pages went over {wanted} is not shown: no bytes are counted", _SEE)
