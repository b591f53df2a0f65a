"""One run of the fault lab: transfers, a fault in their midst, and what must hold then.

Checked is that
- every transfer ends by its deadline and `LATE_END` more, on a side that was running;
- what reports success has all its bytes in place;
- a destination that its owner was told is free stays as its owner fills it, to the end of the run;
- pages of grants come back, or are said to be in quarantine and come back once the fault is over;
- afterwards the two sides transfer again within `RECOVERY`, and neither holds anything of the run.
No bound has the time in it in which the machine stood still (`tests.faults.clock`).
"""

import time
from typing import Any

from tests.faults import sheets
from tests.faults.clock import HANG, Clock
from tests.faults.plan import Plan
from tests.faults.scene import Scene
from tests.faults.sheets import BLANK, REFILL
from tests.faults.side import Handle, Reply

LATE_END = 0.5  # seconds
NOTICED = 2.5  # seconds in which transfers with a peer that is gone have ended
RECOVERY = 5.0  # seconds
SETTLE = 0.15  # seconds in which what is still under way arrives
GONE = ("kill", "stop", "link")  # faults after which nothing is heard any more


class Trial:
    """One run and what was found."""

    def __init__(self, scene: Scene, plan: Plan) -> None:
        self.scene, self.plan = scene, plan
        self.names = [f"{plan.memory}{i}" for i in range(plan.transfers)]
        self.wrong: list[str] = []
        self.grants: list[str] = []
        self.watched: list[str] = []
        self.same: dict[str, bool] = {}
        self.ends: list[Reply] = []
        self.detected: list[float] = []
        self.quarantined = 0
        self.happened = 0.0
        self.clock: Clock

    def run(self) -> dict[str, Any]:
        """All of it; what is worth a line in the report."""
        plan = self.plan
        self.prepare()
        # Not of a side that is killed or stopped, and of none but the one whose transfers are to end.
        self.clock = Clock(*[self.side(name) for name in self.runs & {plan.initiator}])
        if plan.early:
            self.harm()
        began = self.begin()
        if not plan.early:
            self.wait_for_part()
            self.harm()
        self.end_running(began)
        self.scene.heal(plan)
        over = Clock(self.side("here"), self.side("there"))
        self.end_rest(over)
        recovery = self.recover(over)
        time.sleep(SETTLE)
        for name in self.watched:
            late = sheets.late(self.scene.view(plan.target, name))
            if late:
                self.wrong.append(f"{late} bytes came into free memory")
        self.check_nothing_held()
        codes = [end["code"] or "ok" for end in self.ends]
        return {
            "fault": plan.fault, "codes": codes, "detected": self.detected, "recovery": recovery,
            "quarantined": self.quarantined, "wrong": self.wrong, "counts": self.counts, "say": plan.say(),
        }  # fmt: skip

    def harm(self) -> None:
        """Make it happen; the clock runs from when it is there, or from the start of what takes time."""
        before = time.monotonic()
        self.scene.harm(self.plan, self.grants)
        self.happened = before if self.plan.fault in ("pause", "unmap") else time.monotonic()

    # ---- before the fault ----

    def side(self, name: str) -> Handle:
        """A side's handle."""
        return self.scene.side(name)

    def fill(self, side: str, name: str, what: str) -> None:
        """A side fills its memory."""
        if name.startswith("a"):
            self.side(side).ask("fill", name=name, what=what, seed=1)
        else:
            values: dict[str, Any] = {"old": self.scene.content, "blank": BLANK, "refill": REFILL}
            self.scene.view(side, name)[:] = values[what]

    def prepare(self) -> None:
        """Fill the memory on both sides."""
        for name in self.names:
            self.fill(self.plan.source, name, "old")
            self.fill(self.plan.target, name, "blank")

    def begin(self) -> float:
        """Grant and begin; when the last transfer began."""
        plan, began = self.plan, 0.0
        page = {"page_bytes": plan.page_bytes}
        for name in self.names:
            said = self.side(plan.owner).ask("grant", name=name, right=plan.op, **page)
            self.grants.append(said["grant"])
            began = self.side(plan.initiator).ask(
                "begin", name=name, ticket=said["ticket"], op=plan.op, order=plan.order, **page,
                transport=plan.transport, deadline=plan.deadline, verify=plan.verify,
            )["began"]  # fmt: skip
        return began

    def wait_for_part(self) -> None:
        """Wait until about so much of the first transfer is in place, but not for long."""
        plan = self.plan
        view = self.scene.view(plan.target, self.names[0])
        rows = sheets.shuffled(view.size // plan.page_bytes, plan.order if plan.op == "read" else 0)
        probe = int(rows[int(len(rows) * plan.part)]) * plan.page_bytes
        end = time.monotonic() + min(0.6, plan.deadline / 2)
        while view[probe] == BLANK and time.monotonic() < end:
            pass

    # ---- after it ----

    @property
    def runs(self) -> set[str]:
        """The sides that run now."""
        return {"here"} if self.plan.fault in ("kill", "stop") else {"here", "there"}

    def end_running(self, began: float) -> None:
        """What ends while the fault lasts: transfers of a side that runs, and grants of such an owner."""
        plan = self.plan
        if plan.initiator in self.runs:
            self.hear_ends(self.clock, began + plan.deadline + LATE_END, running=True)
        else:
            time.sleep(max(0.0, began + plan.deadline - time.monotonic()))
        if plan.target == plan.initiator:
            self.use_again_after_read()
        if plan.owner in self.runs:
            self.take_back()

    def end_rest(self, over: Clock) -> None:
        """What could end only after the fault was over."""
        plan = self.plan
        if plan.fault == "stop" and plan.initiator == "there":
            self.hear_ends(over, over.began + LATE_END + 2.0, running=False)
            if plan.target == plan.initiator:
                self.use_again_after_read()
        elif plan.fault == "stop":
            self.take_back()

    def hear_ends(self, clock: Clock, latest: float, *, running: bool) -> None:
        """The ends of the transfers, of a side that was `running`, and whether they are what they should
        be."""
        said = self.side(self.plan.initiator).ask("ends", timeout=HANG, within=HANG + 30.0)["ends"]
        stood = clock.stood()
        for name, end in zip(self.names, said, strict=True):
            if end is None:
                self.wrong.append(f"a transfer had not ended {HANG:.0f} s later")
                self.ends.append({"code": "never"})
                continue
            self.ends.append(end)
            if end["code"] == "checksum_mismatch" and self.plan.fault != "flip":
                self.wrong.append(f"no byte was changed, but: {end['text']}")
            if end["at"] > latest + stood:
                self.wrong.append(f"a transfer ended {end['at'] - latest - stood:.2f} s too late: {end}")
            # What was written is looked at before its owner uses the pages again, which may be before this.
            if not end["code"] and not self.same.get(name, self.scene.same(self.plan, name)):
                self.wrong.append(f"success, but the bytes of {name} are others")
            elif end["code"] and running and end["at"] >= self.happened:
                self.note_detection(max(0.0, end["at"] - self.happened - stood))

    def note_detection(self, seconds: float) -> None:
        """How long after the fault something had ended."""
        self.detected.append(seconds)
        if self.plan.fault in GONE and seconds > NOTICED:
            self.wrong.append(f"it took {seconds:.2f} s to notice")

    def use_again_after_read(self) -> None:
        """The reader's transfers are over: its memory is its own."""
        for name, end in zip(self.names, self.ends, strict=False):
            if end["code"] != "never":
                self.fill(self.plan.target, name, "refill")
                self.watched.append(name)

    def take_back(self) -> None:
        """The owner revokes its grants, and uses what it was written into again."""
        owner = self.side(self.plan.owner)
        for name, grant in zip(self.names, list(self.grants), strict=True):
            if self.plan.fault == "unmap" and self.plan.rules["revoked"] and self.plan.owner == "there":
                continue
            said = owner.ask("revoke", grant=grant, timeout=1.0)
            if said["quarantined"]:
                self.quarantined += 1
                clock = Clock(owner)
                free = owner.ask("back", grant=grant, timeout=HANG, within=HANG + 30.0)["free"]
                if not free or clock.seconds() > NOTICED:
                    self.wrong.append(f"pages did not come back: {said['quarantined']}")
                    continue
            if self.plan.target == self.plan.owner:
                self.same[name] = self.scene.same(self.plan, name)
                self.fill(self.plan.target, name, "refill")
                self.watched.append(name)

    def recover(self, over: Clock) -> float:
        """Seconds from the fault's end until the two sides have moved something again."""
        plan = self.plan
        owner, initiator = self.side(plan.owner), self.side(plan.initiator)
        grant = owner.ask("grant", name="later", page_bytes=4096, right=plan.op)
        last: Reply = {}
        while (left := RECOVERY - over.seconds()) > 0:
            initiator.ask(
                "begin", name="later", ticket=grant["ticket"], op=plan.op, page_bytes=4096,
                transport=plan.transport, deadline=max(0.1, left),
            )  # fmt: skip
            ends = initiator.ask("ends", timeout=HANG, within=HANG + 30.0)["ends"]
            last = ends[0] or {"code": "never", "text": ""}
            if not last["code"]:
                break
        owner.ask("revoke", grant=grant["grant"], timeout=1.0)
        if not last.get("code"):
            return max(0.0, float(last["at"]) - over.began - over.stood())
        self.wrong.append(f"no transfer {RECOVERY} s after the fault was over: {last}")
        return RECOVERY

    def check_nothing_held(self) -> None:
        """Neither side holds a transfer, a grant or a page of this run."""
        self.counts: dict[str, Reply] = {}

        clock = Clock(self.side("here"), self.side("there"))
        while True:
            late = clock.seconds() > NOTICED
            self.counts = self.scene.counts()
            held = {name: _held(count) for name, count in self.counts.items()}
            if not any(held.values()):
                return
            if late:
                self.wrong.append(f"still held: {held}")
                return
            time.sleep(0.01)  # nobody is told of what a count becomes


def _held(count: Reply) -> dict[str, int]:
    stats = count["stats"]
    kept = {name: stats[name] for name in ("transfers_open", "grants_live")} | {"pages": count["quarantined"]}
    return {name: value for name, value in kept.items() if value}
