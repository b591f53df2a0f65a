"""What the gates ask of a run that loads a file: V1, V2, V6 and V7 in their own terms.

V1: nothing was in the page cache. V2: the bytes came from where the file is. V6: it is the file that is
stated. V7: NFS went over the transport that is stated. What the gates say of requests is silent here.
"""

from __future__ import annotations

from kvik_lab.gates.case import Case, invalid, passed, suspect, total, unchecked, worst
from kvik_lab.gates.limits import BYTES_FAR, BYTES_NEAR, HIT_SHARE, TRANSPORT_SHARE
from kvik_lab.records import Finding, RunRecord
from kvik_lab.storage.measure import BYTES, RESIDENT, protocol

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_FROM_SERVER = "node_mountstats_nfs_total_read_bytes_total"
_FROM_DISK = "kvik_lab_read_bytes_total"
_BY_RDMA = "kvik_lab_nfs_rdma_reply_bytes_total"


def _file_system(record: RunRecord) -> str:
    roles = record.role("storage")
    return str(roles[0].reported.get("file_system", "")) if roles else ""


def _values(record: RunRecord, metric: str) -> list[float]:
    return [figure.value for figure in record.figures if figure.metric == metric]


def v1(case: Case) -> Finding:
    """Before each load nothing of the file was in the page cache."""
    shares, kind = _values(case.record, RESIDENT), _file_system(case.record)
    if not shares:
        return unchecked("V1", "no load is in the record")
    if kind in IN_MEMORY:
        return unchecked("V1", f"a {kind} is in memory itself, and has no cache beside it")
    most = max(shares)
    seen = f"before a load at most {most:.1%} of the file was in the page cache"
    if most == 0:
        return passed("V1", seen, most, 0.0)
    remedy = "end what else reads the file; where the reader may not ask (mincore), run as the file's owner"
    return (invalid if most > HIT_SHARE else suspect)("V1", seen, remedy, most, 0.0)


def v2(case: Case) -> Finding:
    """As many bytes came from the server or the disk as were loaded."""
    loaded, kind = sum(_values(case.record, BYTES)), _file_system(case.record)
    if not loaded:
        return unchecked("V2", "no load is in the record")
    if kind in IN_MEMORY:
        return unchecked("V2", f"a {kind} reads from nowhere else")
    where, counter = ("the server", _FROM_SERVER) if kind.startswith("nfs") else ("the disk", _FROM_DISK)
    came = total(case.record.role("storage"), counter)
    if not came:
        what = f"that the bytes came from {where} is not shown: none are counted of {kind or 'the mount'}"
        return suspect("V2", what, "load from a file system whose reads the kernel counts")
    seen = f"{came:,.0f} bytes came from {where}, and the loads have {loaded:,.0f}"
    if loaded * (1 - BYTES_NEAR) <= came <= loaded * (1 + BYTES_NEAR):
        return passed("V2", seen, came, loaded)
    if came < loaded * (1 - BYTES_FAR):
        return invalid(
            "V2", seen, "find the cache that answered, and empty it before each load", came, loaded
        )
    return suspect("V2", seen, "end what else reads there, and run again", came, loaded)


def v6(case: Case) -> Finding:
    """The file has the bytes that are stated, and the arms have one file."""
    sizes, stated = set(_values(case.record, BYTES)), case.stated.file_bytes
    if not sizes or stated is None:
        return unchecked("V6", "no size of a file is stated, or no load is in the record")
    wrong = next((size for size in sizes if size != stated), None)
    if wrong is not None:
        what = f"the file has {wrong:,.0f} bytes, and {stated:,} are stated"
        return invalid("V6", what, "put the same file in every place, and state its size", wrong, stated)
    return worst([passed("V6", f"the file has {stated:,} bytes"), *_contents(case)])


def _contents(case: Case) -> list[Finding]:
    """That arms loaded the same; V8 says it too, of all that a role reports."""
    for mine in case.record.role("storage"):
        for other in case.beside:
            for theirs in other.role("storage"):
                one, two = mine.reported.get("digest"), theirs.reported.get("digest")
                if other.stated.file_bytes == case.stated.file_bytes and one != two:
                    what = f"the file's digest is {one} here and {two} in run {other.id}"
                    return [invalid("V6", what, "put the same file in every place")]
    return []


def v7(case: Case) -> Finding:
    """NFS came over the stated transport, by the kernel's own count of the mount; a local file by none."""
    wanted, roles = case.stated.transport, case.record.role("storage")
    if wanted is None or not roles:
        return unchecked("V7", "no transport is stated, or nothing was loaded")
    used = protocol(roles[0].after) or "local"
    if used != wanted:
        what = f"the file came by {used}, and {wanted} is stated"
        remedy = (
            "unmount what else is mounted of that server here: the kernel shares its connection; and see "
            "that the server listens (tcp 2049, rdma 20049)"
        )
        return invalid("V7", what, remedy)
    return _by_rdma(case) if wanted == "rdma" else passed("V7", f"the file came by {used}")


def _by_rdma(case: Case) -> Finding:
    """The payload itself was placed by RDMA, not sent within messages."""
    moved, loaded = total(case.record.role("storage"), _BY_RDMA), sum(_values(case.record, BYTES))
    if moved is None or not loaded:
        return suspect("V7", "the mount is over RDMA and counts no bytes", "see /proc/self/mountstats")
    seen = f"{moved:,.0f} of {loaded:,.0f} bytes were placed by RDMA"
    if moved >= TRANSPORT_SHARE * loaded:
        return passed("V7", seen, moved / loaded, 1.0)
    return invalid(
        "V7", seen, "mount with a larger rsize: small replies go within messages", moved / loaded, 1.0
    )
