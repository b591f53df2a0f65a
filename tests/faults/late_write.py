"""Late writes: one side of a 32 MiB transfer stops in the midst of it, the other one goes on without it.

    python -m tests.faults.late_write --transport tcp --runs 200

The side that runs ends the transfer by its deadline, takes its pages as its own again and uses them: it fills
them (`refill`), or closes the region and puts other memory at the address (`remap`). Then the stopped side is
resumed, or killed (`kill`). Counted are
- late: bytes that came into pages after their owner was told that they are free; none may;
- leaked: bytes that left pages after their owner was told that they are free. Over TCP none may pass the
  wire. Within the host the other process copies out of pages that it maps, and throws away what it copied
  when it sees that the grant has ended: none may be in a transfer that reports success; what was thrown away
  is a column.

Over NICs (`--transport nics`; `KVIK_TEST_NICS` says which, `libfabric:tcp` if it does not) a stopped
peer's NIC may go on, so an owner's pages first go into quarantine: they are its own when it has cut the path,
at most BACK seconds after the revocation, and only then are they used again. By which reclaim step
memory came back that was in use is counted by the engine (`kvik_reclaims_total`): its own threads and NICs
let go, the peer answered, or the path was cut.

No bound has the time in it in which the machine stood still (`tests.faults.clock`).

With `--beside 10` as many other engines read from the side that runs all the while: none of their reads may
fail, and none of their sessions may be lost, unless the machine stood still for a second in that run.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.busy import Watch
from tests.faults import sheets
from tests.faults.beside import Company
from tests.faults.clock import HANG, Clock
from tests.faults.pair import Pair
from tests.faults.processes import Job, Worker, run
from tests.faults.sheets import BLANK, REFILL, Sheet
from tests.faults.side import METHODS
from tests.faults.tables import print_table
from tests.python.peers import random_seed, stop, until

NBYTES = 32 << 20
PAGE = 1024  # small, and shuffled, so that copies within the host take their time
RATE = 96 << 20  # bytes a second over TCP: a transfer takes a third of a second
DEADLINE = {"tcp": 0.7, "local": 0.5, "memfd": 0.5, "nics": 0.7}  # seconds
LATE_END = 1.0  # seconds after its deadline by which a transfer has ended, and in which a grant is taken back
BACK = 4.0  # seconds: a silent peer is dead after 2, and then its path is cut
SETTLE = 0.1  # seconds in which what is still under way arrives
STILL = 1.0  # seconds that a machine may stand still and who lives is heard in time: half of a death
INSIDE = 0.75  # of the runs, for a table to count
AGAIN = 3  # times that a short table is made longer while none of its stops fell inside the transfer
VARIANTS = ("refill", "remap", "kill")
# memfd: local, with memory that kvik allocated and peers map
WAYS = ("tcp", "local", "memfd", "nics")
NICS = os.environ.get("KVIK_TEST_NICS") or "libfabric:tcp"


class Case:
    """One row of the tables, with the pair that its runs share."""

    def __init__(self, transport: str, op: str, stopped: str, variant: str, beside: int) -> None:
        self.transport, self.op, self.stopped, self.variant = transport, op, stopped, variant
        self.initiator, self.owner = ("there", "here") if stopped == "initiator" else ("here", "there")
        self.source, self.target = (
            (self.owner, self.initiator) if op == "read" else (self.initiator, self.owner)
        )
        self.wanted = transport if transport in ("tcp", "nics") else "local"
        more: dict[str, Any] = {"nics": NICS} if transport == "nics" else {}
        self.pair = Pair(self.wanted, io_threads=1, **more)
        self.forward = self.pair.forwards[self.owner]
        if transport == "tcp":
            self.pair.proxy.set(self.forward, rate=RATE)
        self.content, self.fresh = sheets.old(NBYTES, 1), sheets.new(NBYTES, 2)
        self.sheets: dict[str, Sheet] = {}
        for side in ("here", "there"):
            self.hold(side)
        here = self.pair.sides["here"]
        self.company = Company(beside, here, self.wanted, more.get("nics"))
        self.reclaims = here.ask("counts")["reclaims"]

    def hold(self, side: str) -> None:
        """Give a side memory of its own."""
        if side in self.sheets:
            self.sheets[side].close()
        handle = self.pair.sides[side]
        if self.transport == "memfd":
            said = handle.ask("hold", name="m", nbytes=NBYTES)
            self.sheets[side] = Sheet.allocated_at(said["pid"], said["address"], NBYTES)
        else:
            self.sheets[side] = Sheet.make(NBYTES)
            handle.ask("hold", name="m", nbytes=NBYTES, path=self.sheets[side].path)

    def put(self, side: str, what: str) -> None:
        """Fill a side's memory."""
        if self.transport == "memfd":  # which only its process can write
            self.pair.sides[side].ask("fill", name="m", what=what, seed=2 if what == "new" else 1)
        else:
            fills: dict[str, Any] = {"old": self.content, "new": self.fresh, "blank": BLANK, "refill": REFILL}
            self.sheets[side].view[:] = fills[what]

    def run(self, number: int, seed: int) -> Job:
        """One stop."""
        order, watch = number + 1, Watch()
        dice = random.Random(f"{seed}/{self.transport}/{self.op}/{self.stopped}/{self.variant}/{number}")
        self.put(self.source, "old")
        self.put(self.target, "blank")
        self.pair.proxy.marks(self.forward)
        clock = Clock(self.pair.sides["here"])
        grant, began = self.begin(order)
        # Where the running side copies, it goes on until the other one stands still.
        latest = 0.15 if self.target == "here" and self.wanted == "local" else 0.7
        inside = self.stop_within(order, dice.uniform(0.03, latest))
        ended = self.end_here(grant, began, clock)
        if self.variant == "remap":
            self.use_again()
        else:
            self.put("here", "new" if self.source == "here" else "refill")
        other = self.resume()
        counted = {**self.count(order, ended["code"], other), **self.climbed(), **self.company.news()}
        self.tidy(grant)
        return {**ended, **inside, "other": other, "still": watch.longest(), **counted}

    def begin(self, order: int) -> tuple[str, float]:
        """Begin the transfer; its grant, and when it began."""
        owner, initiator = self.pair.sides[self.owner], self.pair.sides[self.initiator]
        grant = owner.ask("grant", name="m", page_bytes=PAGE, right=self.op)
        options: dict[str, Any] = {
            "name": "m", "ticket": grant["ticket"], "op": self.op, "page_bytes": PAGE, "order": order,
            "transport": self.wanted, "verify": "full", "deadline": DEADLINE[self.transport],
        }  # fmt: skip
        return grant["grant"], initiator.ask("begin", **options)["began"]

    def stop_within(self, order: int, part: float) -> Job:
        """Stop one side when about this part of the bytes is in place."""
        view = self.sheets[self.target].view
        # The stream's order, as it lies in the target.
        rows = sheets.shuffled(NBYTES // PAGE, order if self.op == "read" else 0)
        probe = int(rows[int(len(rows) * part)]) * PAGE
        end = time.monotonic() + DEADLINE[self.transport]
        while view[probe] == BLANK and time.monotonic() < end:
            pass
        stop(self.pair.sides["there"].pid)
        placed = sheets.placed(view)
        return {"placed": placed, "inside": 0 < placed < NBYTES}

    def end_here(self, grant: str, began: float, clock: Clock) -> Job:
        """What the running side does: its transfer ends by its deadline, or it takes its pages back then."""
        here = self.pair.sides["here"]
        due = began + DEADLINE[self.transport]
        if self.initiator == "here":
            (said,) = here.ask("ends", timeout=HANG, within=HANG + 30.0)["ends"]
            if said is None:
                return {"code": "never", "over": HANG, "quarantined": 0, "back": 0.0}
            over = said["at"] - due - clock.stood()
            return {"code": said["code"] or "ok", "over": over, "quarantined": 0, "back": 0.0}
        time.sleep(max(0.0, due - time.monotonic()))
        # Of NICs, pages that are not free by then are in quarantine; the answer takes a moment, too.
        clock = Clock(here)
        timeout = LATE_END / 2 if self.transport == "nics" else HANG
        said = here.ask("revoke", grant=grant, timeout=timeout, within=HANG + 30.0)
        told = {
            "over": said["took"] - clock.stood(),
            "quarantined": int(bool(said["quarantined"])),
            "back": 0.0,
        }
        if not said["quarantined"]:
            return {"code": "revoked", **told}
        if self.transport == "nics":
            free = here.ask("back", grant=grant, timeout=HANG, within=HANG + 30.0)["free"]
            told["back"] = clock.seconds() if free else HANG
        return {"code": "PagesQuarantined", **told}

    def use_again(self) -> None:
        """The running side closes its region, and other memory comes to the address."""
        side = "here"
        self.sheets[side].close()
        self.sheets[side] = Sheet.make(NBYTES)
        what = "new" if self.source == side else "refill"
        self.pair.sides[side].ask("use_again", name="m", path=self.sheets[side].path, what=what, seed=2)

    def resume(self) -> str:
        """Let the stopped side go on, or kill it; how its own transfer ended."""
        there = self.pair.sides["there"]
        if self.variant == "kill":
            os.kill(there.pid, signal.SIGKILL)
            time.sleep(SETTLE)
            return "killed"
        os.kill(there.pid, signal.SIGCONT)
        other = ""
        if self.initiator == "there":
            (said,) = there.ask("ends", timeout=HANG, within=HANG + 30.0)["ends"]
            other = "never" if said is None else said["code"] or "ok"
        else:
            there.ask("counts")
        time.sleep(SETTLE)
        return other

    def count(self, order: int, code: str, other: str) -> Job:
        """Bytes that came or left too late."""
        view = self.sheets[self.target].view
        ok = "ok" in (code, other)
        counted = {"late": 0, "used": 0, "thrown": 0, "marks": 0, "wrong": 0}
        if self.target == "here":
            counted["late"] = sheets.late(view)
            return counted
        leaked = sheets.leaked(view)
        counted["used" if ok else "thrown"] = leaked
        counted["marks"] = self.pair.proxy.marks(self.forward)
        if ok and not np.array_equal(view, sheets.expected(self.content, PAGE, self.op, order)):
            counted["wrong"] = 1
        return counted

    def climbed(self) -> Job:
        """By which reclaim steps the running side's memory came back in this run."""
        reclaims = self.pair.sides["here"].ask("counts")["reclaims"]
        more = {method: count - self.reclaims[method] for method, count in reclaims.items()}
        self.reclaims = reclaims
        return {"reclaims": more}

    def tidy(self, grant: str) -> None:
        """Ready for the next run: both sides run and have memory, and the grant is over."""
        if self.variant == "kill":
            self.pair.start_again("there")
            self.hold("there")
        if self.variant == "remap":
            self.pair.sides["here"].ask("forget", name="m")
            self.hold("here")
        if self.owner == "there" and self.variant != "kill":
            until(lambda: not self.pair.sides["there"].ask("revoke", grant=grant, timeout=5)["quarantined"])

    def close(self) -> None:
        """End all engines."""
        self.company.close()
        self.pair.close()
        for sheet in self.sheets.values():
            sheet.close()


@contextlib.contextmanager
def worker(seed: int, beside: int) -> Iterator[Worker]:
    """Does runs; keeps the pair of the case that it was last asked for."""
    kept: dict[tuple[str, ...], Case] = {}

    def work(job: Job) -> Job:
        if "last" in job:
            return job
        key = tuple(job["case"])
        if key not in kept:
            while kept:
                kept.popitem()[1].close()
            transport, op, stopped, variant = key
            kept[key] = Case(transport, op, stopped, variant, beside)
        return {**job, **kept[key].run(job["number"], seed)}

    try:
        yield work
    finally:
        for case in kept.values():
            case.close()


def wrong(case: tuple[str, ...], results: list[Job]) -> list[str]:
    """What a table's runs did that must not be, in words."""
    found = []
    for result in results:
        names = ("late", "used", "wrong", *(() if result.get("still", 0.0) > STILL else ("hurt",)))
        bad = {name: result[name] for name in names if result.get(name)}
        if case[0] in ("tcp", "nics") and (result.get("marks") or result.get("thrown")):
            bad |= {"leaked": result["thrown"], "marks": result["marks"]}
        if result.get("back", 0) > BACK:
            bad |= {"back": result["back"]}
        if result.get("over", 0) > LATE_END or "broken" in result:
            bad |= {"over": result.get("over"), "broken": result.get("broken")}
        if bad:
            found.append(f"{' '.join(case)} run {result['number']}: {bad}")
    inside = sum(result.get("inside", False) for result in results)
    # Of a few runs nothing can be said but that it happens at all.
    if inside < (INSIDE * len(results) if len(results) >= 20 else 1):
        found.append(f"{' '.join(case)}: only {inside} of {len(results)} stops fell inside the transfer")
    return found


def row(case: tuple[str, ...], results: list[Job]) -> list[object]:
    """A line of the table."""
    good = [result for result in results if "broken" not in result]
    counted = ("late", "used", "thrown", "marks", "wrong", "beside", "hurt")
    total = {key: sum(result[key] for result in good) for key in counted}
    placed = sorted(result["placed"] / 2**20 for result in good if result["inside"]) or [0.0]
    ends: dict[str, int] = {}
    for result in good:
        text = result["code"] + (f"/{result['other']}" if result["other"] else "")
        ends[text] = ends.get(text, 0) + 1
    words = ", ".join(f"{text} {count}" for text, count in sorted(ends.items()))
    spread = f"{placed[0]:.1f}/{statistics.median(placed):.1f}/{placed[-1]:.1f}"
    over = max((result["over"] for result in good), default=0.0)
    quarantined = sum(result["quarantined"] for result in good)
    inside = sum(result["inside"] for result in good)
    back = max((result["back"] for result in good), default=0.0)
    reclaims = [sum(result["reclaims"][method] for result in good) for method in METHODS]
    return [*case, len(results), inside, spread, over, quarantined, back, *reclaims, *total.values(), words]


HEADS = (
    "transport", "op", "stopped", "then", "runs", "inside", "MiB at the stop", "s over", "quarantined",
    "s until back", *(f"by {method}" for method in METHODS), "late", "leaked", "thrown away", "on the wire",
    "wrong", "reads beside", "hurt", "ends (here/there)",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the tables; 0 if nothing came or left too late."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", choices=WAYS, action="append")
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--runs", type=int, default=200, help="runs of each table")
    parser.add_argument("--processes", type=int, default=1, help="tables at the same time")
    parser.add_argument("--beside", type=int, default=0, help="live engines that read from the running side")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random_seed() if options.seed is None else options.seed
    cases = [
        (transport, op, stopped, variant)
        for transport in options.transport or WAYS
        for variant in options.variant or VARIANTS
        for stopped in ("initiator", "owner")
        for op in ("write", "read")
        if (transport, variant) != ("memfd", "remap")  # kvik gives that memory back itself
    ]
    results: dict[tuple[str, ...], list[Any]] = {case: [] for case in cases}
    shared = {"seed": seed, "beside": options.beside}
    for first in range(0, (1 + AGAIN) * options.runs, options.runs):
        # A stop comes too late where the stopping side had to wait for a processor: of a few all may.
        short = [case for case, found in results.items() if not any(one.get("inside") for one in found)]
        jobs = [{"case": case, "number": first + at} for case in short for at in range(options.runs)]
        if not jobs:
            break
        for result in run("tests.faults.late_write.worker", jobs, options.processes, 300.0, **shared):
            if "case" in result:
                results[tuple(result["case"])].append(result)
    print_table(HEADS, [row(case, found) for case, found in results.items()])
    bad = [text for case, found in results.items() for text in wrong(case, found)]
    print(*bad, sep="\n")
    print(f"seed {seed}: violations {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
