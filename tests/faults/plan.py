"""What a run of the fault lab does: all of it drawn from the seed and the run's number."""

import random
from dataclasses import dataclass
from typing import Any

PAGES = (512, 4096, 65536)  # bytes
NBYTES = 4 << 20  # of each of a run's transfers
# Faults of the connection, which the proxy makes; of a process; of the link between two hosts; of memory.
OF_THE_WAY = ("delay", "throttle", "truncate", "flip", "reset", "close", "stall", "silent")
OF_A_PROCESS = ("kill", "stop", "pause")
OF_THE_LINK = ("link",)
OF_MEMORY = ("unmap",)
FAULTS = (*OF_THE_WAY, *OF_A_PROCESS, *OF_MEMORY, *OF_THE_LINK)


@dataclass(frozen=True)
class Plan:
    """One run."""

    number: int
    fault: str
    transport: str  # tcp, local
    memory: str  # m: the caller's, a: allocated by kvik
    op: str
    initiator: str  # here, there: the fault is there's
    transfers: int
    page_bytes: int
    order: int
    early: bool  # it happens before the transfers begin
    part: float  # of the first transfer's bytes that are in place when it happens, else
    verify: str
    deadline: float
    rules: dict[str, Any]

    @property
    def owner(self) -> str:
        """The side that grants."""
        return "there" if self.initiator == "here" else "here"

    @property
    def source(self) -> str:
        """The side that the bytes come from."""
        return self.owner if self.op == "read" else self.initiator

    @property
    def target(self) -> str:
        """The side that they go to."""
        return self.initiator if self.op == "read" else self.owner

    def say(self) -> str:
        """In words."""
        how = f"{self.op} over {self.transport} of {self.transfers} x 4 MiB in pages of {self.page_bytes} B"
        return f"run {self.number}: {self.fault} {self.rules or ''}, {how}, begun by {self.initiator}"


def draw(seed: int, number: int, faults: tuple[str, ...]) -> Plan:
    """The plan of a run."""
    dice = random.Random(f"{seed}/{number}")
    fault = faults[number % len(faults)]
    transport, memory = dice.choice(("tcp", "local")), dice.choice("ma")
    op, initiator = dice.choice(("read", "write")), dice.choice(("here", "there"))
    if fault == "unmap":  # under a copy through the kernel, from the harmed side's memory
        transport, memory = "local", "m"
        initiator = "here" if op == "read" else "there"
    if fault == "link":
        transport = "tcp"
    return Plan(
        number, fault, transport, memory, op, initiator,
        transfers=dice.randint(1, 3), page_bytes=dice.choice(PAGES), order=dice.randrange(1, 1 << 30),
        early=fault in OF_THE_WAY and dice.random() < 0.25, part=dice.uniform(0.0, 0.7),
        verify=dice.choice(("auto", "full")), deadline=dice.uniform(0.8, 4.0), rules=_rules(fault, dice),
    )  # fmt: skip


def _rules(fault: str, dice: random.Random) -> dict[str, Any]:
    which = dice.choice(("all", "control", "data"))
    if fault == "delay":
        return {"which": which, "delay": dice.uniform(0.02, 0.5)}
    if fault == "throttle":
        return {"which": which, "rate": dice.uniform(0.5, 8.0) * 2**20}
    if fault == "truncate":
        return {"which": which, "cut_after": dice.randrange(1 << dice.randint(4, 20))}
    if fault == "flip":
        return {"which": which, "flip": dice.randint(1, 3)}
    if fault in ("stall", "silent"):
        return {"which": which, "stalled" if fault == "stall" else "silent": True}
    if fault in ("reset", "close"):
        return {"which": which, "number": dice.choice((-1, dice.randrange(8)))}
    if fault == "pause":
        return {"seconds": dice.uniform(0.1, 1.0)}
    if fault == "unmap":
        return {"revoked": dice.random() < 0.5}
    return {}
