"""Transfers through the public Python face: in one process and between two."""

import dataclasses
import inspect
import pickle
import typing
from typing import Any, Literal

import numpy as np
import pytest

import kvik
from tests.python.peers import (
    LIMIT,
    Peer,
    empty,
    engines,
    never_issued,
    owned,
    owner,
    random_bytes,
    random_seed,
)

Transport = Literal["tcp", "local"]
TRANSPORTS: tuple[Transport, ...] = ("tcp", "local")
SECRET = "hush-hush-hush"  # noqa: S105 - it is here to be looked for


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_read_brings_the_pages_in_order(transport: Transport) -> None:
    seed = random_seed()
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there, seed=seed), empty(here)
        grant = there.grant(source.of([5, 0, 3]))
        report = here.read(target.of([1, 2, 7]), str(grant.ticket), transport=transport).wait(LIMIT)
        assert (target.rows[[1, 2, 7]] == source.rows[[5, 0, 3]]).all()
        assert not target.rows[[0, 3, 4, 5, 6]].any()
        assert grant.wait(LIMIT) == "consumed"
    assert (report.bytes, report.pages, report.transport) == (3 * 4096, 3, transport)
    assert "grant" in report.checks
    assert ("generation" in report.checks) == (transport == "local")
    assert ("page_checksum" in report.checks) == (transport == "tcp")
    assert 0 <= report.wire_s <= report.total_s < LIMIT
    assert dataclasses.asdict(report)["mechanism"] == report.mechanism


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_write_places_the_pages(transport: Transport) -> None:
    seed = random_seed()
    with engines() as start:
        here, there = start(), start()
        source, target = owned(here, seed=seed), empty(there)
        grant = there.grant(target.of(), right="write")
        here.write(source.of(), grant.ticket, transport=transport).wait(LIMIT)
        assert (target.memory == source.memory).all()


def test_a_ticket_of_the_engine_itself_is_served() -> None:
    with engines() as start:
        engine = start()
        source, target = owned(engine), empty(engine)
        report = engine.read(target.of(), engine.grant(source.of()).ticket).wait(LIMIT)
        assert report.transport == "self"
        assert (target.memory == source.memory).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_read_between_processes(transport: Transport) -> None:
    seed = random_seed()
    with Peer(owner, seed=seed) as peer, engines() as start:
        told = peer.hear()
        target = empty(start())
        report = target.region.engine.read(target.of(), told["ticket"], transport=transport).wait(LIMIT)
        assert (target.memory == random_bytes(target.memory.size, seed)).all()
        assert report.transport == transport
        peer.say(do="bye")
        assert peer.end() == 0


def test_write_between_processes() -> None:
    seed = random_seed()
    with Peer(owner, right="write") as peer, engines() as start:
        ticket = peer.hear()["ticket"]
        source = owned(start(), seed=seed)
        source.region.engine.write(source.of(), ticket).wait(LIMIT)
        assert peer.ask(do="same", seed=seed)["same"]


def test_a_grant_is_read_in_parts_and_confirmed_by_the_last() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        grant = there.grant(source.of())
        ids = np.arange(8, dtype=np.int64)
        here.read(target.of(ids[:4]), grant.ticket, ids[:4], confirm=False).wait(LIMIT)
        assert grant.state == "live"
        here.read(target.of(ids[:3:-1]), grant.ticket, ids[:3:-1]).wait(LIMIT)
        assert grant.wait(LIMIT) == "consumed"
        assert (target.memory == source.memory).all()


def test_two_readers_consume_a_grant_for_two() -> None:
    with engines() as start:
        there, readers = start(), (start(), start())
        source = owned(there)
        grant = there.grant(source.of(), use=2)
        for reader in readers:
            assert grant.state == "live"
            reader.read(empty(reader).of(), grant.ticket).wait(LIMIT)
        assert grant.wait(LIMIT) == "consumed"


