"""Events, peers and notifications: callbacks, asyncio, and peers that are real processes."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import kvik
from tests.busy import Watch
from tests.python.peers import LIMIT, Peer, Pipe, engines, never_issued, owned, owner, until


def ticket_of(engine: kvik.Engine) -> kvik.Ticket:
    """A ticket that others notify the engine by. Its grant is nobody's business."""
    return engine.ticket_template(kvik.Layout(1, 4096))


def ended_grants(engine: kvik.Engine, count: int) -> list[str]:
    """Make so many events."""
    pages = owned(engine).of()
    grants = [engine.grant(pages) for _ in range(count)]
    for grant in grants:
        grant.revoke()
    return [grant.id for grant in grants]


def kinds(events: kvik.Events, seconds: float) -> Iterator[str]:
    end = time.monotonic() + seconds
    while (event := events.next(max(0.0, end - time.monotonic()))) is not None:
        yield event.kind


# ---- callbacks ----


def test_callbacks_get_every_event_on_threads_of_their_own() -> None:
    with engines() as start:
        engine = start()
        seen: list[tuple[str, str]] = []
        engine.on_event(lambda event: seen.append((threading.current_thread().name, event.grant)))
        ids = ended_grants(engine, 20)
        assert until(lambda: len(seen) == 20)
        assert seen == [("kvik-events", grant) for grant in ids]
        assert threading.current_thread().name != "kvik-events"


def test_a_callback_that_raises_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with engines() as start, caplog.at_level(logging.ERROR, "kvik.events"):
        engine = start()
        seen: list[str] = []

        def fails(event: kvik.Event) -> None:
            seen.append(event.grant)
            raise RuntimeError("no good")

        calm: list[str] = []
        engine.on_event(fails)
        engine.on_event(lambda event: calm.append(event.grant))
        ids = ended_grants(engine, 3)
        assert until(lambda: seen == ids and calm == ids)
        assert until(lambda: len(caplog.records) == 3)
        assert "grant_ended" in caplog.records[0].getMessage()
        assert "no good" in caplog.text


def test_a_removed_callback_is_not_called_again_also_from_within() -> None:
    with engines() as start:
        engine = start()
        seen: list[str] = []
        inside: list[kvik.Subscription] = []
        calm: list[kvik.Event] = []

        def once(event: kvik.Event) -> None:
            seen.append(event.grant)
            inside[0].remove()

        inside.append(engine.on_event(once))
        other = engine.on_event(calm.append)
        ids = ended_grants(engine, 5)
        assert until(lambda: inside[0].removed)
        assert seen == ids[:1]
        other.remove()
        assert other.removed
        ended_grants(engine, 1)
        assert seen == ids[:1]


def test_nothing_is_delivered_after_close() -> None:
    for _ in range(5):
        with engines() as start:
            engine = start()
            closed = threading.Event()
            late: list[str] = []

            def slow(event: kvik.Event, closed: threading.Event = closed, late: list[str] = late) -> None:
                if closed.is_set():
                    late.append(event.kind)
                time.sleep(0.002)

            engine.on_event(slow)
            events = engine.events()
            ended_grants(engine, 200)
            engine.close()
            closed.set()
            time.sleep(0.05)
            assert late == []
            assert events.closed
            assert events.poll() is None
            assert list(events) == []
            with pytest.raises(kvik.EngineClosed):
                events.next(0.0)
            with pytest.raises(kvik.EngineClosed):
                engine.on_event(slow)


def test_a_callback_may_close_its_engine() -> None:
    with engines() as start:
        engine = start()
        engine.on_event(lambda _: engine.close())
        ended_grants(engine, 1)
        assert until(lambda: engine.closed)


