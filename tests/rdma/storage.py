"""The lab's study of a model's file over NFS, run in a guest: the controller here, each load in there.

    python -m tests.rdma.storage --out target/study-loading

It is the ready study `model-loading.yaml` with the guest's addresses and paths in it; the same file runs on a
cluster by `kvik lab run`. `--resume` goes on with one that was interrupted.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvik.roles import Role
from kvik.roles.node import Node, NodeError
from kvik.roles.ports import Holder
from kvik.roles.processes import Process
from kvik_lab.run.build import resolve
from kvik_lab.run.control import Control, Say
from kvik_lab.run.journal import Journal
from kvik_lab.run.nodes import Maker
from kvik_lab.run.slots import plan_slots
from kvik_lab.run.spec import NodeSpec
from kvik_lab.study import load_study
from tests.rdma import models
from tests.rdma.devices import RIGHT
from tests.rdma.guest import LAB, Guest, Job, Result, booted
from tests.rdma.initramfs import Kernel
from tests.rdma.inside import add_kernel, kernel_of
from tests.rdma.programs import PYTHON, ROOT

LIMIT = 120.0  # seconds of one job
LIFE = 3000.0  # seconds of a guest with a whole study
READY = resources.files("kvik_lab.study") / "examples" / "model-loading.yaml"
SERVER_SAYS = 'server: "192.0.2.20:/models"'


@dataclass(frozen=True)
class Answer:
    """How a command in the guest ended, and what it wrote."""

    status: int
    output: str


class Server:
    """The job in the guest that has the file and its server, and runs commands beside them (`models`)."""

    def __init__(self, guest: Guest, kernel: Kernel, size: int) -> None:
        self.folder = guest.folder / "study"
        self.folder.mkdir()
        words = [kernel.image.parent, size, LAB / self.folder.name]
        self._job = Job("serve", [PYTHON, "-S", "-m", "tests.rdma.models", *words], LIFE, cwd=ROOT)
        self._guest, self._number = guest, 0
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._stay, name="serve", daemon=True)
        self._thread.start()

    def _stay(self) -> None:
        self._result = self._guest.run(self._job)

    def run(self, argv: Sequence[str], env: Mapping[str, str]) -> Answer:
        """Run a command to its end."""
        self._number += 1
        asked = json.dumps({"argv": list(argv), "env": dict(env)})
        models.write_whole(self.folder / f"{self._number}.ask", asked)
        self.wait_for(f"{self._number}.done")
        status = int((self.folder / f"{self._number}.done").read_text())
        return Answer(status, (self.folder / f"{self._number}.out").read_text(errors="replace"))

    def wait_for(self, name: str) -> None:
        """Until a file is there. Raises `NodeError` where the job has ended, or takes too long."""
        until = time.monotonic() + LIMIT
        while not (self.folder / name).exists():
            if not self._thread.is_alive():
                said = "it was killed" if self._result is None else self._result.output
                raise NodeError(f"the guest's server has ended before {name}: {said[-2000:]}")
            if time.monotonic() > until:
                raise NodeError(f"the guest has not answered {name} within {LIMIT:g} s")
            time.sleep(0.02)  # a shared folder tells nobody of a new file

    def stop(self) -> None:
        """End the job, and let the folder go."""
        (self.folder / "stop").touch()
        self._thread.join(LIMIT)
        shutil.rmtree(self.folder, ignore_errors=True)


class GuestProcess(Process):
    """A role in the guest: it has ended when this is made."""

    def __init__(self, name: str, answer: Answer, log: Path) -> None:
        self.name, self.log, self._status = name, log, answer.status
        self._begins = 0  # of the log, which has nothing of anybody else
        log.write_text(answer.output)

    @property
    def alive(self) -> bool:
        """It is not."""
        return False

    def wait(self, timeout: float) -> int | None:  # noqa: ARG002 - it has ended
        """Its exit status."""
        return self._status

    def stop(self) -> None:
        """Nothing is left of it."""


class GuestNode:
    """The guest as a node of a study."""

    address = "127.0.0.1"
    python = str(PYTHON)

    def __init__(self, server: Server) -> None:
        self.server = server

    def launch(self, role: Role, log: Path) -> Process:
        """Run it to its end."""
        return GuestProcess(role.name, self.server.run(role.command, role.env), log)

    def run(self, command: Sequence[str]) -> str:
        """Run a short command; not one of kvik (the doctor), which takes the guest seconds to start."""
        if "-m" in command:
            raise NodeError(f"the guest is not asked by {' '.join(command[1:])}")
        answer = self.server.run(command, {})
        if answer.status:
            raise NodeError(f"{command[0]}: status {answer.status}: {answer.output[-500:]}")
        return answer.output

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Nothing of it is reached from here."""
        return contextlib.nullcontext()

    def free_ports(self, count: int) -> list[int]:
        """None is asked for."""
        raise NodeError(f"{count} ports of the guest cannot be reached from here")

    def holders(self, wanted: Iterable[int]) -> list[Holder]:
        """None is asked for."""
        raise NodeError(f"ports {list(wanted)} of the guest cannot be reached from here")


