"""Each way to go wrong has its own exception, and a text that says what to do."""

import contextlib
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import kvik
from kvik.store import namespace_id
from tests.python import forge
from tests.python.peers import LIMIT, Peer, Pipe, empty, engines, never_issued, owned, owner

Kinds = type[kvik.KvikError] | tuple[type[kvik.KvikError], ...]


@contextlib.contextmanager
def refused(kinds: Kinds, match: str | None = None) -> Iterator[None]:
    """The block fails with one of these, told so that a person can act on it."""
    with pytest.raises(kinds, match=match) as told:
        yield
    error = told.value
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(error).__name__).lstrip("_")
    assert error.code == snake
    assert len(str(error)) > 30, "the text says too little"
    assert any(mark in str(error) for mark in (": ", "; ", ", ")), "the text only names the error"
    assert "hush" not in str(error), "the text tells the secret"


@pytest.fixture
def pair() -> Iterator["Two"]:
    with engines() as start:
        yield Two(start(), start())


class Two:
    """A reader and an owner, with pages each."""

    def __init__(self, here: kvik.Engine, there: kvik.Engine) -> None:
        self.here, self.there = here, there
        self.source, self.target = owned(there), empty(here)

    def never_issued(self) -> kvik.Ticket:
        """A ticket whose read waits until its deadline. The engines are connected: where the deadline passes
        before that, the error is another one."""
        ticket = never_issued(self.there, self.source.layout)
        self.here.explain(ticket)
        return ticket

    def read(self, ticket: kvik.Ticket | str, **options: Any) -> kvik.Report:
        return self.here.read(self.target.of(), ticket, **options).wait(LIMIT)


def test_the_family_of_errors() -> None:
    names = [name for name in kvik.errors.__all__ if name != "KvikError"]
    classes: list[type[kvik.KvikError]] = [getattr(kvik, name) for name in names]
    assert len(classes) == 47
    assert len({cls.code for cls in classes}) == 47
    assert all(issubclass(cls, kvik.KvikError) and cls.__module__ == "kvik" for cls in classes)
    assert issubclass(kvik.InvalidArgument, ValueError)
    assert issubclass(kvik.PageOutOfRange, IndexError)
    assert issubclass(kvik.WaitTimeout, TimeoutError)
    assert issubclass(kvik.DeadlineExceeded, TimeoutError)
    assert issubclass(kvik.PeerUnreachable, ConnectionError)
    assert issubclass(kvik.PeerLost, ConnectionError)


# Options and arguments


def test_an_unknown_transport() -> None:
    with refused(kvik.UnknownTransport, '"auto", "tcp", "local" or "nics"'):
        kvik.Engine(transport="rdma")  # type: ignore[arg-type]


def test_an_unknown_transport_of_a_transfer(pair: Two) -> None:
    ticket = pair.there.grant(pair.source.of()).ticket
    with refused(kvik.UnknownTransport, '"auto", "tcp", "local" or "nics"'):
        pair.read(ticket, transport="efa")


def test_an_unknown_class_of_a_transfer(pair: Two) -> None:
    ticket = pair.there.grant(pair.source.of()).ticket
    with refused(kvik.InvalidArgument, '"handover" or "bulk"'):
        pair.read(ticket, traffic_class="background")


def test_an_unknown_option() -> None:
    with refused(kvik.InvalidArgument, "did you mean channels"):
        kvik.Engine(chanels=4)  # type: ignore[call-arg]
    with refused(kvik.InvalidArgument, "the options are listen"):
        kvik.Engine(zzz=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "sometimes"},
        {"channels": 0},
        {"channels": -1},
        {"channels": 1 << 20},
        {"memory_cap": 4096},
        {"secret": "short"},
        {"io_threads": 0},
        {"deadline": 0.0},
        {"deadline": -1.0},
        {"deadline": float("inf")},
        {"deadline": float("nan")},
        {"memory_cap": "12 parsecs"},
        {"listen": "nonsense"},
        {"listen": []},
        {"listen": "127.0.0.1:99999"},
        {"secret": ""},
        {"cpus": [100_000]},
        {"cpus": []},
        {"numa_node": 4095},
    ],
    ids=str,
)
def test_an_option_that_cannot_be(options: dict[str, Any]) -> None:
    with refused(kvik.InvalidArgument):
        kvik.Engine(**options)


