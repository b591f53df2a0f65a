"""What bulk costs a handover beside it, what handovers leave bulk, and what two equal peers get.

    python bench/fairness.py [--rounds 7] [--handovers 40] [--over tcp,local,efa] [--ops write,read]

Five processes: a hub, two peers of it, and an unrelated pair. Each turn keeps two transfers of 64 MiB of
bulk under way: from the hub to the first peer, or between the unrelated two. Beside it the hub makes
handovers of 4 MiB, one after another, with the same peer or with the other one. Turns rotate, and another
one is first in each round. Then handovers saturate (four at a time) beside bulk with the same peer and
with the other one, and both peers get the same. `write` has the hub's memory as the source, `read` as the
destination. Over `efa` the library is the stand-in of the tests, built here, and the unrelated pair has a
device of its own. Prints p50 and p99 of all rounds, with their ratios to the same handover beside
unrelated bulk, and shares of bytes. Status 1 where a bound is missed: p50 at most 2 times, p99 at most 4
times, bulk at least a tenth, equal peers from 0.8 to 1.25.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import kvik

PAGE = 64 << 10
BULK = 64 << 20
HANDOVER = 4 << 20
LIMIT = 60.0
AT_ONCE = {"bulk": 2, "handover": 4}
STANDIN = Path(__file__).parents[1] / "tests" / "standins" / "fabric"
BOUNDS = {"p50": 2.0, "p99": 4.0}


class Side:
    """An engine with one region, which it grants as a whole, or moves parts of."""

    def __init__(self, over: str, library: str, folder: str) -> None:
        # For the library only: to kvik's own options these names are unknown.
        for name, value in (("KVIK_STANDIN_DIR", folder), ("KVIK_STANDIN_DEVICES", "1")):
            ctypes.CDLL(None).setenv(name.encode(), value.encode(), 1)
        nics: dict[str, Any] = {"nics": "efa", "nic_library": library} if over == "efa" else {}
        named: dict[str, kvik.TransportName] = {"tcp": "tcp", "local": "local", "efa": "nics"}
        self.engine = kvik.Engine(transport=named[over], **nics)
        self.layout = kvik.Layout((BULK + HANDOVER) // PAGE, PAGE)
        self.region = self.engine.allocate(self.layout.nbytes)
        np.frombuffer(memoryview(self.region), dtype=np.uint8)[:] = 1
        self.tickets: dict[str, dict[str, str]] = {}
        self.moved: dict[str, int] = {}
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []
        self.failed: list[Exception] = []

    def grants(self) -> dict[str, str]:
        """A ticket for reading and one for writing all pages."""
        pages = self.region.pages(self.layout, range(self.layout.pages))
        given = {
            right: self.engine.grant(pages, right=right, use="many", expiry=3000.0, max_expiry=3000.0)
            for right in ("read", "write")
        }
        self._given = given
        return {right: str(grant.ticket) for right, grant in given.items()}

    def begin(self, op: str, peer: str, traffic_class: str, nbytes: int) -> kvik.Transfer:
        """Starts one transfer of the first pages, or of the last ones for a handover's size."""
        first = BULK // PAGE if nbytes == HANDOVER else 0
        ids = range(first, first + nbytes // PAGE)
        call = self.engine.read if op == "read" else self.engine.write
        return call(
            self.region.pages(self.layout, ids),
            self.tickets[peer][op],
            ids,
            traffic_class=traffic_class,  # type: ignore[arg-type]
            deadline=LIMIT,
            verify="off",
        )

    def keep(self, name: str, op: str, peer: str, traffic_class: str, nbytes: int) -> None:
        """Keeps transfers under way until it is stopped, and counts what has ended. They are when it returns,
        or have failed."""
        self.moved[name] = 0
        begun = threading.Event()

        def work() -> None:
            under_way: deque[kvik.Transfer] = deque()
            try:
                while not self.stop.is_set():
                    while len(under_way) < AT_ONCE[traffic_class]:
                        under_way.append(self.begin(op, peer, traffic_class, nbytes))
                    begun.set()
                    self.moved[name] += under_way.popleft().wait().bytes
                for transfer in under_way:
                    transfer.wait()
            except Exception as error:
                self.failed.append(error)
            finally:
                begun.set()

        thread = threading.Thread(target=work)
        thread.start()
        self.threads.append(thread)
        begun.wait()

    def quiet(self) -> None:
        """Ends what is kept under way. Raises where it was not: what was timed beside it was alone."""
        self.stop.set()
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        self.stop.clear()
        if self.failed:
            raise self.failed[0]

    def time(self, op: str, peer: str, count: int) -> list[float]:
        """Seconds of handovers, one after another."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.begin(op, peer, "handover", HANDOVER).wait()
            times.append(time.perf_counter() - began)
        return times

    def during(self, seconds: float) -> dict[str, int]:
        """Bytes of each that is kept under way, over so many seconds."""
        time.sleep(seconds / 3)
        before = dict(self.moved)
        time.sleep(seconds)
        return {name: moved - before[name] for name, moved in self.moved.items()}


def serve(args: argparse.Namespace) -> None:
    """A process: does what it is told, a line of JSON at a time."""
    side = Side(args.over, args.library, args.folder)
    for line in sys.stdin:
        name, given = json.loads(line)
        if name == "know":
            side.tickets = given
            answer: Any = None
        else:
            answer = getattr(side, name)(*given)
        if name == "quiet":
            side.moved.clear()
        print(json.dumps(answer), flush=True)
    side.engine.close()


class Process:
    """A process that serves."""

    def __init__(self, over: str, library: str, folder: str) -> None:
        command = [sys.executable, __file__, "--role=side", f"--one={over}"]
        command += [f"--library={library}", f"--folder={folder}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdin is None or self.process.stdout is None:
            raise SystemExit("a process has no pipes")
        self.to, self.answers = self.process.stdin, self.process.stdout

    def say(self, name: str, *given: Any) -> Any:
        """Has it do something, and waits for the answer."""
        self.to.write(json.dumps([name, given[0] if name == "know" else given]) + "\n")
        self.to.flush()
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"a process has ended: {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Ends it."""
        self.to.close()
        self.process.wait(LIMIT)


class Scene:
    """The five processes over one transport."""

    def __init__(self, over: str, library: str, folder: str) -> None:
        names = ("hub", "same", "other", "far", "near")
        ours, theirs = f"{folder}/a", f"{folder}/b"
        for path in (ours, theirs):
            Path(path).mkdir()
        self.of = {name: Process(over, library, ours if name in names[:3] else theirs) for name in names}
        tickets = {name: self.of[name].say("grants") for name in ("same", "other", "far")}
        self.hub, self.near = self.of["hub"], self.of["near"]
        for process in (self.hub, self.near):
            process.say("know", tickets)

    def latency(self, op: str, bulk: str, peer: str, count: int) -> list[float]:
        """Seconds of handovers with a peer, beside bulk of the hub, or of the unrelated."""
        source, to = (self.near, "far") if bulk == "unrelated" else (self.hub, "same")
        self.hub.say("time", op, peer, 2)
        source.say("keep", "bulk", op, to, "bulk", BULK)
        time.sleep(0.1)
        times: list[float] = self.hub.say("time", op, peer, count)
        source.say("quiet")
        return times

    def shares(self, op: str, of: dict[str, tuple[str, str, int]], seconds: float) -> dict[str, int]:
        """Bytes that each gets, all with the hub: its peer, class and the bytes of a transfer."""
        for name, (peer, traffic_class, nbytes) in of.items():
            self.hub.say("keep", name, op, peer, traffic_class, nbytes)
        got: dict[str, int] = self.hub.say("during", seconds)
        self.hub.say("quiet")
        return got

    def end(self) -> None:
        """Ends all processes."""
        for process in self.of.values():
            process.end()


TURNS = [(bulk, peer) for bulk in ("unrelated", "hub") for peer in ("same", "other")]
SMALL = 4 << 20


def measure(scene: Scene, over: str, op: str, args: argparse.Namespace) -> dict[str, Any]:
    """One transport in one direction."""
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in TURNS}
    shares: dict[str, list[float]] = {"bulk, same peer": [], "bulk, other peer": [], "equal peers": []}
    for number in range(args.rounds):
        for turn in TURNS[number % 4 :] + TURNS[: number % 4]:
            times[turn] += scene.latency(op, *turn, args.handovers)
        for name, peer in (("bulk, same peer", "same"), ("bulk, other peer", "other")):
            of = {"handover": ("same", "handover", 4 * SMALL), "bulk": (peer, "bulk", SMALL)}
            got = scene.shares(op, of, args.seconds)
            shares[name].append(got["bulk"] / max(1, sum(got.values())))
        equal = {peer: (peer, "handover", SMALL) for peer in ("same", "other")}
        got = scene.shares(op, equal, args.seconds)
        shares["equal peers"].append(got["same"] / max(1, got["other"]))
    result: dict[str, Any] = {"over": over, "op": op, "times": {}, "shares": {}}
    for (bulk, peer), taken in times.items():
        p50, p99 = np.quantile(taken, [0.5, 0.99])
        result["times"][f"{peer} peer, bulk {bulk}"] = {"p50": p50, "p99": p99, "n": len(taken)}
    for name, values in shares.items():
        low, middle, high = np.quantile(values, [0, 0.5, 1])
        result["shares"][name] = {"median": middle, "least": low, "most": high}
    return result


