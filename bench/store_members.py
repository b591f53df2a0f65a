"""A store of three servers under load, while one is killed, one stops, one joins, and their etcd goes away.

    python bench/store_members.py [--copies 1,2] [--window 4] [--stopped 5] [--clients 2]
                                  [--events killed,stopped,joins,etcd,hot] [--quick] [--out FILE]

Real servers, which enter themselves in a real etcd, and clients that read prompts (get), compare every block,
and put what they miss. Figures are of windows *before*, *during* and *after* each event:

- *killed*: one server gets SIGKILL. During: until no client lists it any more, which is when its lease has
  ended. It is started again, empty, after the windows;
- *stopped*: one server gets SIGSTOP. During: until it gets SIGCONT, before its lease ends;
- *joins*: a fourth server is started. During: until all clients list it and miss nothing any more. It leaves
  in order after the windows;
- *etcd*: etcd gets SIGKILL. During: until it is started again, with the data that it had.

Each *before* begins when all prompts were put once more (which makes copies that were lost) and the clients
miss nothing any more. A call counts in the window in which most of it lay. The hit rate is of blocks, of
those that gets asked for; a stall is the time that one call took. A get that finds little is short, so there
may be more calls a second where fewer blocks are read. With several copies a get asks the next server where
one does not answer.

*hot*: which server is asked for how much, where all prompts are apart, and where all of them have their first
segment (64 blocks) in common, which lies on one server.

Exit status 1 where a block was not what was put. It needs the program `etcd`; it takes about three minutes,
with `--quick` (one number of copies, shorter windows) one. All processes share this host: the figures say
nothing of a network.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.python.etcd import Etcd
from tests.python.store_load import LIMIT, Call, Client, Load, Workload, becomes
from tests.python.store_rig import NAMESPACE, Served

import kvik
from kvik.bench import facts
from kvik.stat.snapshot import Samples
from kvik.store.bench.figures import markdown, text

MEMORY = "256MiB"
SEGMENT = 64  # blocks that lie together
WORKLOAD = Workload(blocks=3 * SEGMENT, run=4096, prompts=24, parts=1)


@dataclass(frozen=True)
class Window:
    """A time that figures are of; listed, up: servers that a client knew at its end, and that answered."""

    event: str
    when: str
    began: float
    ended: float
    listed: int = 0
    up: int = 0

    def overlap(self, call: Call) -> float:
        """Seconds of a call that lie in it."""
        return min(self.ended, call.ended) - max(self.began, call.began)


@dataclass(frozen=True)
class Figures:
    """What a window shows. blocks_per_second: that were read. hit_rate: None where nothing was asked for."""

    event: str
    when: str
    seconds: float
    calls: int
    calls_per_second: float
    blocks_per_second: float
    hit_rate: float | None
    longest_s: float
    listed: int
    up: int


def by_window(windows: Sequence[Window], calls: Sequence[Call]) -> list[Figures]:
    """The figures of all windows; each call counts in the one that has most of it."""
    of_window: dict[Window, list[Call]] = {window: [] for window in windows}
    for call in calls:
        most = max(windows, key=lambda window: window.overlap(call), default=None)
        if most is not None and most.overlap(call) > 0:
            of_window[most].append(call)
    return [_figures(window, found) for window, found in of_window.items()]


def _figures(window: Window, calls: Sequence[Call]) -> Figures:
    gets = [call for call in calls if call.what == "get"]
    asked, there = sum(call.asked for call in gets), sum(call.there for call in gets)
    seconds = window.ended - window.began
    return Figures(
        event=window.event,
        when=window.when,
        seconds=seconds,
        calls=len(calls),
        calls_per_second=len(calls) / seconds,
        blocks_per_second=there / seconds,
        hit_rate=there / asked if asked else None,
        longest_s=max((call.seconds for call in calls), default=0.0),
        listed=window.listed,
        up=window.up,
    )


class Scene:
    """An etcd, three servers, and what happens to them under a load."""

    load: Load

    def __init__(self, stack: ExitStack, given: argparse.Namespace, copies: int, program: str) -> None:
        self._stack, self._given, self._copies = stack, given, copies
        self.etcd = Etcd(program, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="members-"))))
        stack.callback(self.etcd.kill)
        self.servers = [self._served() for _ in range(3)]
        self.address = f"etcd:{self.etcd.url}"
        self._entered()
        self.windows: list[Window] = []

    def _served(self) -> Served:
        return self._stack.enter_context(Served("--memory", MEMORY, "--etcd", self.etcd.url))

    def _entered(self) -> None:
        """Wait until etcd has all servers."""
        until = time.monotonic() + LIMIT
        while True:
            try:
                client = Client(self.address, self._copies, WORKLOAD)
                break
            except kvik.StoreUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)  # a client that was not made has nothing to wait for
        with closing(client):
            becomes(lambda: client.names() == self.names())

    def names(self) -> set[str]:
        """What the three servers are called."""
        return {server.address for server in self.servers}

    def listed(self, names: set[str]) -> None:
        """Wait until all clients know just these."""
        becomes(lambda: all(client.names() == names for client in self.load.clients))

    def answer(self) -> None:
        """Wait until all three are listed and answer."""
        self.listed(self.names())
        becomes(lambda: all(client.up() == len(self.names()) for client in self.load.clients))

    def lasts(self) -> None:
        """The time of a window."""
        self.load.lasts(self._given.window)

    @contextmanager
    def _window(self, event: str, when: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        ended = time.monotonic()
        members = self.load.clients[0].store.members()
        up = sum(member.up for member in members)
        self.windows.append(Window(event, when, began, ended, len(members), up))
        print(f"  {event}, {when}: {ended - began:.1f} s", flush=True)

    def _put_all(self) -> None:
        """Have all blocks in all copies: one that was lost with a server is made by the next put only."""
        with closing(Client(self.address, self._copies, WORKLOAD)) as client:
            for prompt in range(WORKLOAD.prompts):
                client.put(prompt)

    def happens(self, event: str, during: Callable[[], object]) -> None:
        """The three windows of an event."""
        self._put_all()
        self.load.all_hit()
        with self._window(event, "before"):
            self.lasts()
        with self._window(event, "during"):
            during()
        with self._window(event, "after"):
            self.lasts()

    def killed(self) -> None:
        """One is killed; afterwards it is started again."""
        victim = self.servers[0]

        def during() -> None:
            victim.kill()
            self.listed(self.names() - {victim.address})

        self.happens("killed", during)
        victim.again()
        self.answer()

    def stopped(self) -> None:
        """One stops for a time."""

        def during() -> None:
            with self.servers[1].stopped():
                self.load.lasts(self._given.stopped)

        self.happens("stopped", during)
        self.answer()

    def joins(self) -> None:
        """A fourth one joins; afterwards it leaves."""
        joined: list[Served] = []

        def during() -> None:
            joined.append(self._served())
            self.listed(self.names() | {joined[0].address})
            self.load.all_hit()

        self.happens("joins", during)
        joined[0].end()
        self.listed(self.names())

    def etcd_away(self) -> None:
        """etcd is killed, and started again."""

        def during() -> None:
            self.etcd.kill()
            self.lasts()
            self.etcd.again(empty=False)

        self.happens("etcd", during)


EVENTS: dict[str, Callable[[Scene], None]] = {
    "killed": Scene.killed, "stopped": Scene.stopped, "joins": Scene.joins, "etcd": Scene.etcd_away,
}  # fmt: skip
HOT = "hot"


# Hot prefix.


def common(prompt: int) -> list[int]:
    """The tokens of a prompt whose first segment all have in common."""
    tokens = WORKLOAD.blocks * NAMESPACE.block_tokens
    alike = SEGMENT * NAMESPACE.block_tokens
    return [*[1_000_000] * alike, *[1_000_001 + prompt] * (tokens - alike)]


PREFIXES = {"apart": WORKLOAD, "first segment in common": replace(WORKLOAD, tokens=common)}


def hot(scene: Scene, copies: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Which server is asked for how much, by what the prompts have in common."""
    found = []
    for prefix, workload in PREFIXES.items():
        with Load(scene.address, copies, given.clients, workload) as load:
            load.all_hit()
            looks = [Samples(load.clients[0].store.metrics())]
            began = time.monotonic()
            load.lasts(given.window)
            window = Window("hot", prefix, began, time.monotonic())
            looks.append(Samples(load.clients[0].store.metrics()))
        calls = [call for client in load.clients for call in client.calls]
        (shown,) = by_window([window], calls)
        numbers = {name: f"server {number}" for number, name in enumerate(sorted(scene.names()), 1)}
        found.append({
            "prefix": prefix, "calls_per_second": shown.calls_per_second, "longest_s": shown.longest_s,
            "hit_rate": shown.hit_rate, "wrong": sum(client.wrong for client in load.clients),
            "servers": shares(looks[0], looks[1], numbers),
        })  # fmt: skip
    return found


