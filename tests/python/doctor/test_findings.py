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