def test_release_confirms_without_moving() -> None:
    with engines() as start:
        here, there = start(), start()
        grant = there.grant(owned(there).of())
        here.release(grant.ticket).wait(LIMIT)
        assert grant.wait(LIMIT) == "consumed"


def test_layers_and_slices_choose_elements() -> None:
    layers, pages, slices, run = 3, 4, 2, 64
    with engines() as start:
        here, there = start(), start()
        memory = random_bytes(layers * pages * slices * run, random_seed())
        source = there.register(memory).pages(
            kvik.Layout(pages, run, layers=layers, slices=slices), [2, 0], layers=(1, 3), slices=(1, 2)
        )
        into = np.zeros((2, 2, run), np.uint8)
        target = here.register(into).pages(kvik.Layout(2, run, layers=2), range(2))
        here.read(target, there.grant(source).ticket).wait(LIMIT)
        assert (into == memory.reshape(layers, pages, slices, run)[1:3, [2, 0], 1]).all()


def test_a_read_waits_for_a_grant_that_is_issued_later() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        ticket = never_issued(there, source.layout)
        transfer = here.read(target.of(), ticket, deadline=LIMIT)
        with pytest.raises(kvik.WaitTimeout):
            transfer.wait(0.2)
        assert not transfer.done
        assert transfer.report() is None
        assert transfer.error() is None
        there.grant(source.of(), grant_id=ticket.grant_id)
        transfer.wait(LIMIT)
        assert transfer.report() is not None
        assert (target.memory == source.memory).all()


def test_the_lives_of_a_grant() -> None:
    with engines() as start:
        engine = start()
        pages = owned(engine).of()
        revoked, expired = engine.grant(pages), engine.grant(pages, expiry=0.3)
        assert engine.grant(pages, expiry=LIMIT, max_expiry=3 * LIMIT).extend(LIMIT) > LIMIT
        assert revoked.wait(0.05) is None
        revoked.revoke()
        assert revoked.state == "revoked"
        assert expired.wait(LIMIT) == "expired"
        closed = engine.grant(pages)
        engine.close()
        assert closed.state == "closed"


def test_cancel_ends_a_transfer() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        transfer = here.read(target.of(), never_issued(there, target.layout))
        transfer.cancel()
        with pytest.raises(kvik.Cancelled):
            transfer.wait(LIMIT)
        assert isinstance(transfer.error(), kvik.Cancelled)
        target.region.close()


def test_a_ticket_is_short_and_survives_text_and_pickle() -> None:
    with engines() as start:
        engine = start()
        ticket = engine.grant(owned(engine).of(), expiry=90.0).ticket
        assert len(str(ticket)) <= 256
        assert kvik.Ticket(str(ticket)) == ticket == pickle.loads(pickle.dumps(ticket))  # noqa: S301 - its own
        assert ticket.engine_id == engine.id
        assert ticket.incarnation == engine.incarnation
        assert ticket.addresses == engine.addresses
        assert ticket.right == "read"
        assert ticket.expires_in == pytest.approx(90.0)
        assert ticket.layout_digest == kvik.Layout(8, 4096).digest


def test_explain_and_stats_say_what_would_be_and_was() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        grant = there.grant(source.of(), use="many")
        told = here.explain(grant.ticket)
        assert told["transport"] in TRANSPORTS
        assert told["mechanism"]
        assert told["estimate"] is None
        report = here.read(target.of(), grant.ticket).wait(LIMIT)
        assert report.transport == told["transport"]
        assert report.estimate is None
        stats = here.stats()
        assert stats
        assert all(isinstance(value, int) for value in stats.values())