def test_the_end_of_the_interpreter_does_not_wait_for_a_callback() -> None:
    program = """
        import threading, time, kvik
        engine = kvik.Engine()
        began = threading.Event()
        def stuck(event):
            began.set()
            time.sleep(600)
        engine.on_event(stuck)
        iterated = threading.Thread(target=lambda: list(engine.events()), daemon=True)
        iterated.start()
        region = engine.allocate(4096)
        engine.grant(region.pages(kvik.Layout(1, 4096), [0])).revoke()
        assert began.wait(60)
        print("stuck", flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said, watch = process.stdout.readline(), Watch()
        try:
            _, errors = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert (process.returncode, said) == (0, "stuck\n"), errors
    assert watch.seconds() < 15


def test_a_forked_child_gets_nothing() -> None:
    with engines() as start:
        engine = start()
        seen: list[int] = []
        engine.on_event(lambda _: seen.append(os.getpid()))
        events = engine.events()
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (events.poll, lambda: events.next(0.0), engine.events, engine.peers, events.fd):
                with contextlib.suppress(kvik.EngineForked):
                    call()
                    break
                refused += 1
            os._exit(refused)
        ended_grants(engine, 3)
        assert until(lambda: len(seen) == 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert set(seen) == {os.getpid()}
        assert [event.kind for event in (events.poll(), events.poll()) if event] == ["grant_ended"] * 2


# ---- iterators ----


async def test_asyncio_iterates_over_events() -> None:
    with engines() as start:
        engine = start()
        got: list[str] = []

        async def reads() -> None:
            async for event in engine.events():
                got.append(event.grant)

        task = asyncio.create_task(reads())
        await asyncio.sleep(0.05)
        first = await asyncio.to_thread(ended_grants, engine, 3)
        while len(got) < 3:
            await asyncio.sleep(0.01)
        second = await asyncio.to_thread(ended_grants, engine, 500)
        while len(got) < 503:
            await asyncio.sleep(0.01)
        assert got == first + second
        await asyncio.to_thread(engine.close)
        await asyncio.wait_for(task, LIMIT)


async def test_asyncio_tells_and_awaits_notices() -> None:
    with engines() as start:
        here, there = start(), start()
        events = there.events()
        notice = here.notify(ticket_of(there), b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(notice)), 0.1)
        async for event in events:
            if event.kind == "notification":
                break
        assert (event.peer, event.incarnation, event.payload) == (here.id, here.incarnation, b"hello")
        await asyncio.wait_for(notice, LIMIT)
        assert notice.done
        assert notice.error() is None
        # A peer that is connected is named by its id too, the other way.
        back = here.events()
        answer = there.notify(here.id, bytearray(b"back"))
        assert (got := back.next(LIMIT)) is not None
        assert got.payload == b"back"
        await asyncio.wait_for(answer, LIMIT)


def test_what_is_not_taken_is_dropped_and_counted() -> None:
    with engines() as start:
        engine = start()
        with engine.events() as events:
            ids = ended_grants(engine, 1100)
            first = events.next(0.0)
            assert first is not None
            assert (first.kind, first.lost) == ("events_lost", 76)
            assert [event.grant for _, event in zip(ids[76:], events, strict=False)] == ids[76:]
            assert events.poll() is None
        assert events.closed


# ---- notifications ----


def sender(pipe: Pipe, *, ticket: str, count: int) -> None:
    """A peer that sends numbered notifications as fast as it may."""
    with kvik.Engine() as engine:
        notices = [engine.notify(ticket, struct.pack("<I", number), deadline=60.0) for number in range(count)]
        for notice in notices:
            notice.wait()
        pipe.say(sent=count, id=engine.id)
        pipe.hear()


def holder(pipe: Pipe) -> None:
    """A peer whose Python does nothing, with the GIL held, until a byte comes, and then counts what came."""
    with kvik.Engine() as engine:
        got: list[bytes] = []
        engine.on_event(lambda event: got.append(event.payload) if event.payload else None)
        pipe.say(ticket=str(ticket_of(engine)), id=engine.id)
        pipe.hear()
        pipe.say(holding=True)
        byte = ctypes.create_string_buffer(1)
        assert ctypes.PyDLL(None).read(0, byte, 1) == 1  # unlike CDLL, it keeps the GIL
        count = pipe.hear()["count"]
        until(lambda: len(got) == count)
        pipe.say(got=[struct.unpack("<I", payload)[0] for payload in got])
        pipe.hear()


def test_ten_thousand_of_two_processes_come_in_order() -> None:
    with engines() as start, contextlib.ExitStack() as stack:
        engine = start()
        got: dict[str, list[int]] = {}

        def counts(event: kvik.Event) -> None:
            if event.kind == "notification":
                got.setdefault(event.peer, []).append(struct.unpack("<I", event.payload)[0])

        engine.on_event(counts)
        ticket = str(ticket_of(engine))
        peers = [stack.enter_context(Peer(sender, ticket=ticket, count=5000)) for _ in range(2)]
        ids = [peer.hear(60.0)["id"] for peer in peers]
        # What was acknowledged was handed to the callback, which may still be at the last of them.
        until(lambda: sum(map(len, list(got.values()))) >= 2 * 5000)
        assert got == {peer: list(range(5000)) for peer in ids}
        for peer in peers:
            peer.say(do="bye")
            assert peer.end() == 0


def test_a_consumer_that_never_takes_costs_a_window_and_nothing_else() -> None:
    with engines() as start:
        here, there = start(), start()
        ticket = ticket_of(there)
        payload = bytes(65536)
        for _ in range(16):
            here.notify(ticket, payload)
        began, watch = time.monotonic(), Watch()
        with pytest.raises(kvik.NotificationsFull) as full:
            here.notify(ticket, b"one more", deadline=0.3)
        assert time.monotonic() - began > 0.25
        assert watch.seconds() < 5.0
        assert full.value.code == "notifications_full"
        assert there.id in str(full.value)
        assert there.stats()["memory_held_bytes"] < 2 << 20
        # Transfers go on beside it.
        source, target = owned(there), owned(here, seed=2)
        here.read(target.of(), there.grant(source.of()).ticket).wait(LIMIT)
        assert (target.memory == source.memory).all()
        with pytest.raises(kvik.InvalidArgument):
            here.notify(ticket, bytes(65537))
        with pytest.raises(kvik.InvalidArgument):
            here.notify(ticket_of(here), b"to myself")
        with pytest.raises(kvik.PeerUnreachable):
            here.notify("00" * 16, b"to nobody")
        with pytest.raises(TypeError):
            here.notify(7, b"")  # type: ignore[arg-type]
        wrong: Any
        for wrong in ("a text", 7, [300]):
            with pytest.raises(TypeError, match=f"payload takes bytes, not {type(wrong).__name__}"):
                here.notify(ticket, wrong)


def test_a_peer_that_holds_the_gil_takes_them_afterwards() -> None:
    with engines() as start, Peer(holder) as peer:
        engine = start()
        ticket = peer.hear()["ticket"]
        events, watch = engine.events(), Watch()
        engine.notify(ticket, struct.pack("<I", 0)).wait(LIMIT)
        peer.say(do="hold")
        assert peer.hear()["holding"]
        # Sending does not wait for the receiver's Python, which goes on only after it.
        notices = [
            engine.notify(ticket, struct.pack("<I", number), deadline=2 * LIMIT) for number in range(1, 300)
        ]
        with pytest.raises(kvik.WaitTimeout):
            notices[-1].wait(5.0)
        assert peer.process.stdin is not None
        peer.process.stdin.write(b"\n")
        peer.say(count=300)
        for notice in notices:
            notice.wait(LIMIT)
        assert peer.hear()["got"] == list(range(300))
        said = list(kinds(events, 0.1))
        assert "peer_lost" not in said, "a busy peer is not a dead one"
        # A machine that stands still between two heartbeats keeps them from coming, too.
        assert said == ["peer_up"] or watch.longest() > 0.4
        peer.say(do="bye")


def test_what_a_killed_peer_did_not_take_is_lost_and_said_to_be() -> None:
    with engines() as start, Peer(owner) as peer:
        engine = start()
        notice = engine.notify(peer.hear()["ticket"], b"unheard")
        short = engine.notify(engine.peers()[0].id, b"unheard too", deadline=0.2)
        with pytest.raises(kvik.DeadlineExceeded):
            short.wait(LIMIT)
        os.kill(peer.pid, signal.SIGKILL)
        watch = Watch()
        with pytest.raises(kvik.PeerLost):
            notice.wait(LIMIT)
        assert watch.seconds() < 3.0
        assert isinstance(notice.error(), kvik.PeerLost)


# ---- peers ----


def next_of(events: kvik.Events, kind: str, seconds: float) -> kvik.Event:
    watch = Watch()
    event = events.next(seconds + LIMIT)
    assert event is not None, f"no {kind} in {seconds + LIMIT} s"
    assert event.kind == kind, event
    assert watch.seconds() < seconds, f"no {kind} in {seconds} s"
    return event


def test_a_peer_is_stopped_goes_on_and_is_killed() -> None:
    with engines() as start, Peer(owner, name="prefill") as peer:
        engine = start()
        events = engine.events()
        hello, watch = peer.hear(), Watch()
        engine.explain(hello["ticket"])
        up = next_of(events, "peer_up", LIMIT)
        assert (up.peer, up.name, up.reason) == (hello["id"], "prefill", "connected")
        (seen,) = engine.peers()
        assert (seen.id, seen.name, seen.state, seen.reason) == (hello["id"], "prefill", "up", "")
        assert seen.address in kvik.Ticket(hello["ticket"]).addresses
        assert seen.silent_s is not None
        assert seen.silent_s < 1.0 + watch.stood()
        assert "tcp" in seen.transports
        assert 'kvik_peers{state="up"} 1\n' in engine.metrics()
        os.kill(peer.pid, signal.SIGSTOP)
        next_of(events, "peer_suspect", 3.0)
        assert [one.state for one in engine.peers()] == ["suspect"]
        os.kill(peer.pid, signal.SIGCONT)
        assert next_of(events, "peer_up", 3.0).reason == "heard again"
        os.kill(peer.pid, signal.SIGKILL)
        lost = next_of(events, "peer_lost", 2.5)
        assert (lost.peer, lost.code) == (hello["id"], "peer_lost")
        (dead,) = engine.peers()
        assert (dead.state, dead.reconnecting) == ("dead", True)
        assert dead.reason
        assert 'kvik_peers{state="dead"} 1\n' in engine.metrics()


def test_a_peer_that_slept_is_connected_to_by_itself_with_its_tickets() -> None:
    with engines() as start, Peer(owner) as peer:
        engine = start()
        ticket = peer.hear()["ticket"]
        engine.explain(ticket)
        events = engine.events()
        os.kill(peer.pid, signal.SIGSTOP)
        next_of(events, "peer_suspect", 3.0)
        next_of(events, "peer_lost", 3.0)
        time.sleep(1.0)
        os.kill(peer.pid, signal.SIGCONT)
        next_of(events, "peer_up", 7.0)
        target = owned(engine)
        engine.read(target.of(), ticket).wait(LIMIT)


def test_a_peer_that_was_started_anew_voids_its_tickets() -> None:
    with engines() as start:
        engine = start()
        with Peer(owner) as peer:
            old = kvik.Ticket(peer.hear()["ticket"])
            engine.explain(old)
            events = engine.events()
        next_of(events, "peer_lost", 3.0)
        with Peer(owner, listen=old.addresses[0]) as again:
            new = again.hear()["ticket"]
            event = next_of(events, "peer_restarted", 8.0)
            assert event.peer == old.engine_id
            assert kvik.Ticket(new).engine_id in event.reason
            os.kill(again.pid, signal.SIGSTOP)
            watch = Watch()
            with pytest.raises(kvik.PeerRestarted):
                engine.read(owned(engine).of(), old).wait(LIMIT)
            assert watch.seconds() < 1.0, "it was dialled"
            os.kill(again.pid, signal.SIGCONT)
            engine.read(owned(engine).of(), new).wait(LIMIT)


def test_closing_in_order_is_said_and_not_dialled() -> None:
    with engines() as start, Peer(owner) as peer:
        engine = start()
        engine.explain(peer.hear()["ticket"])
        events = engine.events()
        peer.say(do="bye")
        assert "in order" in next_of(events, "peer_lost", 5.0).reason
        (gone,) = engine.peers()
        assert (gone.state, gone.reconnecting) == ("dead", False)


def succeeding(pipe: Pipe) -> None:
    """Close an engine, start another at its address, close the first once more, and leave the other open."""
    with kvik.Engine() as first:
        old = ticket_of(first)
        first.close()
        second = kvik.Engine(listen=old.addresses[0])
        assert second.id == old.engine_id
    # A thread that never ends holds it: nothing but the end of the interpreter closes it.
    threading.Thread(target=lambda _: threading.Event().wait(), args=(second,), daemon=True).start()
    pipe.say(ticket=str(never_issued(second, kvik.Layout(1, 4096))))
    pipe.hear()


def test_an_engine_that_is_closed_again_leaves_its_successor_to_be_closed_in_order() -> None:
    with engines() as start, Peer(succeeding) as peer:
        engine = start()
        engine.explain(peer.hear()["ticket"])
        events = engine.events()
        peer.say(do="bye")
        assert "in order" in next_of(events, "peer_lost", 5.0).reason
        assert peer.end() == 0


def test_every_kind_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    for kind in get_args(kvik.EventKind):
        assert f"`{kind}`" in page
    for state in get_args(kvik.PeerStateName):
        assert f"`{state}`" in page