def in_place_of_local(server: Server) -> dict[str, Maker]:
    """Nodes of a study that are this host there are the guest."""

    @contextlib.contextmanager
    def made(specs: Mapping[str, NodeSpec], _folder: Path) -> Iterator[Mapping[str, Node]]:
        yield {name: GuestNode(server) for name in specs}

    return {"local": made}


def here(text: str) -> str:
    """The ready study with the guest's addresses and paths."""
    changes = {
        SERVER_SAYS: f'server: "{models.SERVER}:/"',
        'more: "" ': f'more: ",addr={models.SERVER},clientaddr={RIGHT.v4}" ',
        "/srv/models/model.safetensors": str(models.ON_DISK),
        "/dev/shm/model.safetensors": str(models.SERVED),  # noqa: S108 - the file that the server has in memory
    }
    for before, after in changes.items():
        assert before in text, f"the ready study has no {before!r}"
        text = text.replace(before, after)
    return text


@contextlib.contextmanager
def served(guest: Guest, kernel: Kernel, size: int) -> Iterator[Server]:
    """A model's file of so many bytes, at all of its places."""
    server = Server(guest, kernel, size)
    try:
        server.wait_for("ready")
        yield server
    finally:
        server.stop()


def run_study(
    guest: Guest, kernel: Kernel, text: str, out: Path, say: Say, *, resume: bool = False
) -> Journal:
    """Plan, run and judge a study of loads in the guest; its journal."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "asked.yaml"
    file.write_text(text)
    study = load_study(file)
    starts = resolve(study, plan_slots(study))
    size = int(study.constants["file_bytes"])
    with served(guest, kernel, size) as server, Journal.opened(out, text, resume=resume) as journal:
        makers = in_place_of_local(server)
        Control(study, starts, journal, say, executors=lambda _: contextlib.nullcontext(makers)).run()
        return journal


def main(arguments: list[str] | None = None) -> int:
    """Run the ready study, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_kernel(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the journal and the report")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    kernel = kernel_of(parser, options.kernel)
    text = here(READY.read_text(encoding="utf-8"))
    with (
        tempfile.TemporaryDirectory(prefix="kvik-guest-") as folder,
        booted(kernel, Path(folder), LIFE) as guest,
    ):
        run_study(guest, kernel, text, options.out, print, resume=options.resume)
    report(options.out)
    return 0


def report(out: Path) -> None:
    """As a person would, by the lab's commands."""
    lab = [PYTHON, "-m", "kvik.cli", "lab"]
    table = ["table", out / "runs.jsonl", "--metric", "load_time", "--out", out / "load_time.csv"]
    page = [
        "--arm",
        "storage",
        "--base",
        "nfs-tcp",
        "--unit",
        "s",
        "--title",
        "Loading a model",
        "--out",
        out,
    ]
    for words in (table, ["report", out / "load_time.csv", *page]):
        subprocess.run([str(word) for word in (*lab, *words)], check=True, timeout=300)


if __name__ == "__main__":
    sys.exit(main())