def test_estimates_are_of_what_was_measured() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there, 64), empty(here, 64)
        ticket = there.grant(source.of(), use="many").ticket
        assert here.estimate(ticket, "1GiB") is None
        assert here.peers() == []
        reports = [
            here.read(target.of(range(count)), ticket, positions=range(count)).wait(LIMIT)
            for count in (1, 64, 2, 32)
        ]
        assert reports[0].estimate is None
        before = [report.estimate for report in reports[1:]]
        assert [one.samples for one in before if one is not None] == [1, 2, 3]
        for nbytes in (1 << 20, 1 << 30):
            told = here.estimate(str(ticket), nbytes)
            assert isinstance(told, kvik.Estimate)
            assert (told.queued_bytes, told.samples) == (0, 4)
            assert told.bytes_per_second > 0
            assert told.seconds == pytest.approx(told.start_s + nbytes / told.bytes_per_second, abs=1e-6)
        assert told is not None
        assert here.estimate(ticket, "1GiB") == here.estimate(there.id, "1GiB") == told
        smallest = here.explain(ticket)["estimate"]
        assert smallest is not None
        assert smallest.seconds == smallest.start_s == told.start_s
        with pytest.raises(AttributeError):
            told.seconds = 0.0  # type: ignore[misc]
        # What is open goes first: a read of a grant that is not given yet waits.
        waits = here.read(target.of(), never_issued(there, source.layout))
        behind = here.estimate(ticket, 1)
        assert behind is not None
        assert behind.queued_bytes == 64 * 4096
        waits.cancel()
        # The owner has measured nothing, and of oneself nothing is measured.
        assert there.estimate(here.ticket_template(kvik.Layout(1, 64)), 1) is None
        assert there.estimate(ticket, 1) is None
        with pytest.raises(kvik.InvalidArgument):
            here.estimate(ticket, "much")
        with pytest.raises(kvik.TicketInvalid):
            here.estimate("no ticket", 1)


def test_objects_show_themselves_without_secrets() -> None:
    with engines() as start:
        engine = start(name="shown", secret=SECRET)
        pages = owned(engine)
        grant = engine.grant(pages.of())
        transfer = engine.read(empty(engine).of(), grant.ticket)
        transfer.wait(LIMIT)
        shown = [
            repr(one)
            for one in (engine, pages.region, pages.layout, pages.of(), grant, grant.ticket, transfer)
        ]
        assert "shown" in shown[0]
        assert all(text.startswith("<kvik.") for text in shown)
        assert not any("hush" in text or grant.id in text for text in shown)


def test_closing_twice_does_nothing() -> None:
    engine = kvik.Engine()
    region = engine.register(bytearray(64))
    region.close()
    region.close()
    assert region.closed
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(kvik.EngineClosed):
        engine.register(bytearray(64))


def test_layout_defaults_make_elements_touch() -> None:
    layout = kvik.Layout(10, 16, slices=2, layers=3, offset=64)
    assert (layout.slice_stride, layout.page_stride, layout.layer_stride) == (16, 32, 320)
    assert layout.nbytes == 64 + 3 * 320
    assert layout.digest == kvik.Layout(10, 16, slices=2, layer_offsets=[0, 320, 640], offset=64).digest
    apart = kvik.Layout(4, 16, layer_offsets=[0, 100, 200])
    assert (apart.layers, apart.layer_offsets, apart.layer_stride) == (3, [0, 100, 200], None)
    assert hash(layout) == hash(kvik.Layout(10, 16, slices=2, layers=3, offset=64))
    assert layout.digest != apart.digest


def test_content_chain_shares_what_prompts_share() -> None:
    tokens = np.random.default_rng(random_seed()).integers(0, 2**31, 40)
    chain = kvik.content_chain(b"model", b"", tokens, 16)
    assert isinstance(chain, bytes)
    assert len(chain) == 3 * 32
    assert kvik.content_chain(b"model", b"", tokens[:32].tolist(), 16) == chain[: 2 * 32]
    assert kvik.content_chain(b"model", b"salt", tokens, 16)[:32] != chain[:32]
    image = kvik.content_chain(b"model", b"", tokens, 16, items=[(20, b"an image")])
    assert image[:32] == chain[:32]
    assert image[32:64] != chain[32:64]
    images = [(35, b"the second"), (20, b"an image")]
    both = kvik.content_chain(b"model", b"", tokens, 16, items=images)
    assert both == kvik.content_chain(b"model", b"", tokens, 16, items=images[::-1])
    assert (both[:64], both[64:] != image[64:]) == (image[:64], True)