def shares(before: Samples, after: Samples, names: dict[str, str]) -> dict[str, dict[str, float]]:
    """Of all that was asked for between two looks, the part of each server: blocks and requests."""

    def parts(metric: str, **labels: str) -> dict[str, float]:
        looks = [look.by(metric, lambda of: of["member"], **labels) for look in (before, after)]
        rose = {name: looks[1].get(name, 0.0) - looks[0].get(name, 0.0) for name in names}
        return {name: count / (sum(rose.values()) or 1.0) for name, count in rose.items()}

    blocks = parts("kvik_store_lookups_total", tier="memory")
    requests = parts("kvik_store_operation_seconds_count", op="get")
    return {number: {"blocks": blocks[name], "requests": requests[name]} for name, number in names.items()}


# All.


def run(given: argparse.Namespace, copies: int, program: str) -> dict[str, Any]:
    """All events with so many copies."""
    print(f"copies {copies}", flush=True)
    with ExitStack() as stack:
        scene = Scene(stack, given, copies, program)
        with Load(scene.address, copies, given.clients, WORKLOAD) as load:
            scene.load = load
            for name in given.events:
                if name in EVENTS:
                    EVENTS[name](scene)
        windows = by_window(scene.windows, [call for client in load.clients for call in client.calls])
        return {
            "copies": copies,
            "windows": [asdict(window) for window in windows],
            "wrong": sum(client.wrong for client in load.clients),
            "hot": hot(scene, copies, given) if HOT in given.events else [],
        }