def test_grant_options_that_cannot_be(pair: Two) -> None:
    pages = pair.source.of()
    wrong: list[dict[str, Any]] = [
        {"right": "own"}, {"use": 0}, {"use": "some"}, {"expiry": -1.0}, {"expiry": 700.0}, {"grant_id": "12"}
    ]  # fmt: skip
    for options in wrong:
        with refused(kvik.InvalidArgument):
            pair.there.grant(pages, **options)


def test_waits_that_cannot_be(pair: Two) -> None:
    for timeout in (-1.0, 1e30, float("inf"), float("nan")):
        with refused(kvik.InvalidArgument, "timeout"):
            pair.here.close(timeout=timeout)


# Page sets and shapes


def test_numbers_that_cannot_be_name_their_argument_and_its_bounds(pair: Two) -> None:
    reader, pages = pair.here, pair.target.of()
    region, layout = pair.target.region, pair.target.layout
    ticket = reader.grant(pages).ticket
    namespace = kvik.Namespace(
        model="m",
        kv_dtype="float16",
        layers=(0, 2),
        model_layers=2,
        heads=(0, 1),
        model_heads=1,
        block_tokens=16,
    )
    calls: list[tuple[str, int, Callable[[Any], object]]] = [
        ("layers", 32, lambda wrong: region.pages(layout, [0], layers=(wrong, 1))),
        ("slices", 32, lambda wrong: region.pages(layout, [0], slices=(0, wrong))),
        ("parts", 32, lambda wrong: region.pages(layout, [0], parts=wrong)),
        ("remote_layers", 32, lambda wrong: reader.read(pages, ticket, remote_layers=(wrong, 1))),
        ("remote_slices", 32, lambda wrong: kvik.Read(pages, ticket, remote_slices=(0, wrong))),
        ("remote_parts", 32, lambda wrong: reader.write(pages, ticket, remote_parts=wrong)),
        ("readers", 16, lambda wrong: reader.release(ticket, readers=wrong)),
        ("use", 32, lambda wrong: reader.grant(pages, use=wrong)),
        ("nbytes", 64, reader.allocate),
        ("nbytes", 64, lambda wrong: reader.estimate(ticket, wrong)),
        ("address", 64, lambda wrong: reader.register((wrong, 8))),
        ("pages", 32, lambda wrong: kvik.Layout(wrong, 8)),
        ("offset", 64, lambda wrong: kvik.Layout(4, 8, offset=wrong)),
        ("layer_offsets", 64, lambda wrong: kvik.Layout(4, 8, layer_offsets=[0, wrong])),
        ("channels", 16, lambda wrong: kvik.Engine(channels=wrong)),
        ("cpus", 64, lambda wrong: kvik.Engine(cpus=[wrong])),
        ("window", 64, lambda wrong: kvik.Engine(window=wrong)),
        ("block_tokens", 64, lambda wrong: kvik.content_chain(b"", b"", [1], wrong)),
        ("offset", 64, lambda wrong: kvik.content_chain(b"", b"", [1], 16, [(wrong, b"")])),
        ("model_layers", 32, lambda wrong: namespace_id(replace(namespace, model_layers=wrong))),
        ("heads", 32, lambda wrong: namespace_id(replace(namespace, heads=(wrong, 1)))),
    ]
    for name, bits, call in calls:
        for wrong in (-1, 1 << bits, 10**400):
            said = rf"\b{name}={str(wrong)[:40]} .*from 0 to {(1 << bits) - 1}"
            with refused(kvik.InvalidArgument, said):
                call(wrong)


def test_a_page_out_of_range(pair: Two) -> None:
    with refused(kvik.PageOutOfRange, "position 2"):
        pair.source.of([0, 1, 8])
    with refused(kvik.PageOutOfRange):
        pair.source.region.pages(pair.source.layout, [0], layers=(0, 2))
    with refused(kvik.PageOutOfRange):
        pair.source.region.pages(kvik.Layout(9, 4096), [0])


def test_an_empty_page_set(pair: Two) -> None:
    with refused(kvik.InvalidArgument, "empty"):
        pair.source.of([])


