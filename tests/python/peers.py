"""What the tests of the Python face share: engines that are closed, known pages, peers in processes.

A peer is a child Python process that runs one function of a test module. Parent and child talk in lines of
JSON over two pipes. The child is killed by its pid when the test ends, however it ends.
"""

import contextlib
import importlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import kvik

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0  # seconds for anything that should take a moment

Bytes = npt.NDArray[np.uint8]
Start = tuple[str, dict[str, str]]


@contextlib.contextmanager
def engines() -> Iterator[Callable[..., kvik.Engine]]:
    """Start engines that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **options: Any) -> kvik.Engine:
            return stack.enter_context(kvik.Engine(*args, **options))

        yield start


def random_seed() -> int:
    """A seed, printed so that a failure can be repeated: KVIK_TEST_SEED."""
    seed = int(os.environ.get("KVIK_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"KVIK_TEST_SEED={seed}")
    return seed


def random_bytes(count: int, seed: int) -> Bytes:
    """Bytes that depend on the seed."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def owned(engine: kvik.Engine, pages: int = 8, page_bytes: int = 4096, seed: int = 1) -> "Pages":
    """Pages with random bytes in registered memory."""
    return Pages(engine, random_bytes(pages * page_bytes, seed), pages, page_bytes)


def empty(engine: kvik.Engine, pages: int = 8, page_bytes: int = 4096) -> "Pages":
    """Pages with zeroes in registered memory."""
    return Pages(engine, np.zeros(pages * page_bytes, np.uint8), pages, page_bytes)


class Pages:
    """Contiguous pages of one layer: the memory, its region and its layout."""

    def __init__(self, engine: kvik.Engine, memory: Bytes, pages: int, page_bytes: int) -> None:
        self.memory = memory
        self.region = engine.register(memory)
        self.layout = kvik.Layout(pages, page_bytes)
        self.rows = memory.reshape(pages, page_bytes)

    def of(self, ids: Any = None) -> kvik.PageSet:
        """A page set; all pages without ids."""
        return self.region.pages(self.layout, range(self.layout.pages) if ids is None else ids)


def never_issued(owner: kvik.Engine, layout: kvik.Layout) -> kvik.Ticket:
    """A ticket whose read waits until its deadline: a transfer that hangs on demand."""
    return owner.ticket_template(layout).with_grant(os.urandom(16).hex(), 60.0)


def until(condition: Callable[[], bool], seconds: float = LIMIT, step: float = 0.01) -> bool:
    """Poll for what has no event, every `step` seconds, up to a bound."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step)  # what a condition looks at says nothing of its changes
    return True


def stop(pid: int, within: float = LIMIT) -> None:
    """Stop a process (SIGSTOP), and come back when none of its threads runs any more.

    The kernel stops each thread when that one next looks at its signals: on a busy machine some still run,
    and answer, after `os.kill` has returned.
    """
    os.kill(pid, signal.SIGSTOP)
    # Looked at often: what the others do until then is what a test is about to measure.
    if not until(lambda: all(state in "TZX" for state in thread_states(pid)), within, step=0.0002):
        raise TimeoutError(f"process {pid} was told to stop and still runs after {within} s")


def thread_states(pid: int) -> list[str]:
    """The state letter of each thread of a process, as in proc(5)."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # A thread that has just ended.
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


class Pipe:
    """The child's side of the talk."""

    def say(self, **message: Any) -> None:
        """Send a message to the parent."""
        os.write(1, json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """The parent's next message; ends the child if the parent is gone."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(3)
        message: dict[str, Any] = json.loads(line)
        return message


class Peer:
    """A child process that runs `module.function(pipe, **arguments)`; `start`: in which Python, and with
    which variables."""

    def __init__(
        self, function: Callable[..., None], start: Start | None = None, /, **arguments: Any
    ) -> None:
        python, env = start or (sys.executable, None)
        argv = [python, "-m", "tests.python.peers", function.__module__, function.__name__]
        self.process = subprocess.Popen(
            [*argv, json.dumps(arguments)], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self.process.pid
        self._rest = b""

    def say(self, **message: Any) -> None:
        """Send a message to the child."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, timeout: float = LIMIT) -> dict[str, Any]:
        """The child's next message."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError(f"the peer said nothing for {timeout} s")
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    raise EOFError(f"the peer ended with status {self.process.wait(LIMIT)}")
                self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message and hear the answer."""
        self.say(**message)
        return self.hear()

    def end(self, timeout: float = LIMIT) -> int:
        """Wait for the child's own end; its status."""
        return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def owner(
    pipe: Pipe, *, pages: int = 8, page_bytes: int = 4096, seed: int = 1, right: str = "read", **options: Any
) -> None:
    """A peer that owns pages and grants them: it obeys `grant`, `sum`, `state` and `bye`."""
    with kvik.Engine(**options) as engine:
        region = engine.allocate(pages * page_bytes)
        view = np.frombuffer(memoryview(region), np.uint8)
        if right == "read":
            view[:] = random_bytes(view.size, seed)
        layout = kvik.Layout(pages, page_bytes)
        grant = engine.grant(region.pages(layout, range(pages)), right=right, use="many")  # type: ignore[arg-type]
        pipe.say(ticket=str(grant.ticket), id=engine.id)
        while (heard := pipe.hear())["do"] != "bye":
            if heard["do"] == "same":
                pipe.say(same=bool((view == random_bytes(view.size, heard["seed"])).all()))
            elif heard["do"] == "state":
                pipe.say(state=grant.state)
        del view


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(Pipe(), **json.loads(sys.argv[3]))
