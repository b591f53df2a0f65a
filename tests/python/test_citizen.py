"""kvik as a guest in somebody else's process: descriptors, threads, signals, the GIL, the end."""

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvik
from tests.busy import Watch
from tests.python.peers import LIMIT, Peer, Pipe, empty, engines, never_issued, owned, until

CLOEXEC = 0o2000000
IDLE = 0.02  # seconds of a processor in a second


def tasks() -> dict[int, str]:
    """The threads of this process whose names begin with kvik: id and name."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread of an earlier test, which has ended since the folder was read
        if name.startswith("kvik"):
            found[int(task.name)] = name
    return found


def test_descriptors_are_not_inherited_by_programs() -> None:
    def flags() -> dict[str, int]:
        found = {}
        for info in Path("/proc/self/fdinfo").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since the folder was read
                line = next(line for line in info.read_text().splitlines() if line.startswith("flags:"))
                found[info.name] = int(line.split()[1], 8)
        return found

    before = flags()
    with engines() as start:
        here, there = start(), start()
        shared = there.allocate(4096)
        layout = kvik.Layout(1, 4096)
        grant = there.grant(shared.pages(layout, [0]), use="many")
        target = empty(here, 1)
        for transport in ("tcp", "local"):
            here.read(target.of(), grant.ticket, transport=transport).wait(LIMIT)
        stalled = here.read(target.of(), never_issued(there, layout))
        fd = stalled.done_fd()
        # Its number may be that of one of an earlier test, which was closed since.
        new = {one: value for one, value in flags().items() if one not in before or one == str(fd)}
        stalled.cancel()
        os.close(fd)
        assert str(fd) in new
        assert all(value & CLOEXEC for value in new.values()), new


def test_descriptors_are_closed_with_the_engine() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def session() -> None:
        with engines() as start:
            here, there = start(), start()
            here.read(empty(here).of(), there.grant(owned(there).of()).ticket).wait(LIMIT)

    before = count()
    for _ in range(3):
        session()
    assert until(lambda: count() <= before)


def test_threads_are_named_take_no_signals_and_end() -> None:
    others = set(tasks())
    with engines() as start:
        here, there = start(), start()
        here.read(empty(here).of(), there.grant(owned(there).of()).ticket).wait(LIMIT)
        mine = {tid: name for tid, name in tasks().items() if tid not in others or name == "kvik-log"}
        assert len(mine) > 1
        assert all(name.startswith("kvik-") for name in mine.values())
        for tid in mine:
            status = Path(f"/proc/self/task/{tid}/status").read_text()
            blocked = int(
                next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16
            )
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
                assert blocked >> (number - 1) & 1, f"{mine[tid]} takes {number!r}"
    assert until(lambda: {name for tid, name in tasks().items() if tid not in others} <= {"kvik-log"})


def test_cpus_are_kept() -> None:
    cpu = min(os.sched_getaffinity(0))
    others = set(tasks())
    with engines() as start:
        here, there = start(cpus=[cpu]), start(cpus=[cpu])
        here.read(empty(here).of(), there.grant(owned(there).of()).ticket).wait(LIMIT)
        mine = [tid for tid, name in tasks().items() if tid not in others and name != "kvik-log"]
        assert mine
        assert all(os.sched_getaffinity(tid) == {cpu} for tid in mine)


def test_python_runs_while_a_transfer_is_waited_for() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        transfer = here.read(target.of(), never_issued(there, target.layout), deadline=LIMIT)
        waits = threading.Event()

        def count() -> None:
            waits.wait()
            for _ in range(1_000_000):  # longer than a thread that wants the GIL is kept waiting
                pass
            transfer.cancel()

        thread = threading.Thread(target=count)
        thread.start()
        waits.set()
        with pytest.raises(kvik.Cancelled):
            transfer.wait()
        thread.join(LIMIT)


def test_data_moves_while_somebody_else_holds_the_gil() -> None:
    """The GIL is held by a C function until a transfer of 4 MiB that is on its way has ended."""
    pages, page_bytes = 4, 1 << 20
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there, pages, page_bytes), empty(here, pages, page_bytes)
        late = never_issued(there, source.layout)
        here.read(target.of([0]), there.grant(source.of([0])).ticket, transport="tcp").wait(LIMIT)
        transfer = here.read(target.of(), late, transport="tcp", deadline=2 * LIMIT)
        fd = transfer.done_fd()
        waits = (ctypes.c_int * 2)(fd, select.POLLIN)  # struct pollfd, on a machine of little endian
        there.grant(source.of(), grant_id=late.grant_id)
        assert ctypes.PyDLL(None).poll(waits, 1, int(1000 * LIMIT)) == 1
        os.close(fd)
        assert transfer.done
        transfer.wait(0)
        assert (target.memory == source.memory).all()


def test_python_counts_during_a_large_transfer() -> None:
    pages, page_bytes = 32, 1 << 20
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there, pages, page_bytes), empty(here, pages, page_bytes)
        grant = there.grant(source.of(), use="many")
        ticks, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                ticks[0] += 1

        def counts_in_one() -> bool:
            before = ticks[0]
            here.read(target.of(), grant.ticket, transport="tcp").wait(LIMIT)
            return ticks[0] - before > 1000

        thread = threading.Thread(target=count)
        thread.start()
        # A transfer takes some milliseconds, in which a busy machine may have no processor for the thread.
        counted = any(counts_in_one() for _ in range(50))
        stop.set()
        thread.join(LIMIT)
        assert counted


def waiting(pipe: Pipe, *, how: str) -> None:
    """Wait for a transfer that hangs until the parent sends SIGINT, and say when that got through; five
    times."""
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with kvik.Engine() as here, kvik.Engine() as there:
        target = empty(here)
        ticket = never_issued(there, target.layout)
        transfer = here.read(target.of(), ticket, deadline=2 * LIMIT)
        grant = there.grant(owned(there).of())
        for _ in range(5):
            try:
                pipe.say(ready=True)
                if how == "transfer":
                    transfer.wait()
                else:
                    grant.wait()
            except KeyboardInterrupt:
                pipe.say(at=time.monotonic(), done=transfer.done)
        transfer.cancel()
        try:
            transfer.wait(LIMIT)
        except kvik.Cancelled:
            pipe.say(cancelled=True)


@pytest.mark.parametrize("how", ["transfer", "grant"])
def test_ctrl_c_ends_a_wait_at_once_and_leaves_the_transfer(how: str) -> None:
    with Peer(waiting, how=how) as peer:
        took = []
        for _ in range(5):
            peer.hear()
            time.sleep(0.3)  # until it is in its wait; nothing tells that from outside
            sent = time.monotonic()
            os.kill(peer.pid, signal.SIGINT)
            heard = peer.hear()
            took.append(heard["at"] - sent)
            assert not heard["done"]
        # A machine that has no processor for it right now adds to some of them.
        assert min(took) < 0.1
        assert peer.hear()["cancelled"]
        assert peer.end() == 0


def test_close_is_bounded_with_a_transfer_in_flight() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        transfer = here.read(target.of(), never_issued(there, target.layout), deadline=600.0)
        watch = Watch()
        here.close(1.0)
        assert watch.seconds() < 2.0
        with pytest.raises((kvik.EngineClosed, kvik.Cancelled)):
            transfer.wait(LIMIT)
        memory = target.memory.copy()
        assert (target.memory == memory).all()


def leaving(pipe: Pipe, *, how: str) -> None:
    """Leave the interpreter with everything open."""
    here, there = kvik.Engine(), kvik.Engine()
    memory = bytearray(4096)
    region, shared = here.register(memory), there.allocate(4096)
    layout = kvik.Layout(1, 4096)
    view = np.frombuffer(memoryview(shared), np.uint8)
    transfer = here.read(region.pages(layout, [0]), never_issued(there, layout), deadline=600.0)
    if how == "thread":
        threading.Thread(target=transfer.wait, daemon=True).start()
    if how == "kept":
        globals()["KEPT"] = (here, there, region, shared, view, transfer)
    pipe.say(leaving=True)
    if how == "raise":
        raise SystemExit(7)


@pytest.mark.parametrize(("how", "status"), [("plain", 0), ("thread", 0), ("kept", 0), ("raise", 7)])
def test_the_end_of_the_interpreter_is_bounded(how: str, status: int) -> None:
    with Peer(leaving, how=how) as peer:
        peer.hear()
        watch = Watch()
        assert peer.end() == status
        assert watch.seconds() < 7.0


def test_a_dropped_engine_is_closed_and_says_so() -> None:
    others = set(tasks())
    with pytest.warns(ResourceWarning, match="kvik"):
        kvik.Engine()
    assert until(lambda: {name for tid, name in tasks().items() if tid not in others} <= {"kvik-log"})


def idling(pipe: Pipe) -> None:
    """Connect, then do nothing for a second; the least of a few, as processors that others use are slower."""
    with kvik.Engine() as here, kvik.Engine() as there:
        here.read(empty(here).of(), there.grant(owned(there).of()).ticket).wait(LIMIT)
        time.sleep(0.2)
        used: list[float] = []
        while not used or (min(used) >= IDLE and len(used) < 5):
            before = time.process_time()
            time.sleep(1.0)
            used.append(time.process_time() - before)
        pipe.say(used=min(used))


def test_idle_is_free() -> None:
    with Peer(idling) as peer:
        assert peer.hear()["used"] < IDLE
        assert peer.end() == 0


def test_many_threads_use_one_engine() -> None:
    with engines() as start:
        here, there = start(), start()
        source = owned(there)
        grant = there.grant(source.of(), use="many")
        failed: list[BaseException] = []

        def reads() -> None:
            try:
                for _ in range(20):
                    target = empty(here)
                    here.read(target.of(), grant.ticket).wait(LIMIT)
                    assert (target.memory == source.memory).all()
                    target.region.close()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=reads) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT)
        assert failed == []