def test_overlapping_destination_pages(pair: Two) -> None:
    ticket = pair.there.grant(pair.source.of([0, 1])).ticket
    with refused(kvik.DuplicatePage, "twice"):
        pair.here.read(pair.target.of([3, 3]), ticket).wait(LIMIT)
    with refused(kvik.DuplicatePage, "twice"):
        pair.there.grant(pair.source.of([3, 3]), right="write")


def test_a_layout_that_overlaps() -> None:
    with refused(kvik.LayoutMismatch, "page_stride"):
        kvik.Layout(4, 64, page_stride=32)
    with refused(kvik.LayoutMismatch):
        kvik.Layout(2**32 - 1, 2**62)
    with refused(kvik.InvalidArgument, "layer_offsets"):
        kvik.Layout(4, 64, layers=3, layer_offsets=[0, 1000])


def test_an_engine_with_another_kv_shape(pair: Two) -> None:
    ticket = pair.there.grant(pair.source.of(), use="many").ticket
    for other in (empty(pair.here, 8, 2048), empty(pair.here, 4, 4096)):
        with refused(kvik.ShapeMismatch):
            pair.here.read(other.of(), ticket).wait(LIMIT)


def test_a_page_that_was_not_granted(pair: Two) -> None:
    ticket = pair.there.grant(pair.source.of([1, 2])).ticket
    with refused(kvik.PageNotGranted):
        pair.here.read(pair.target.of([0, 1]), ticket, [2, 3]).wait(LIMIT)


def test_other_content_and_none(pair: Two) -> None:
    chain = kvik.content_chain(b"a model", b"", range(24), 8)
    content, other = kvik.Content(chain, b"all"), kvik.Content(chain, b"a part")
    grant = pair.there.grant(pair.source.of([1, 2, 3]), content=content)
    local = pair.target.of([0, 1, 2])
    for stated, error in ((None, kvik.ContentRequired), (other, kvik.ContentMismatch)):
        with refused(error):
            pair.here.read(local, grant.ticket, content=stated).wait(LIMIT)
        with refused(error):
            pair.here.release(grant.ticket, content=stated).wait(LIMIT)
        with refused(error):
            pair.here.extend(grant.ticket, 10.0, content=stated).wait(LIMIT)
    with refused(kvik.InvalidArgument):
        pair.here.read(pair.target.of([0, 1]), grant.ticket, [0, 2], content=content).wait(LIMIT)
    with refused(kvik.InvalidArgument):
        pair.here.read(local, grant.ticket, (1, 4), content=content)
    with refused(kvik.InvalidArgument):
        pair.there.grant(pair.source.of([1, 2]), content=content)
    assert grant.state == "live"
    pair.here.extend(grant.ticket, 10.0, content=content).wait(LIMIT)
    pair.here.read(local, grant.ticket, (0, 3), content=content).wait(LIMIT)
    assert grant.wait(LIMIT) == "consumed"


def test_content_that_cannot_be() -> None:
    for chain, part in ((b"", b"all"), (bytes(31), b"all"), (bytes(32), b""), (bytes(32), bytes(5000))):
        with refused(kvik.InvalidArgument):
            kvik.Content(chain, part)


def test_pages_named_by_the_owners_ids(pair: Two) -> None:
    ticket = pair.there.grant(pair.source.of([1, 2])).ticket
    for call in (pair.here.read, pair.here.write):
        with pytest.raises(TypeError, match="use positions="):
            call(pair.target.of([0]), ticket, remote=[1])  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="no keyword argument colour="):
            call(pair.target.of([0]), ticket, colour=[1])  # type: ignore[call-arg]
        with refused(kvik.InvalidArgument):
            call(pair.target.of([0]), ticket, (1, 2, 3))


def test_pages_of_another_engine(pair: Two) -> None:
    with refused(kvik.InvalidArgument):
        pair.here.grant(pair.source.of())


# Tickets


def test_a_truncated_or_altered_ticket(pair: Two) -> None:
    text = str(pair.there.grant(pair.source.of()).ticket)
    altered = text[:30] + ("A" if text[30] != "A" else "B") + text[31:]
    for wrong in (text[:-1], text[:20], altered, "", "hello", text + "x" * 300):
        with refused(kvik.TicketInvalid):
            kvik.Ticket(wrong)
        with refused(kvik.TicketInvalid):
            pair.read(wrong)