def events_table(runs: Sequence[dict[str, Any]]) -> str:
    """All windows."""
    columns = ["copies", "event", "window", "s", "calls/s", "blocks read/s", "hit rate"]
    columns += ["longest stall ms", "servers up"]
    rows = [
        [
            str(one["copies"]), window["event"], window["when"], text(window["seconds"], 1),
            text(window["calls_per_second"], 0), text(window["blocks_per_second"], 0),
            text(window["hit_rate"], 4), text(1e3 * window["longest_s"], 1),
            f"{window['up']} of {window['listed']}",
        ]
        for one in runs
        for window in one["windows"]
    ]  # fmt: skip
    return markdown(columns, rows)


def hot_table(runs: Sequence[dict[str, Any]]) -> str:
    """Which server was asked for how much."""
    columns = ["copies", "prompts", "calls/s", "longest stall ms"]
    columns += [f"server {number}: blocks, requests" for number in range(1, 4)]
    rows = [
        [
            str(one["copies"]), found["prefix"], text(found["calls_per_second"], 0),
            text(1e3 * found["longest_s"], 1),
            *(f"{100 * part['blocks']:.0f} %, {100 * part['requests']:.0f} %"
              for part in found["servers"].values()),
        ]
        for one in runs
        for found in one["hot"]
    ]  # fmt: skip
    return markdown(columns, rows)


def wrong_of(runs: Sequence[dict[str, Any]]) -> int:
    """Blocks that were not what was put."""
    return sum(one["wrong"] + sum(found["wrong"] for found in one["hot"]) for one in runs)


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=lambda names: [int(one) for one in names.split(",")])
    parser.add_argument("--window", type=float, help="seconds before and after an event")
    parser.add_argument("--stopped", type=float, default=5.0, help="seconds that a server is stopped")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--events", type=lambda names: names.split(","), default=[*EVENTS, HOT])
    parser.add_argument("--quick", action="store_true", help="a run of about a minute")
    parser.add_argument("--out", type=Path, help="file of all figures, JSON")
    given = parser.parse_args()
    if unknown := set(given.events) - {*EVENTS, HOT}:
        parser.error(f"no such event: {', '.join(sorted(unknown))}; there are {', '.join([*EVENTS, HOT])}")
    given.copies = given.copies or ([2] if given.quick else [1, 2])
    given.window = given.window or (2.0 if given.quick else 4.0)
    return given


def main() -> int:
    """Run it."""
    given = parse()
    program = Etcd.program()
    if program is None:
        raise SystemExit("there is no program `etcd`: on Debian it is in the package etcd-server")
    collected = facts.collect()
    runs = [run(given, copies, program) for copies in given.copies]
    settings = {name: getattr(given, name) for name in ("copies", "window", "stopped", "clients", "events")}
    if given.out:
        given.out.write_text(json.dumps({"facts": collected, "settings": settings, "runs": runs}, indent=1))
    print(f"\n{events_table(runs)}\n\n{hot_table(runs)}\n\nblocks that were wrong: {wrong_of(runs)}")
    return 1 if wrong_of(runs) else 0


if __name__ == "__main__":
    sys.exit(main())