def report(result: dict[str, Any]) -> int:
    """Prints it; how many bounds were missed."""
    missed, over, op = 0, result["over"], result["op"]
    for peer in ("same", "other"):
        beside, alone = (result["times"][f"{peer} peer, bulk {bulk}"] for bulk in ("hub", "unrelated"))
        words = []
        for name, most in BOUNDS.items():
            ratio = beside[name] / alone[name]
            missed += ratio > most
            missed_here = " MISSED" if ratio > most else ""
            both = f"{1e3 * beside[name]:6.2f} ms, {1e3 * alone[name]:6.2f} beside unrelated"
            words.append(f"{name} {both}: {ratio:4.2f}{missed_here}")
        print(f"{over:5} {op:5} handover, {peer:5} peer  {'   '.join(words)}   n={beside['n']}")
    for name, of in result["shares"].items():
        low, high = (0.8, 1.25) if name == "equal peers" else (0.1, 1.0)
        bad = not low <= of["median"] <= high
        missed += bad
        print(
            f"{over:5} {op:5} {name:16} {of['median']:5.3f} ({of['least']:.3f} to {of['most']:.3f})"
            f"{' MISSED' if bad else ''}"
        )
    return missed


def main() -> int:
    """The command, and its processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--handovers", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--over", default="tcp,local,efa")
    parser.add_argument("--ops", default="write,read")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("side",), help=argparse.SUPPRESS)
    parser.add_argument("--one", dest="one", help=argparse.SUPPRESS)
    parser.add_argument("--library", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        args.over = args.one
        serve(args)
        return 0
    results, missed = [], 0
    with tempfile.TemporaryDirectory(prefix="kf") as folder:
        for over in args.over.split(","):
            library, place = "", Path(folder) / over
            place.mkdir()
            if over == "efa":
                Path(folder, "lib").mkdir()
                subprocess.run(["make", "-s", "-C", STANDIN, f"OUT={folder}/lib"], check=True)
                library = f"{folder}/lib/libfabric.so.1"
            scene = Scene(over, library, str(place))
            for op in args.ops.split(","):
                results.append(measure(scene, over, op, args))
                missed += report(results[-1])
            scene.end()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
