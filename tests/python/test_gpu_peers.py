"""Pages between two processes where they lie on a GPU at either end or at both."""

import random
from typing import Any

import numpy as np
import pytest

import kvik
from tests.python.gpu import Array, Cuda, alone, driver
from tests.python.peers import LIMIT, Bytes, Peer, Pipe, random_bytes, random_seed

PAGES = (4 << 10, 12 << 10, 64 << 10, 1 << 20)  # bytes of a page
TOTAL = 6 << 20  # and about so many of all pages of one end
PLACES = [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")]  # of the owner's pages, and of the other's
KERNEL_MICROS = 100_000  # a kernel of this length is seen by whoever does not wait for it
WRITTEN, USED = 7, 9


class Place:
    """Registered memory, on a GPU or of the host: all zeroes."""

    def __init__(self, cuda: Cuda, engine: kvik.Engine, where: str, nbytes: int) -> None:
        self.array: Array | None = cuda.array(nbytes) if where == "gpu" else None
        self.region = engine.allocate(nbytes) if self.array is None else engine.register(self.array)

    @property
    def now(self) -> Bytes:
        """The bytes at this moment."""
        if self.array is None:
            return np.frombuffer(memoryview(self.region), np.uint8).copy()
        return self.array.now

    @now.setter
    def now(self, given: Bytes) -> None:
        if self.array is None:
            np.frombuffer(memoryview(self.region), np.uint8)[:] = given
        else:
            self.array.now = given

    def end(self) -> None:
        """Nobody uses the memory any more, and it goes back."""
        self.region.close(LIMIT)
        if self.array is not None:
            self.array.free()


def layout_of(page: int) -> kvik.Layout:
    return kvik.Layout(max(2, TOTAL // page), page)


def reader(pipe: Pipe, *, transport: kvik.TransportName) -> None:
    """The other process: it obeys `read`, `write`, `ordered` and `bye`."""
    cuda = driver()
    with kvik.Engine(transport=transport) as engine:
        while (heard := pipe.hear())["do"] != "bye":
            cuda.use(heard.get("device", 0))
            pipe.say(**{"read": read, "write": write, "ordered": ordered}[heard["do"]](cuda, engine, heard))


def read(cuda: Cuda, engine: kvik.Engine, heard: dict[str, Any]) -> dict[str, Any]:
    """Read pages of the owner's that are known by a seed into others: those, and no other byte."""
    layout, here = kvik.Layout(heard["pages"], heard["page"]), heard["here"]
    place = Place(cuda, engine, heard["where"], layout.nbytes)
    pages = place.region.pages(layout, here)
    report = engine.read(pages, heard["ticket"], verify="full").wait(LIMIT)
    expected = np.zeros((layout.pages, layout.run_bytes), np.uint8)
    expected[here] = random_bytes(layout.nbytes, heard["seed"]).reshape(expected.shape)[heard["there"]]
    same = bool((place.now == expected.reshape(-1)).all())
    place.end()
    return {"same": same, "transport": report.transport, "checks": list(report.checks)}


def write(cuda: Cuda, engine: kvik.Engine, heard: dict[str, Any]) -> dict[str, Any]:
    """Write pages that are known by a seed."""
    layout = kvik.Layout(heard["pages"], heard["page"])
    place = Place(cuda, engine, heard["where"], layout.nbytes)
    place.now = random_bytes(layout.nbytes, heard["seed"])
    report = engine.write(place.region.pages(layout, heard["here"]), heard["ticket"], verify="full")
    transport = report.wait(LIMIT).transport
    place.end()
    return {"transport": transport}


def ordered(cuda: Cuda, engine: kvik.Engine, heard: dict[str, Any]) -> dict[str, Any]:
    """Read into pages that a kernel still uses: which values they have afterwards, and all others."""
    layout, stream = kvik.Layout(heard["pages"], heard["page"]), cuda.stream()
    place = Place(cuda, engine, "gpu", layout.nbytes)
    assert place.array is not None
    place.array.fill(stream, USED, heard["micros"])
    pages = place.region.pages(layout, heard["here"])
    engine.read(pages, heard["ticket"], verify="full", after=stream).wait(LIMIT)
    rows = place.now.reshape(layout.pages, layout.run_bytes)
    read, others = rows[heard["here"]], np.delete(rows, heard["here"], axis=0)
    place.end()
    return {"read": np.unique(read).tolist(), "others": np.unique(others).tolist()}


def told(layout: kvik.Layout, ticket: kvik.Ticket, **more: Any) -> dict[str, Any]:
    return {"ticket": str(ticket), "pages": layout.pages, "page": layout.run_bytes, **more}


def drawn(layout: kvik.Layout, seed: int) -> tuple[list[int], list[int]]:
    """Half of the pages in some order, at either end."""
    rng, count = random.Random(seed), layout.pages // 2
    return rng.sample(range(layout.pages), count), rng.sample(range(layout.pages), count)


def between(cuda: Cuda, transport: kvik.TransportName) -> None:
    """Pages of each size, read and written by another process, between each two places; from device to device
    where there are several."""
    seed, devices = random_seed(), len(cuda.places())
    with kvik.Engine(transport=transport) as engine, Peer(reader, transport=transport) as peer:
        for page in PAGES:
            for theirs, mine in PLACES:
                seed, layout = seed + 1, layout_of(page)
                (there, here), device = drawn(layout, seed), seed % devices
                place = Place(cuda, engine, theirs, layout.nbytes)
                given = place.now = random_bytes(layout.nbytes, seed)
                granted = place.region.pages(layout, there)
                asked: dict[str, Any] = {
                    "where": mine,
                    "device": device,
                    "here": here,
                    "there": there,
                    "seed": seed,
                }
                ticket = engine.grant(granted).ticket
                said = peer.ask(do="read", **told(layout, ticket, **asked))
                case = (page, theirs, mine, device)
                assert said["same"], case
                assert said["transport"] == transport, said
                assert "page_checksum" in said["checks"], said
                # Then the other way: over these pages, and over no other.
                ticket = engine.grant(granted, right="write").ticket
                asked["seed"] = seed + (1 << 32)
                peer.ask(do="write", **told(layout, ticket, **asked))
                expected, shape = given.copy(), (layout.pages, layout.run_bytes)
                written = random_bytes(layout.nbytes, asked["seed"]).reshape(shape)
                expected.reshape(shape)[there] = written[here]
                assert (place.now == expected).all(), case
                place.end()
        peer.say(do="bye")
        assert peer.end() == 0


@alone
def test_pages_go_to_another_process_and_back_by_local(cuda: Cuda) -> None:
    between(cuda, "local")


@alone
def test_pages_go_to_another_process_and_back_by_tcp(cuda: Cuda) -> None:
    between(cuda, "tcp")


def owner(pipe: Pipe, *, transport: kvik.TransportName, seed: int) -> None:
    """The other process, which has pages on a GPU and grants them twice, until it ends or is ended."""
    cuda, layout = driver(), layout_of(64 << 10)
    with kvik.Engine(transport=transport) as engine:
        place = Place(cuda, engine, "gpu", layout.nbytes)
        place.now = random_bytes(layout.nbytes, seed)
        grants = [engine.grant(place.region.pages(layout, range(layout.pages))) for _ in range(2)]
        pipe.say(tickets=[str(grant.ticket) for grant in grants])
        pipe.hear()


@alone
def test_an_owner_that_is_killed_costs_its_reads_and_no_others(cuda: Cuda) -> None:
    """Its memory is open here when it goes, and the device does as well as before."""
    seed, layout = random_seed(), layout_of(64 << 10)
    transports: list[kvik.TransportName] = ["local", "tcp"]
    for transport in transports:
        with kvik.Engine(transport=transport) as engine:
            place = Place(cuda, engine, "gpu", layout.nbytes)
            pages = place.region.pages(layout, range(layout.pages))
            # Both start at once.
            one, other = (Peer(owner, transport=transport, seed=number) for number in (seed, seed + 1))
            with one, other:
                first, second = one.hear()["tickets"]
                assert engine.read(pages, first, verify="full").wait(LIMIT).transport == transport
                assert (place.now == random_bytes(layout.nbytes, seed)).all(), transport
                one.process.kill()
                one.process.wait(LIMIT)
                with pytest.raises((kvik.PeerUnreachable, kvik.PeerLost)):
                    engine.read(pages, second, deadline=LIMIT).wait(LIMIT)
                engine.read(pages, other.hear()["tickets"][0], verify="full").wait(LIMIT)
                assert (place.now == random_bytes(layout.nbytes, seed + 1)).all(), transport
            place.end()


@alone
def test_a_read_comes_behind_the_streams_of_both_processes(cuda: Cuda) -> None:
    layout, seed = layout_of(64 << 10), random_seed()
    transports: list[kvik.TransportName] = ["local", "tcp"]
    for transport in transports:
        with kvik.Engine(transport=transport) as engine, Peer(reader, transport=transport) as peer:
            place, stream = Place(cuda, engine, "gpu", layout.nbytes), cuda.stream()
            assert place.array is not None
            for number in range(4):
                # One of the two is late, which the other must not hide.
                late = (KERNEL_MICROS, 0) if number % 2 else (0, KERNEL_MICROS)
                there, here = drawn(layout, seed + number)
                place.array.fill(stream, WRITTEN + number, late[0])
                ticket = engine.grant(place.region.pages(layout, there), after=stream).ticket
                said = peer.ask(do="ordered", **told(layout, ticket, here=here, micros=late[1]))
                assert said == {"read": [WRITTEN + number], "others": [USED]}, (transport, number, said)
                place.now = np.zeros(layout.nbytes, np.uint8)
            place.end()
            peer.say(do="bye")
            assert peer.end() == 0


@alone
def test_neighbours_in_the_memory_of_a_device_are_told_apart(cuda: Cuda) -> None:
    """A driver may take small arrays from one piece of its own, which another process opens as a whole; and
    two regions may lie in one array."""
    seed, layout = random_seed(), kvik.Layout(8, 4 << 10)
    with kvik.Engine(transport="local") as engine, Peer(reader, transport="local") as peer:
        arrays = [cuda.array(layout.nbytes) for _ in range(4)]
        both = cuda.array(2 * layout.nbytes)
        halves = [(both.at + half * layout.nbytes, layout.nbytes) for half in (0, 1)]
        regions = [*map(engine.register, arrays), *map(engine.register, halves)]
        for number, array in enumerate(arrays):
            array.now = random_bytes(layout.nbytes, seed + number)
        both.now = np.concatenate([random_bytes(layout.nbytes, seed + number) for number in (4, 5)])
        order = list(range(len(regions))) * 2
        random.Random(seed).shuffle(order)
        for number in order:
            there, here = drawn(layout, seed + number)
            ticket = engine.grant(regions[number].pages(layout, there)).ticket
            asked = told(layout, ticket, where="gpu", here=here, there=there, seed=seed + number)
            said = peer.ask(do="read", **asked)
            assert said["same"], f"the bytes are not those of array {number}"
            assert said["transport"] == "local", said
        peer.say(do="bye")
        assert peer.end() == 0


@alone
def test_memory_that_is_given_back_and_taken_again_is_opened_anew(cuda: Cuda) -> None:
    """A driver may give an address out again, at which another process has had the memory before."""
    seed, again = random_seed(), 0
    with kvik.Engine(transport="local") as engine, Peer(reader, transport="local") as peer:
        for page in (4 << 10, 1 << 20):
            layout, known = kvik.Layout(8, page), set[int]()
            for _ in range(6):
                seed += 1
                place, (there, here) = Place(cuda, engine, "gpu", layout.nbytes), drawn(layout, seed)
                again += place.region.address in known
                known.add(place.region.address)
                place.now = random_bytes(layout.nbytes, seed)
                ticket = engine.grant(place.region.pages(layout, there)).ticket
                asked = told(layout, ticket, where="gpu", here=here, there=there, seed=seed)
                said = peer.ask(do="read", **asked)
                assert said["same"], f"{page} bytes a page: of an earlier array at {place.region.address:#x}"
                assert said["transport"] == "local", said
                place.end()
        peer.say(do="bye")
        assert peer.end() == 0
    print(f"{again} of 12 arrays lay where an earlier one had been")