def test_content_is_a_chain_and_a_part() -> None:
    chain = kvik.content_chain(b"model", b"", range(40), 16)
    content = kvik.Content(chain, b"part")
    assert len(content) == 3
    assert (content.chain, content.part) == (chain, b"part")
    assert content == kvik.Content(chain, b"part") != kvik.Content(chain, b"another")
    assert pickle.loads(pickle.dumps(content)) == content  # noqa: S301 - our own bytes
    for wrong in ((b"", b"part"), (chain[:-1], b"part"), (chain, b""), (chain, bytes(5000))):
        with pytest.raises(kvik.InvalidArgument):
            kvik.Content(*wrong)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_grant_with_content_serves_only_who_states_the_same(transport: Transport) -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        chain = kvik.content_chain(b"model", b"", range(8), 1)

        def of(chain: bytes, part: bytes = b"part") -> kvik.Content:
            return kvik.Content(chain, part)

        right = of(chain)
        with pytest.raises(kvik.InvalidArgument):
            there.grant(source.of(), content=of(chain[:-32]))
        grant = there.grant(source.of(), content=right)
        plain = there.grant(source.of())

        def read(positions: Any, content: Any, ticket: Any = grant.ticket, **more: Any) -> None:
            ids = range(8) if positions is None else positions
            options: dict[str, Any] = {"transport": transport, "content": content, **more}
            here.read(target.of(ids), ticket, positions, **options).wait(LIMIT)

        other = kvik.content_chain(b"model", b"", [*range(7), 9], 1)
        for content in (of(chain, b"another part"), of(other), of(chain[32:] + chain[:32])):
            with pytest.raises(kvik.ContentMismatch):
                read(None, content)
        with pytest.raises(kvik.ContentRequired):
            read(None, None)
        with pytest.raises(kvik.ContentMismatch):
            read(None, right, plain.ticket)
        with pytest.raises(kvik.InvalidArgument):
            read([0, 2], right, confirm=False)
        with pytest.raises(kvik.InvalidArgument, match="content ends after"):
            read(range(4, 8), of(chain[: 4 * 32]))
        with pytest.raises(kvik.ContentMismatch, match="used up only by who states all of it"):
            read(range(4), of(other))
        with pytest.raises(kvik.ContentMismatch):
            here.release(grant.ticket, content=of(chain[: 4 * 32])).wait(LIMIT)
        with pytest.raises(kvik.ContentRequired):
            here.release(grant.ticket).wait(LIMIT)
        assert grant.state == "live"
        assert not target.memory.any()
        read(range(4), of(other), confirm=False)  # what it shares with this prompt
        read(range(4, 8), right)
        assert grant.wait(LIMIT) == "consumed"
        assert (target.memory == source.memory).all()


def test_pages_are_not_named_by_the_owners_ids() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        ticket = there.grant(source.of([5, 3]), use="many").ticket
        for move in (here.read, here.write):
            with pytest.raises(TypeError, match="positions="):
                move(target.of([0]), ticket, remote=[5])  # type: ignore[call-arg]
        here.read(target.of([0, 1]), ticket, positions=[1, 0]).wait(LIMIT)
        for mine, theirs in ((0, 3), (1, 5)):
            assert (target.rows[mine] == source.rows[theirs]).all()


def test_everything_public_is_documented() -> None:
    for name in kvik.__all__:
        thing = getattr(kvik, name)
        if typing.get_origin(thing) is typing.Literal:  # a list of words says all about itself
            continue
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing) and not issubclass(thing, Exception) and thing.__module__ == "kvik":
            for member, value in vars(thing).items():
                assert member.startswith("_") or inspect.getdoc(value), f"{name}.{member}"
