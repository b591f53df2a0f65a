"""Does what is planned and not done yet: start by start, run by run, each run into the journal."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvik.roles import RoleError, RoleGraph
from kvik.roles.node import Node, NodeError
from kvik_lab.errors import LabError
from kvik_lab.records import RunRecord, Times
from kvik_lab.records.schema import Key, Outcome
from kvik_lab.run import clients
from kvik_lab.run.build import Planned, PlannedStart, contents, servers, setup, varied
from kvik_lab.run.drivers import DRIVERS
from kvik_lab.run.execute import Up, execute, place, used_nodes
from kvik_lab.run.gating import judge_again, judged
from kvik_lab.run.journal import Journal
from kvik_lab.run.nodes import Look, Maker, examined, executors, open_nodes
from kvik_lab.run.progress import Progress, outcome_of
from kvik_lab.study import Study

TRIES = 2  # starts of the servers that may fail, or lose a run, before the next planned start
STALE_LIMIT = 30.0  # seconds for processes of a controller that was killed to end

Say = Callable[[str], None]


@dataclass
class Control:
    """What a controller works with; `say` tells a person."""

    study: Study
    starts: Sequence[PlannedStart]
    journal: Journal
    say: Say
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """What each run is measured in."""
    executors: Callable[[Path], AbstractContextManager[Mapping[str, Maker]]] = executors
    """What makes nodes while the study runs, by the executor that they name; given the folder of logs."""

    def __post_init__(self) -> None:
        self.mark = mark(self.journal.folder)
        self.varied = varied(self.study)
        self.makers: Mapping[str, Maker] = {}

    def run(self) -> None:
        """Do all that is not done. `KeyboardInterrupt` when a signal came: then everything has been ended.
        Raises `LabError` where a file that requests are made from is not what it was."""
        self._check_files()
        slots = [one.slot for start in self.starts for one in start.runs]
        progress = Progress(slots, self.starts, self.journal, self.say)
        logs = self.journal.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with _told_to_stop(), self.executors(logs) as self.makers:
            for start in self.starts:
                self._start(start, progress)
        for record in judge_again(self.journal, self.study.gates):
            self.say(f"beside all others {record.id} is {outcome_of(record)}")

    def _check_files(self) -> None:
        now = contents(run.load for start in self.starts for run in start.runs)
        for record in self.journal.records.values():
            was = record.key.configuration.get("files")
            for file, digest in was.items() if isinstance(was, dict) else ():
                if now.get(file, digest) != digest:
                    raise LabError(
                        f"{file}: has changed since run {record.id}, whose requests were made from it; put "
                        "it back, or give a new folder with --out"
                    )

    def _start(self, start: PlannedStart, progress: Progress) -> None:
        """All runs of one planned start; servers that die are started again, a few times."""
        for attempt in range(1, TRIES + 1):
            pending = [one for one in start.runs if not self.journal.done(one.slot.id)]
            if not pending:
                return
            # What failed before comes last: what ends its servers each time keeps no other run from its turn.
            # A run that was lost with its host has its place in the plan.
            ended = self.journal.records
            pending.sort(key=lambda one: one.slot.id in ended and ended[one.slot.id].outcome == "failed")
            name = self._name(start)
            try:
                with self._up(start, name) as up:
                    progress.started(start, name)
                    if self._runs(up, pending, progress):
                        return
            except (RoleError, NodeError, LabError) as error:
                self.say(f"start {name} failed: {error}")
                if attempt == TRIES:
                    lost = isinstance(error, NodeError) or isinstance(error.__cause__, NodeError)
                    outcome: Outcome = "lost" if lost else "failed"
                    self._give_up(start, name, pending, str(error), outcome, progress)

    def _runs(self, up: Up, pending: Sequence[Planned], progress: Progress) -> bool:
        """Whether all were tried under these servers."""
        for run in pending:
            with self.around():
                record = execute(up, run, self.study.name)
            record = judged(record, self.journal, self.study.gates)
            self.journal.add(record)
            progress.ended(record)
            if record.outcome == "lost" or up.graph.dead():
                return False
        return True

    @contextlib.contextmanager
    def _up(self, start: PlannedStart, name: str) -> Iterator[Up]:
        """Nodes and servers, for as long as the block lasts."""
        logs = self.journal.folder / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        driver = DRIVERS[start.spec.driver]
        with open_nodes(start.spec, logs, self.makers) as nodes:
            self._await_stale(nodes)
            clients.check(start.runs, nodes)
            system = driver.system(setup(start, nodes, logs, self.mark))
            code = driver.code(system, nodes)
            graph = RoleGraph([part.role for part in system.parts], nodes, logs)
            # Before the servers, whose start it would disturb; in a run it would disturb what is measured.
            seen = {node: examined(nodes[node]) for node in used_nodes(system, start.spec)}
            with graph:
                yield Up(
                    name, start, system, graph, nodes, logs, self.mark, code, graph.ready_seconds,
                    self.varied, seen,
                )  # fmt: skip

    def _await_stale(self, nodes: dict[str, Node]) -> None:
        """What an earlier controller of this journal left is ending by itself; wait for it. `RoleError`
        where it does not end, so that nothing is measured beside it."""
        until = time.monotonic() + STALE_LIMIT
        for name, node in nodes.items():
            while own := Look.at(node, self.mark).own:
                if time.monotonic() > until:
                    pids = ", ".join(map(str, own))
                    raise RoleError(f"processes of an earlier run are still on node {name}: {pids}; end them")
                time.sleep(0.2)  # another controller's processes give no event to wait for

    def _name(self, start: PlannedStart) -> str:
        """A name that no start had: servers that are started again are another start, and the logs are
        kept."""
        used = {path.name for path in (self.journal.folder / "logs").glob(f"{start.start.name}*")}
        used |= {record.place.start for record in self.journal.records.values()}
        names = (start.start.name if n == 1 else f"{start.start.name}.{n}" for n in range(1, len(used) + 2))
        return next(name for name in names if name not in used)

    def _give_up(
        self, start: PlannedStart, name: str, pending: Sequence[Planned], why: str, outcome: Outcome,
        progress: Progress,
    ) -> None:  # fmt: skip
        """Runs whose servers do not come up; `resume` tries them again."""
        now = time.time_ns()
        for run in pending:
            key = Key(configuration={"levels": dict(run.slot.levels), "run": servers(run.spec)})
            record = RunRecord(
                id=run.slot.id, study=self.study.name, key=key, levels=dict(run.slot.levels),
                place=place(start, name, run), times=Times(began=now, ended=now), outcome=outcome, error=why,
            )  # fmt: skip
            self.journal.add(record)
            progress.ended(record)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """The first SIGINT or SIGTERM is a `KeyboardInterrupt`; what follows it finds the end on its way."""
    told: list[int] = []

    def tell(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        if len(told) == 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def mark(folder: Path) -> str:
    """What the processes of a journal have in their environment."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