def test_a_ticket_of_another_version(pair: Two) -> None:
    text = str(pair.there.grant(pair.source.of()).ticket)
    with refused(kvik.TicketVersion, "same release"):
        pair.read(text.replace("kvik1.", "kvik2."))


def test_a_ticket_of_another_engine(pair: Two) -> None:
    with engines() as start:
        elsewhere = start(advertise=pair.there.addresses)
        ticket = elsewhere.grant(owned(elsewhere).of()).ticket
        with refused(kvik.TicketForeign):
            pair.read(ticket, deadline=LIMIT)


def test_a_ticket_of_another_incarnation(pair: Two) -> None:
    text = str(pair.there.grant(pair.source.of()).ticket)
    with refused(kvik.PeerRestarted):
        pair.read(forge.altered(text, forge.INCARNATION, b"\1" * 8), deadline=LIMIT)


def test_a_ticket_of_another_region(pair: Two) -> None:
    text = str(pair.there.grant(pair.source.of()).ticket)
    with refused((kvik.TicketForeign, kvik.LayoutMismatch)):
        pair.read(forge.altered(text, forge.LAYOUT, b"\1" * 8), deadline=LIMIT)


# Grants


def test_the_wrong_right(pair: Two) -> None:
    with refused(kvik.GrantWrongRight):
        pair.read(pair.there.grant(empty(pair.there).of(), right="write").ticket)
    with refused(kvik.GrantWrongRight):
        pair.here.write(pair.target.of(), pair.there.grant(pair.source.of()).ticket).wait(LIMIT)


def test_a_grant_that_was_never_issued(pair: Two) -> None:
    with refused((kvik.GrantUnknown, kvik.DeadlineExceeded)):
        pair.read(pair.never_issued(), deadline=0.5)


def test_an_expired_grant(pair: Two) -> None:
    grant = pair.there.grant(pair.source.of(), expiry=0.2)
    assert grant.wait(LIMIT) == "expired"
    with refused(kvik.GrantExpired):
        pair.read(grant.ticket)
    with refused(kvik.GrantExpired):
        grant.extend(10.0)


def test_a_consumed_grant(pair: Two) -> None:
    grant = pair.there.grant(pair.source.of())
    pair.read(grant.ticket)
    assert grant.wait(LIMIT) == "consumed"
    with refused(kvik.GrantConsumed):
        pair.read(grant.ticket)


def test_an_error_names_what_it_is_about(pair: Two) -> None:
    grant = pair.there.grant(pair.source.of())
    grant.revoke()
    with pytest.raises(kvik.GrantRevoked) as told:
        pair.read(grant.ticket)
    error = told.value
    assert (error.peer, error.grant) == (pair.there.id, grant.ticket.grant_id)
    assert (error.region, error.page) == (None, None)
    transfer = pair.here.read(pair.target.of(), never_issued(pair.there, pair.source.layout))
    with pytest.raises(kvik.RegionBusy) as busy:
        pair.target.region.close(0.2)
    assert f"region {busy.value.region} is still used" in str(busy.value)
    transfer.cancel()


def test_a_revoked_grant(pair: Two) -> None:
    grant = pair.there.grant(pair.source.of())
    grant.revoke()
    with refused(kvik.GrantRevoked):
        pair.read(grant.ticket)


def test_a_region_that_was_closed(pair: Two) -> None:
    grant = pair.there.grant(pair.source.of())
    grant.revoke()
    pair.source.region.close()
    with refused(kvik.RegionClosed):
        pair.source.of()


def test_the_owner_closes_its_region(pair: Two) -> None:
    grant = pair.there.grant(pair.source.of())
    pair.source.region.close()
    assert grant.state == "closed"
    with refused((kvik.RegionClosed, kvik.GrantRevoked)):
        pair.read(grant.ticket)


def test_a_region_closed_with_a_transfer_in_flight(pair: Two) -> None:
    transfer = pair.here.read(pair.target.of(), never_issued(pair.there, pair.source.layout))
    with refused(kvik.RegionBusy):
        pair.target.region.close(0.2)
    transfer.cancel()
    with refused(kvik.Cancelled):
        transfer.wait(LIMIT)


