"""What the doctor finds on each recorded machine: nothing where it is healthy, else its one fault."""

from __future__ import annotations

import pytest

from kvik.doctor import examine, findings
from kvik.doctor.tree import RecordedTree
from tests.python.doctor.machines import EXPECTED, recorded


@pytest.mark.parametrize(("name", "fault", "code"), EXPECTED)
def test_the_fault_is_named_first_and_nothing_else(name: str, fault: str | None, code: str | None) -> None:
    codes = [finding.code for finding in findings(examine(RecordedTree(recorded(name, fault))))]
    assert (codes[0] if codes else None) == code
    if not name.startswith("desktop"):  # the articles' PCs are never without a finding
        assert set(codes) <= {code}


@pytest.mark.parametrize(
    ("lost", "packets", "found"), [(9, 10_000_000, 0), (11, 10_000_000, 1), (11, None, 0)]
)
def test_what_an_efa_lost_is_a_part_of_its_packets(lost: int, packets: int | None, found: int) -> None:
    document = recorded("p5.48xlarge")
    folder = "/infiniband/rdmap19s0/ports/1/hw_counters"
    for path in [path for path in document["files"] if f"{folder}/" in path]:
        if path.endswith("/retrans_timeout_events"):
            document["files"][path] = str(lost)
        elif path.endswith("/rx_pkts") and packets is None:
            del document["files"][path]
    assert any(path.endswith(f"{folder}/retrans_timeout_events") for path in document["files"])
    said = findings(examine(RecordedTree(document)))
    assert [finding.code for finding in said] == ["port-errors"] * found
    assert not any(word in finding.advice for finding in said for word in ("Change the cable", "RoCE"))


def test_a_driver_that_was_not_read_is_not_said_to_be_closed() -> None:
    document = recorded("two-sockets-8x8", "no-peer-memory")
    assert [finding.code for finding in findings(examine(RecordedTree(document)))] == ["no-peer-memory"]
    del document["files"]["/proc/driver/nvidia/version"]
    machine = examine(RecordedTree(document))
    assert findings(machine) == []
    assert "/proc/driver/nvidia/version" in {missing.path for missing in machine.unread}
