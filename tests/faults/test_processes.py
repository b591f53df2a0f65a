"""Jobs in processes: all are done, and each process has a last word, which has its leaks."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.faults.processes import Job, Worker, run


@contextlib.contextmanager
def counting() -> Iterator[Worker]:
    """Does nothing, and says at the end how often."""
    done = 0

    def work(job: Job) -> Job:
        nonlocal done
        if "last" in job:
            return {"did": done}
        done += 1
        return job

    yield work


@pytest.mark.parametrize(("jobs", "processes"), [(3, 1), (5, 2), (2, 2)])
def test_each_process_says_what_it_did(jobs: int, processes: int) -> None:
    numbers = [{"number": number} for number in range(jobs)]
    said = list(run("tests.faults.test_processes.counting", numbers, processes, 30.0))
    assert sorted(one["number"] for one in said if "number" in one) == list(range(jobs))
    last = [one["did"] for one in said if "did" in one]
    assert (len(last), sum(last)) == (processes, jobs)
