"""The lab's study of a model's file, over NFS by TCP and by soft-RoCE: short, and what its gates see.

`python -m tests.rdma.storage --out FOLDER` runs it whole.
"""

from pathlib import Path

import pytest

from kvik_lab.records import RunRecord, read
from kvik_lab.records.cli import rows
from tests.rdma.guest import Guest
from tests.rdma.initramfs import Kernel
from tests.rdma.storage import READY, here, run_study

pytestmark = pytest.mark.timeout(1200)
MIB = 1 << 20
SIZE = 8  # MiB
# Of the ready study, what makes it short: two arms, each mounted once.
SHORT = {
    "file_bytes: 256 MiB": f"file_bytes: {SIZE} MiB",
    "levels: [nfs-tcp, nfs-rdma, disk, memory]": "levels: [nfs-tcp, nfs-rdma]",
    "starts: 6, blocks: 6": "starts: 1, blocks: 1",
    "loads: 8": "loads: 2",
}


def short() -> str:
    """The ready study, made short."""
    lines = here(READY.read_text(encoding="utf-8")).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.lstrip().startswith(("disk:", "memory:")))
    for before, after in SHORT.items():
        assert before in text, f"the ready study has no {before!r}"
        text = text.replace(before, after)
    return text


def gate(record: RunRecord, name: str) -> str:
    """What a gate says of a run, with its status."""
    return next(f"{one.status}: {one.what}" for one in record.findings if one.gate == name)


def test_a_file_over_nfs_by_tcp_and_by_rdma(guest: Guest, kernel: Kernel, tmp_path: Path) -> None:
    """Cold, whole, over the transport that is stated, by the kernel's own count; and marked as emulated."""
    run_study(guest, kernel, short(), tmp_path, print)
    found = {str(one.levels["storage"]): one for one in read([tmp_path / "runs.jsonl"])}
    assert found.keys() == {"nfs-tcp", "nfs-rdma"}
    loaded = 3 * SIZE * MIB  # with the warm-up
    for name, record in found.items():
        assert record.outcome == "completed", f"{name}: {record.error}"
        assert record.verdict in ("valid", "suspect"), f"{name}: {record.findings}"
        assert gate(record, "V1").startswith("passed: before a load at most 0.0%"), name
        assert gate(record, "V2").startswith(f"passed: {loaded:,} bytes came from the server"), name
        assert gate(record, "V6").startswith("passed: "), name
    assert gate(found["nfs-tcp"], "V7") == "passed: the file came by tcp"
    placed = gate(found["nfs-rdma"], "V7")  # a few hundred bytes more are of folders
    assert placed.startswith("passed: "), placed
    assert placed.endswith(f" of {loaded:,} bytes were placed by RDMA"), placed
    table = rows(list(found.values()), "load_time")
    assert len(table) == 4
    assert set(table["emulated"]) == {"a processor in software"}