# Peers


def advertising(start: Callable[..., kvik.Engine], port: int) -> kvik.Ticket:
    """A ticket that names a port of somebody else."""
    engine = start(advertise=f"127.0.0.1:{port}")
    return engine.grant(owned(engine).of()).ticket


def test_a_peer_that_is_not_there(pair: Two) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        with engines() as start, refused(kvik.PeerUnreachable, "127.0.0.1"):
            pair.read(advertising(start, taken.getsockname()[1]), deadline=LIMIT)


def test_a_peer_that_speaks_another_protocol(pair: Two) -> None:
    class Http(socketserver.BaseRequestHandler):
        """Answers as a web server does to what it does not understand."""

        def handle(self) -> None:
            self.request.settimeout(LIMIT)
            self.request.recv(1024)
            self.request.sendall(
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Http) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with engines() as start, refused(kvik.PeerNotKvik):
                pair.read(advertising(start, server.server_address[1]), deadline=LIMIT)
        finally:
            server.shutdown()
            thread.join(LIMIT)


def test_a_peer_that_accepts_and_says_nothing(pair: Two) -> None:
    kinds = (kvik.PeerNotKvik, kvik.PeerUnreachable, kvik.DeadlineExceeded)
    with socket.create_server(("127.0.0.1", 0)) as silent, engines() as start, refused(kinds):
        pair.read(advertising(start, silent.getsockname()[1]), deadline=2.0)


def test_a_wrong_secret_and_none() -> None:
    with engines() as start:
        there = start(secret=b"hush-hush-hush")
        ticket = there.grant(owned(there).of(), use="many").ticket
        wrong, none = start(secret=b"hush-hush-hash"), start()
        with refused(kvik.SecretMismatch):
            wrong.read(empty(wrong).of(), ticket).wait(LIMIT)
        with refused(kvik.SecretRequired):
            none.read(empty(none).of(), ticket).wait(LIMIT)
        right = start(secret=b"hush-hush-hush")
        right.read(empty(right).of(), ticket).wait(LIMIT)


def test_an_open_address_needs_a_secret() -> None:
    with refused(kvik.SecretRequired, "secret"):
        kvik.Engine("0.0.0.0:0")
    kvik.Engine("0.0.0.0:0", secret=os.urandom(16)).close()


def brief_owner(pipe: Pipe) -> None:
    """Grants, and stays until it is told that it may end."""
    owner(pipe)


def test_a_peer_that_is_gone(pair: Two) -> None:
    with Peer(brief_owner) as peer:
        ticket = kvik.Ticket(peer.hear()["ticket"])
        pair.read(ticket)
        waiting = ticket.with_grant(os.urandom(16).hex(), 60.0)
        transfer = pair.here.read(pair.target.of(), waiting, deadline=2 * LIMIT)
        with refused(kvik.WaitTimeout, "goes on"):
            transfer.wait(0.1)
        peer.process.kill()
        with refused((kvik.PeerLost, kvik.PeerUnreachable)):
            transfer.wait(LIMIT)


# Limits


def test_a_deadline_holds(pair: Two) -> None:
    transfer = pair.here.read(pair.target.of(), pair.never_issued(), deadline=0.3)
    with refused((kvik.DeadlineExceeded, kvik.GrantUnknown)):
        transfer.wait()


def test_the_memory_cap() -> None:
    pages = 1 << 20  # whose ids alone take 4 MiB
    with refused(kvik.MemoryCapReached, "cap"), engines() as start:
        here, there = start(memory_cap="1MiB"), start()
        source, target = owned(there, pages, 1), empty(here, pages, 1)
        here.read(target.of(), there.grant(source.of()).ticket, transport="tcp").wait(LIMIT)


def test_a_closed_engine() -> None:
    with engines() as start:
        engine = start()
        pages, target = owned(engine).of(), empty(engine).of()
        ticket = engine.grant(pages).ticket
        engine.close()
        for act in (
            lambda: engine.allocate(4096),
            lambda: engine.grant(pages),
            lambda: engine.read(target, ticket),
            lambda: engine.release(ticket),
        ):
            with refused((kvik.EngineClosed, kvik.RegionClosed)):
                act()
