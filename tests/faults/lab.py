"""The fault lab: transfers between real processes, with a fault in their midst, again and again.

    python -m tests.faults.lab --runs 500 --processes 2
    python -m tests.faults.lab --seed S --only N        one run of an earlier lab, again

Every run is drawn from the seed and its number. Printed at the end: for each fault, the time from it until
what it broke had ended on the side that ran, the time from its end until the two sides had moved something
again, pages in quarantine, and violations of what `tests.faults.trial` checks. The exit status is 0 if there
are none.
"""

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvik.roles.hosts import CannotError
from tests.faults.plan import FAULTS, OF_THE_LINK, draw
from tests.faults.processes import Job, Worker, run
from tests.faults.scene import Scene, hosts
from tests.faults.tables import print_table, spread
from tests.faults.trial import Trial
from tests.python.peers import random_seed

ENOUGH = 24  # runs of one process after which it is asked whether it leaks
MORE_FDS, MORE_THREADS, MORE_HELD = 8, 2, 1 << 20  # what may be more at the end than at the start


class Leaks:
    """What a process that lives through all of its runs held after each of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def note(self, counts: dict[str, Any]) -> None:
        """After a run."""
        here = counts["here"]
        self.seen.append((here["fds"], here["threads"], here["stats"]["memory_held_bytes"]))

    def found(self) -> list[str]:
        """What grew: the least that was held in the first and in the last third of the runs."""
        if len(self.seen) < ENOUGH:
            return []
        third = len(self.seen) // 3
        columns = list(zip(*self.seen, strict=True))
        names = ("descriptors", "threads", "bytes held")
        found = []
        for name, column, more in zip(names, columns, (MORE_FDS, MORE_THREADS, MORE_HELD), strict=True):
            first, last = min(column[:third]), min(column[-third:])
            if last > first + more:
                found.append(f"{name}: from {first} to {last} over {len(column)} runs")
        return found


@contextlib.contextmanager
def worker(seed: int, faults: list[str]) -> Iterator[Worker]:
    """Does runs one after the other, all of them with the same process on the side that stays whole."""
    with contextlib.ExitStack() as stack:
        scenes: dict[bool, Scene] = {}
        leaks: dict[bool, Leaks] = {False: Leaks(), True: Leaks()}

        def scene(of_hosts: bool) -> Scene:
            if of_hosts not in scenes:
                if of_hosts:
                    scenes[of_hosts] = stack.enter_context(hosts())
                else:
                    scenes[of_hosts] = Scene()
                    stack.callback(scenes[of_hosts].close)
            return scenes[of_hosts]

        def work(job: Job) -> Job:
            if "last" in job:
                return {"leaks": [text for kind in leaks.values() for text in kind.found()]}
            plan = draw(seed, job["number"], tuple(faults))
            of_hosts = plan.fault in OF_THE_LINK
            try:
                place = scene(of_hosts)
            except CannotError as cannot:
                return {**job, "fault": plan.fault, "skipped": str(cannot)}
            try:
                result = {**job, **Trial(place, plan).run()}
            except Exception as error:
                raise RuntimeError(f"{plan.say()}: {error}") from error
            leaks[of_hosts].note(result["counts"])
            return result

        yield work


def report(results: list[Job]) -> None:
    """The table."""
    rows = []
    for fault in FAULTS:
        of = [result for result in results if result.get("fault") == fault and "wrong" in result]
        if not of:
            continue
        ended = [seconds for result in of for seconds in result["detected"]]
        again = [result["recovery"] for result in of]
        codes = Counter(code for result in of for code in result["codes"])
        words = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        quarantined = sum(result["quarantined"] for result in of)
        bad = sum(bool(result["wrong"]) for result in of)
        rows.append([fault, len(of), *spread(ended), *spread(again), quarantined, bad, words])
    heads = ["fault", "runs", *(f"ended {q} s" for q in ("p50", "p99", "max"))]
    heads += [*(f"again {q} s" for q in ("p50", "p99", "max")), "quarantined", "violations", "ends"]
    print_table(heads, rows)


def violations(results: list[Job], seed: int) -> list[str]:
    """What was found, in words, with the command that does it again."""
    found = []
    for result in results:
        found += [f"leak: {text}" for text in result.get("leaks", [])]
        if "broken" in result:
            found.append(f"run {result['number']} broke off: {result['broken']}")
        for text in result.get("wrong", []):
            found.append(f"{result['say']}: {text} (again: --seed {seed} --only {result['number']})")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the lab; 0 if nothing was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2, help="pairs at the same time")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, nargs="+", help="only the runs of these numbers, and say each")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    options = parser.parse_args(arguments)
    seed = random_seed() if options.seed is None else options.seed
    faults = options.fault or list(FAULTS)
    numbers = range(options.runs) if options.only is None else options.only
    jobs = [{"number": number} for number in numbers]
    results: list[Job] = []
    for result in run("tests.faults.lab.worker", jobs, options.processes, 300.0, seed=seed, faults=faults):
        results.append(result)
        if options.only and "say" in result:
            print(f"{result['say']}: {', '.join(result['codes'])}", flush=True)
        for text in violations([result], seed):
            print(text, flush=True)
    report(results)
    bad = violations(results, seed)
    skipped = Counter(result["skipped"] for result in results if "skipped" in result)
    for why, count in skipped.items():
        print(f"{count} runs were left out: {why}")
    ran = sum("wrong" in result or "broken" in result for result in results)
    print(f"seed {seed}: {ran} runs, violations {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
