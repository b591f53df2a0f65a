"""Meeting an engine at its address, without a ticket."""

import asyncio
import os
import socket
import threading

import pytest

import kvik
from tests.python.peers import LIMIT, engines


def test_who_listens_is_met_and_notified_by_its_id() -> None:
    with engines() as start:
        server, client = start(name="store"), start()
        events = server.events()
        met = client.meet(server.addresses[0], deadline=LIMIT)
        assert (met.id, met.incarnation, met.name) == (server.id, server.incarnation, "store")
        assert (met.state, met.address) == ("up", server.addresses[0])
        notice = client.notify(met.id, b"hello")
        told = [event for event in (events.next(LIMIT), events.next(LIMIT)) if event is not None]
        assert [event.payload for event in told if event.kind == "notification"] == [b"hello"]
        notice.wait(LIMIT)
        # The other way round, and again: there is one session.
        assert server.meet(client.addresses[0]).id == client.id
        assert client.meet(f"localhost:{server.addresses[0].rpartition(':')[2]}").id == server.id
        assert client.stats()["sessions_opened"] == 1


async def test_asyncio_meets_on_a_thread() -> None:
    with engines() as start:
        server, client = start(), start()
        met = await asyncio.gather(*(asyncio.to_thread(client.meet, server.addresses[0]) for _ in range(4)))
        assert {peer.id for peer in met} == {server.id}
        assert client.stats()["sessions_opened"] == 1


def test_what_cannot_be_met_has_its_error() -> None:
    with engines() as start, socket.create_server(("127.0.0.1", 0)) as silent:
        client = start()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(kvik.PeerUnreachable, match="deadline passed"):
            client.meet(address, deadline=0.2)
        with pytest.raises(kvik.InvalidArgument, match="itself"):
            client.meet(client.addresses[0])
        with pytest.raises(kvik.InvalidArgument, match="HOST:PORT"):
            client.meet("127.0.0.1")
        with pytest.raises(kvik.InvalidArgument, match="deadline"):
            client.meet(address, deadline=0.0)
        with pytest.raises(TypeError):
            client.meet(7)  # type: ignore[arg-type]
        ended: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(kvik.EngineClosed) as closed:
                client.meet(address)
            ended.append(closed.value)

        thread = threading.Thread(target=wait)
        thread.start()
        client.close()
        thread.join(LIMIT)
        assert len(ended) == 1


def test_a_forked_child_meets_nobody() -> None:
    with engines() as start:
        server, client = start(), start()
        client.meet(server.addresses[0])
        if (child := os.fork()) == 0:
            try:
                client.meet(server.addresses[0])
            except kvik.EngineForked:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.meet(server.addresses[0]).id == server.id
