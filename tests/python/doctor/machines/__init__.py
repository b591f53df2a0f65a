"""Recorded machines that are not here, and what `kvik doctor` must say about them.

`MACHINES` has every healthy machine and every state of the articles' PCs by name; `recorded(name, fault)`
makes the recording, with one fault planted or none. `EXPECTED` has (machine, fault, code of the first
finding); a code of None says that there is no finding at all.
"""

from __future__ import annotations

from typing import Any

from tests.python.doctor.machines.desktops import (
    BEFORE,
    DESKTOPS,
    EXCHANGED,
    OCULINK,
    workstation,
)
from tests.python.doctor.machines.faults import FAULTS, fitting, planted
from tests.python.doctor.machines.recording import Machine, record
from tests.python.doctor.machines.servers import HEALTHY as SERVERS

HEALTHY = [workstation("roce-pair-left"), workstation("roce-pair-right"), *SERVERS]
MACHINES: dict[str, Machine] = {machine.name: machine for machine in (*HEALTHY, *DESKTOPS)}

# The GPU of each state but the last has four lanes of its sixteen, which is a finding of its own.
STATES = {BEFORE: "gpu-behind-chipset", OCULINK: "gpu-link-narrow", EXCHANGED: "nic-link-narrow"}

EXPECTED: list[tuple[str, str | None, str | None]] = [
    *((machine.name, None, None) for machine in HEALTHY),
    *((machine.name, fault, FAULTS[fault][0]) for machine in HEALTHY for fault in fitting(machine)),
    *(
        (machine.name, None, code)
        for machine in DESKTOPS
        for state, code in STATES.items()
        if machine.name.endswith(state)
    ),
]


def recorded(name: str, fault: str | None = None) -> dict[str, Any]:
    """The recorded machine (`kvik-machine/1`): a healthy one, or with one fault planted."""
    machine = MACHINES[name]
    return record(machine if fault is None else planted(machine, fault))
