"""A forked child can use nothing of its parent's engine, and breaks nothing of it."""

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import kvik
from tests.python.peers import LIMIT, Peer, Pipe, empty, never_issued, owned


def attempts(
    engine: kvik.Engine, pages: kvik.PageSet, grant: kvik.Grant, transfer: kvik.Transfer, ticket: kvik.Ticket
) -> list[str]:
    """What each method raises."""
    region = pages.region
    tries: list[Callable[[], Any]] = [
        lambda: engine.id,
        lambda: engine.addresses,
        lambda: engine.closed,
        lambda: engine.register(bytearray(64)),
        lambda: engine.allocate(4096),
        lambda: engine.grant(pages),
        lambda: engine.ticket_template(pages.layout),
        lambda: engine.read(pages, ticket),
        lambda: engine.write(pages, ticket),
        lambda: engine.release(ticket),
        lambda: engine.explain(ticket),
        lambda: engine.estimate(ticket, 4096),
        lambda: engine.meet("127.0.0.1:1"),
        lambda: engine.warm_up(ticket),
        engine.stats,
        engine.close,
        lambda: region.nbytes,
        lambda: region.closed,
        lambda: region.pages(pages.layout, [0]),
        region.close,
        lambda: memoryview(region),
        lambda: len(pages),
        lambda: grant.state,
        lambda: grant.ticket,
        grant.revoke,
        lambda: grant.wait(0.1),
        lambda: transfer.done,
        lambda: transfer.wait(0.1),
        transfer.report,
        transfer.error,
        transfer.cancel,
        transfer.done_fd,
    ]
    raised = []
    for one in tries:
        try:
            one()
            raised.append("nothing")
        except Exception as error:
            raised.append(type(error).__name__)
    repr((engine, region, pages, grant, transfer))
    return raised


def forking(pipe: Pipe, *, way: str) -> None:
    """Fork with everything open, let the child try, then finish the parent's own transfers."""
    here, there = kvik.Engine(), kvik.Engine()
    source, target = owned(there), empty(here)
    shared = there.allocate(8 * 4096)
    np.frombuffer(memoryview(shared), np.uint8)[:] = 9
    grant = there.grant(source.of(), use="many")
    here.read(target.of(), grant.ticket).wait(LIMIT)
    target.memory[:] = 0
    pages, late = target.of(), never_issued(there, source.layout)
    transfer = here.read(pages, late, deadline=LIMIT)
    results, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(answer, ",".join(attempts(here, pages, grant, transfer, late)).encode())
        if way == "drop":
            del here, there, source, target, shared, pages, grant, transfer
            gc.collect()
        if way == "_exit":
            os._exit(0)
        sys.exit(0)
    os.close(answer)
    said = b""
    while part := os.read(results, 65536):
        said += part
    _, status = os.waitpid(pid, 0)
    there.grant(source.of(), grant_id=late.grant_id)
    transfer.wait(LIMIT)
    good = bool((target.memory == source.memory).all())
    np.frombuffer(memoryview(shared), np.uint8).sum()
    fresh = there.grant(shared.pages(source.layout, range(8)))
    here.read(target.of(), fresh.ticket).wait(LIMIT)
    pipe.say(
        raised=said.decode().split(","), status=status, good=good, nines=bool((target.memory == 9).all())
    )
    here.close()
    there.close()


def told(way: str) -> dict[str, Any]:
    """Run the story in a process of its own, whose fork is then the only one."""
    with Peer(forking, way=way) as peer:
        answer = peer.hear(2 * LIMIT)
        assert peer.end() == 0
    return answer


def test_every_method_raises_in_the_child_and_the_parent_goes_on() -> None:
    answer = told("_exit")
    assert set(answer["raised"]) == {"EngineForked"}
    assert (answer["status"], answer["good"], answer["nines"]) == (0, True, True)


def test_a_child_that_drops_everything_closes_nothing_of_the_parent() -> None:
    answer = told("drop")
    assert (answer["status"], answer["good"], answer["nines"]) == (0, True, True)


def test_a_child_that_ends_as_python_does_closes_nothing_of_the_parent() -> None:
    answer = told("exit")
    assert (answer["status"], answer["good"], answer["nines"]) == (0, True, True)


def own_engine(pipe: Pipe) -> None:
    """A forked child may have an engine of its own."""
    kvik.Engine().close()
    parent = kvik.Engine()
    known = parent.id
    pid = os.fork()
    if pid == 0:
        with kvik.Engine() as here, kvik.Engine() as there:
            source, target = owned(there), empty(here)
            here.read(target.of(), there.grant(source.of()).ticket).wait(LIMIT)
            os._exit(0 if (target.memory == source.memory).all() and here.id != known else 1)
    pipe.say(status=os.waitpid(pid, 0)[1])
    parent.close()


def test_a_forked_child_can_have_its_own_engine() -> None:
    with Peer(own_engine) as peer:
        assert peer.hear(2 * LIMIT)["status"] == 0
        assert peer.end() == 0


def exporting(pipe: Pipe) -> None:
    """The child inherits a registered buffer: it may let go of it without the engine."""
    memory = bytearray(4096)
    engine = kvik.Engine()
    region = engine.register(memory)
    pid = os.fork()
    if pid == 0:
        del region, engine
        gc.collect()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    try:
        memory.extend(b"more")
        held = False
    except BufferError:
        held = True
    region.close()
    memory.extend(b"more")
    pipe.say(status=status, held=held)
    engine.close()


def test_the_parents_buffer_stays_registered() -> None:
    with Peer(exporting) as peer:
        assert peer.hear() == {"status": 0, "held": True}
        assert peer.end() == 0
