"""All findings of a machine, the dearest first."""

from __future__ import annotations

from kvik.doctor.cost import Traffic
from kvik.doctor.model import Finding, Machine
from kvik.doctor.rules_container import container_findings
from kvik.doctor.rules_host import host_findings
from kvik.doctor.rules_libraries import library_findings
from kvik.doctor.rules_pcie import pcie_findings

_UNKNOWN_PERCENT = 1.0  # What a finding without a figure counts for among the others.


def findings(machine: Machine, traffic: Traffic | None = None) -> list[Finding]:
    """What is wrong with a machine for this traffic: what makes transfers fail first, then by cost.

    A healthy machine has none.
    """
    traffic = traffic or Traffic()
    wanted = {
        name
        for name, asked in (("kv", traffic.kv), ("collectives", traffic.collectives), ("load", traffic.load))
        if asked
    }
    found = [
        *pcie_findings(machine, traffic),
        *host_findings(machine, traffic),
        *library_findings(machine.libraries, machine.nics),
        *container_findings(machine),
    ]
    matter = [finding for finding in found if wanted & set(finding.assumes.split(","))]
    return sorted(matter, key=lambda finding: (-_weight(finding), finding.code, finding.device))


def _weight(finding: Finding) -> float:
    percent = _UNKNOWN_PERCENT if finding.cost.percent is None else finding.cost.percent
    return percent + (1000.0 if finding.cost.fails else 0.0)
