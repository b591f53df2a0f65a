"""What the gates say of runs that load a file: from where, over what, and whether it is the file."""

from __future__ import annotations

from typing import Any

import pytest

from kvik_lab.gates import judge
from kvik_lab.records import Figure, Key, Place, Role, RunRecord, Stated, Times
from kvik_lab.storage.loader import nfs_counters
from kvik_lab.storage.measure import protocol
from tests.lab.gates.scene import finding

SIZE, LOADS = 1 << 20, 4
ALL = float(SIZE * LOADS)
SERVED = "node_mountstats_nfs_total_read_bytes_total"
# Of /proc/self/mountstats of Linux 6: a mount beside ours, and ours by either transport.
RDMA = "\txprt:\trdma 0 1 1 0 5 120 120 0 130 4 0 8 0 0 8388608 0 0 8 0 0 0 0 1 8 0 0\n"
TCP = "\txprt:\ttcp 875 1 1 0 5 120 120 0 130 0 2 8 0\n"
STATS = """device proc mounted on /proc with fstype proc
device 10.9.0.1:/ mounted on /other with fstype nfs4 statvers=1.1
\tbytes:\t1 0 0 0 1 0 1 0
\txprt:\ttcp 1 1 1 0 5 1 1 0 1 0 2 8 0
device 10.9.0.1:/ mounted on /run/it with fstype nfs4 statvers=1.1
\topts:\tro,vers=4.2,proto=PROTO
\tbytes:\t8388608 0 0 0 8388608 0 2048 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
XPRT\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 16 18 1 3072 8390656 10 200 220 0
"""


def role(kind: str = "nfs4", *, after: dict[str, float] | None = None, **reported: Any) -> Role:
    """What was loaded from."""
    counters = {SERVED: ALL, 'kvik_lab_nfs_transport{protocol="tcp"}': 1.0} if after is None else after
    told = {"file_system": kind, "digest": "00ff00ff", **reported}
    return Role(name="storage", kind="storage", start="s1", reported=told, after=counters)


def run(
    name: str = "r1", *, roles: tuple[Role, ...] | None = None, transport: str = "tcp", resident: float = 0.0,
    size: int = SIZE,
) -> RunRecord:  # fmt: skip
    """A run whose loads are all alike."""
    figures = [
        one
        for number in range(LOADS)
        for one in (
            Figure(metric="resident_share", unit="1", value=resident, iteration=number),
            Figure(metric="file_bytes", unit="bytes", value=size, iteration=number),
        )
    ]
    return RunRecord(
        id=name, study="s", key=Key(configuration={}), levels={}, place=Place(order=0, start="s1"),
        times=Times(began=0, ended=1), stated=Stated(mode="storage", transport=transport, file_bytes=SIZE),
        figures=tuple(figures), roles=(role(),) if roles is None else roles,
    )  # fmt: skip


def test_a_run_that_is_right() -> None:
    """Nothing is wrong, and the gates of requests are silent."""
    judged = judge(run(), [run("r2")])
    assert judged.verdict == "valid", judged.findings
    passed = [one.gate for one in judged.findings if one.status == "passed"]
    assert passed == ["V1", "V2", "V6", "V7", "V8", "V9"]


@pytest.mark.parametrize(
    ("record", "gate", "status", "said"),
    [
        (run(resident=0.4), "V1", "invalid", "at most 40.0% of the file was in the page cache"),
        (run(resident=0.001), "V1", "suspect", "0.1%"),
        (run(roles=(role(after={SERVED: ALL / 2}),)), "V2", "invalid", "2,097,152 bytes came from the"),
        (run(roles=(role(after={SERVED: ALL * 1.5}),)), "V2", "suspect", "6,291,456 bytes"),
        (run(roles=(role("ext4", after={"kvik_lab_read_bytes_total": 0.0}),)), "V2", "suspect", "not shown"),
        (run(size=SIZE + 1), "V6", "invalid", "the file has 1,048,577 bytes, and 1,048,576 are stated"),
        (run(transport="rdma"), "V7", "invalid", "the file came by tcp, and rdma is stated"),
        (run(transport="local"), "V7", "invalid", "the file came by tcp, and local is stated"),
        (run(roles=(role("ext4", after={}),)), "V7", "invalid", "the file came by local, and tcp is stated"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(record: RunRecord, gate: str, status: str, said: str) -> None:
    """By the gate that it is a matter of."""
    judged = judge(record)
    found = finding(judged, gate)
    assert (found.status, said in found.what) == (status, True), found
    assert found.remedy


def test_arms_with_different_files() -> None:
    """Whatever their sizes are."""
    other = run("r2", roles=(role(digest="12345678"),))
    said = "the file's digest is 00ff00ff here and 12345678 in run r2"
    assert finding(judge(run(), [other]), "V6").what == said


def test_a_mount_over_rdma_that_sent_its_bytes_within_messages() -> None:
    """The protocol alone does not show that RDMA moved the file."""
    name = 'kvik_lab_nfs_transport{protocol="rdma"}'
    placed = "kvik_lab_nfs_rdma_reply_bytes_total"
    for moved, status in ((ALL, "passed"), (0.0, "invalid")):
        record = run(transport="rdma", roles=(role(after={SERVED: ALL, name: 1.0, placed: moved}),))
        assert finding(judge(record), "V7").status == status


def test_requests_that_were_sent_again() -> None:
    """Are losses of the network, and in the time."""
    record = run(roles=(role(after={SERVED: ALL, "kvik_lab_nfs_retransmissions_total": 3.0}),))
    assert finding(judge(record), "V9").what == "storage: 3 NFS requests that were sent again"


def test_memory_has_no_cache_beside_it() -> None:
    """So its pages being there is right."""
    judged = judge(run(transport="local", resident=1.0, roles=(role("tmpfs", after={}),)))
    assert judged.verdict == "valid", judged.findings


@pytest.mark.parametrize(("line", "name", "placed"), [(RDMA, "rdma", 8388608.0), (TCP, "tcp", None)])
def test_what_the_kernel_counts_of_a_mount(line: str, name: str, placed: float | None) -> None:
    """Of the mount that is asked for, and of no other."""
    found = nfs_counters(STATS.replace("XPRT", line.rstrip("\n") + "\n").replace("PROTO", name), "/run/it")
    assert protocol(found) == name
    assert found[SERVED] == 8388608
    assert found.get("kvik_lab_nfs_rdma_reply_bytes_total") == placed
    assert found["kvik_lab_nfs_retransmissions_total"] == 2
    assert found['node_mountstats_nfs_operations_major_timeouts_total{operation="READ"}'] == 1
    assert nfs_counters(STATS, "/none") == {}
