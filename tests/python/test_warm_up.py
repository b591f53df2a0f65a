"""`engine.warm_up`: what a first transfer would wait for, opened before it."""

import asyncio
import socket
import threading
import time

import pytest

import kvik
from tests.busy import Watch
from tests.python.peers import LIMIT, Peer, Pipe, empty, engines, owned, stop

LAYOUT = kvik.Layout(pages=8, run_bytes=4096)


def opened(engine: kvik.Engine) -> list[int]:
    """What must not rise in a transfer after a warm-up: sessions, channels, connections of NICs."""
    connections = [
        line
        for line in engine.metrics().splitlines()
        if line.startswith("kvik_nic_connections_opened_total{")
    ]
    channels = sum(peer.channels for peer in engine.peers())
    return [
        engine.stats()["sessions_opened"],
        channels,
        *(int(line.rpartition(" ")[2]) for line in connections),
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"transport": "tcp"}, "tcp"),
        ({"transport": "local"}, "local"),
        ({"transport": "nics", "nics": "libfabric:tcp"}, "libfabric"),
    ],
)
def test_a_transfer_after_it_opens_nothing(options: dict[str, str], name: str) -> None:
    with engines() as start:
        here, there = start(**options), start(**options)
        source, target = owned(there), empty(here)
        warmed = here.warm_up(there.ticket_template(LAYOUT), timeout=LIMIT).wait(LIMIT)
        assert (warmed.connected, warmed.transports, warmed.opened) == (True, (name,), (name,))
        assert not warmed.failed
        assert warmed.channels == (4 if name == "tcp" else 0)
        assert {pair.state for pair in warmed.pairs} == ({"opened"} if name == "libfabric" else set())
        before = opened(here)
        report = here.read(target.of(), there.grant(source.of()).ticket).wait(LIMIT)
        assert report.transport == name
        assert (target.memory == source.memory).all()
        again = here.warm_up(str(there.ticket_template(LAYOUT))).wait()
        assert again.did_nothing
        assert {pair.state for pair in again.pairs} <= {"already_open"}
        assert again.took_s < LIMIT
        assert opened(here) == before


def test_auto_warms_all_that_both_have_and_an_own_ticket_is_none() -> None:
    with engines() as start:
        here, there = start(nics="libfabric:tcp"), start(nics="libfabric:tcp")
        ticket = there.ticket_template(LAYOUT)
        assert here.warm_up(ticket).wait(LIMIT).transports == ("local", "libfabric", "tcp")
        own = here.warm_up(here.ticket_template(LAYOUT)).wait(LIMIT)
        assert own.transports == ("self",)
        assert own.did_nothing


async def test_it_can_be_awaited_several_times_at_once() -> None:
    with engines() as start:
        here, there = start(transport="tcp"), start(transport="tcp")
        ticket = there.ticket_template(LAYOUT)
        warm_up = here.warm_up(ticket)
        assert repr(warm_up).startswith("<kvik.WarmUp ")
        both = await asyncio.gather(warm_up, here.warm_up(ticket), here.warm_up(ticket))
        assert all(warmed.transports == ("tcp",) for warmed in both)
        assert here.stats()["sessions_opened"] == 1
        assert warm_up.done
        assert warm_up.error() is None
        assert await warm_up == both[0]
        assert repr(warm_up) == "<kvik.WarmUp done: tcp>"


def mute() -> tuple[socket.socket, str]:
    """A port that takes connections and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


async def test_cancelling_the_task_ends_it() -> None:
    listener, address = mute()
    with engines() as start, listener:
        here = start(transport="tcp")
        warm_up = here.warm_up(_ticket_to(address))
        task = asyncio.ensure_future(_await(warm_up))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
        with pytest.raises(kvik.Cancelled):
            warm_up.wait(LIMIT)


async def _await(warm_up: kvik.WarmUp) -> kvik.WarmUpReport:
    return await warm_up


def _ticket_to(address: str) -> kvik.Ticket:
    """A ticket of an engine that has gone, with another address in it."""
    with kvik.Engine(transport="tcp", advertise=address) as engine:
        return engine.ticket_template(LAYOUT)


def test_others_run_while_it_is_waited_for() -> None:
    listener, address = mute()
    with engines() as start, listener:
        here = start(transport="tcp")
        warm_up = here.warm_up(_ticket_to(address), timeout=1.0)
        turns = 0

        def count() -> None:
            nonlocal turns
            while not warm_up.done:
                turns += 1
                time.sleep(0.001)

        other = threading.Thread(target=count)
        other.start()
        with pytest.raises(kvik.WaitTimeout):
            warm_up.wait(0.05)
        watch = Watch()
        with pytest.raises(kvik.PeerUnreachable):
            warm_up.wait()
        assert watch.seconds() < 3.0
        other.join(LIMIT)
        assert turns > 10
        assert isinstance(warm_up.error(), kvik.PeerUnreachable)


def test_no_timeout_is_no_value() -> None:
    with engines() as start:
        here, there = start(), start()
        for wrong in (0.0, 1e9):
            with pytest.raises(kvik.InvalidArgument):
                here.warm_up(there.ticket_template(LAYOUT), timeout=wrong)
        with pytest.raises((ValueError, kvik.InvalidArgument)):
            here.warm_up(there.ticket_template(LAYOUT), timeout=-1.0)


def waits(pipe: Pipe) -> None:
    """A peer that tells of itself and lives until it is killed."""
    with kvik.Engine(transport="tcp") as engine:
        pipe.say(ticket=str(engine.ticket_template(LAYOUT)))
        pipe.hear()


def test_a_dead_peer_is_named_and_a_stopped_one_bounds_it() -> None:
    with engines() as start, Peer(waits) as peer:
        here = start(transport="tcp")
        ticket = peer.hear()["ticket"]
        stop(peer.pid)
        watch = Watch()
        with pytest.raises(kvik.PeerUnreachable, match=kvik.Ticket(ticket).engine_id):
            here.warm_up(ticket, timeout=0.5).wait()
        assert watch.seconds() < 2.0
        peer.process.kill()
        peer.process.wait(LIMIT)
        with pytest.raises(kvik.PeerUnreachable, match=kvik.Ticket(ticket).engine_id):
            here.warm_up(ticket, timeout=LIMIT).wait()
