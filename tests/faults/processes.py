"""Jobs that run side by side in processes of their own; a job is a dictionary, and so is its result."""

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from tests.faults.starter import end_with_starter
from tests.python.peers import Peer, Pipe

Job = dict[str, Any]
Worker = Callable[[Job], Job]


def process(pipe: Pipe, module: str, maker: str, arguments: dict[str, Any]) -> None:
    """The process: makes a worker, which is a context manager, and does jobs until there are no more."""
    end_with_starter()
    with getattr(importlib.import_module(module), maker)(**arguments) as work:
        pipe.say(ready=True)
        while (heard := pipe.hear())["job"] is not None:
            try:
                pipe.say(result=work(heard["job"]))
            except Exception:
                traceback.print_exc(file=sys.stderr)
                pipe.say(result={**heard["job"], "broken": traceback.format_exc(limit=-3)})
        last = work({"last": True})
    pipe.say(result=last)


def run(maker: str, jobs: list[Job], processes: int, limit: float, **arguments: Any) -> Iterator[Job]:
    """Do all jobs, `limit` seconds each at most; their results as they come, and each process's last word.

    `maker` names a context manager that makes a worker: `tests.faults.lab.worker`.
    """
    waiting = list(reversed(jobs))
    with ExitStack() as stack:
        module, _, name = maker.rpartition(".")
        where = {"module": module, "maker": name, "arguments": arguments}
        peers = [stack.enter_context(Peer(process, **where)) for _ in range(min(processes, len(jobs)))]
        for peer in peers:
            peer.hear(limit)
            peer.say(job=waiting.pop())
        until = {id(peer): time.monotonic() + limit for peer in peers}
        ending: set[int] = set()
        while peers:
            for peer in list(peers):
                try:
                    yield peer.hear(0.02)["result"]
                except TimeoutError:
                    if time.monotonic() > until[id(peer)]:
                        raise TimeoutError(f"a job took more than {limit} s") from None
                    continue
                if id(peer) in ending:
                    peers.remove(peer)
                    continue
                job = waiting.pop() if waiting else None
                peer.say(job=job)
                if job is None:
                    ending.add(id(peer))
                until[id(peer)] = time.monotonic() + limit
