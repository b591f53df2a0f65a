"""Blocks through a store, beside copies of the same blocks in the same rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import kvik
from kvik.bench.errors import BenchError
from kvik.config import variables
from kvik.store.bench import baselines
from kvik.store.bench.beside import Beside
from kvik.store.bench.figures import Rounds, seconds
from kvik.store.bench.models import BlockShape
from kvik.store.bench.pages import Pages
from kvik.store.bench.served import served

MEMCPY = "memcpy"
PUT_ACCEPTED, PUT_STORED, GET, FIRST, RAW = "put accepted", "put stored", "get", "first block", "raw"
DEADLINE = 60.0  # seconds

COPIES = {"local": 1, "tcp": 2}
"""How often a byte is copied on its way, by the design of the transport: from one process's memory to the
other's; into the kernel's and out of it."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how."""

    blocks: int
    rounds: int
    threads: int
    by_layer: bool
    seed: int
    beside: tuple[str, ...]


@dataclass
class Cell:
    """One model over one transport: seconds by name, and why others are missing."""

    shape: BlockShape
    transport: kvik.TransportName
    rounds: Rounds = field(default_factory=Rounds)
    missing: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)


class _Client:
    """A client of a store, and an engine beside it for transfers without one."""

    def __init__(self, engine: kvik.Engine, other: kvik.Engine, address: str, pages: Pages) -> None:
        self._pages = pages
        self._store = kvik.Store.connect(engine, address, pages.shape.namespace(), pages.layout)
        self._keys = self._store.keys(range(pages.blocks * self._store.namespace.block_tokens))
        self._region = other.allocate(pages.layout.nbytes)
        self._other = other
        self._engine = engine

    def put(self, rounds: Rounds) -> None:
        """As an engine does it: begin, and let the pages go when the put has ended."""
        self._store.clear()
        began = time.perf_counter()
        put = self._store.put(self._keys, self._pages.pages(0), ack="accepted", deadline=DEADLINE)
        put.acknowledged()
        rounds.add(PUT_ACCEPTED, time.perf_counter() - began)
        put.wait()
        self._store.clear()
        pages = self._pages.pages(0)
        rounds.add(PUT_STORED, seconds(lambda: self._store.put(self._keys, pages, deadline=DEADLINE).wait()))

    def get(self, rounds: Rounds) -> None:
        """A streaming get: the time to the first verified block, and to the last."""
        pages = self._pages.pages(1)
        began = time.perf_counter()
        get = self._store.get(self._keys, pages, deadline=DEADLINE)
        get.next()
        first = time.perf_counter() - began
        there = get.wait()
        rounds.add(GET, time.perf_counter() - began)
        rounds.add(FIRST, first)
        if there != self._pages.blocks:
            raise kvik.KvikError(f"{there} of {self._pages.blocks} blocks came back")

    def raw(self, rounds: Rounds) -> None:
        """A transfer of the same pages between two engines, without a store."""
        pages = self._region.pages(self._pages.layout, self._pages.order)
        ticket = self._engine.grant(self._pages.pages(0)).ticket
        rounds.add(RAW, seconds(lambda: self._other.read(pages, ticket, traffic_class="bulk").wait()))


@contextlib.contextmanager
def _client(shape: BlockShape, transport: kvik.TransportName, plan: Plan) -> Iterator[tuple[Pages, _Client]]:
    memory = (plan.blocks + 64) * shape.bytes + (1 << 30)
    arguments = ["--memory", str(memory), "--transport", transport]
    with (
        served(arguments) as address,
        kvik.Engine(transport=transport) as engine,
        kvik.Engine(transport=transport) as other,
    ):
        pages = Pages.make(engine, shape, plan.blocks, by_layer=plan.by_layer, seed=plan.seed)
        yield pages, _Client(engine, other, address, pages)


def measure(shape: BlockShape, transport: kvik.TransportName, plan: Plan) -> Cell:
    """All rounds of one model over one transport. What came back is compared with what was put.

    Raises `KvikError`, and `CheckError` where a byte came back that was not put.
    """
    cell = Cell(shape, transport)
    with (
        ThreadPoolExecutor(plan.threads) as pool,
        contextlib.ExitStack() as others,
        _client(shape, transport, plan) as (pages, client),
    ):
        copy = baselines.memcpy(pages, pool, plan.threads)
        beside = [
            others.enter_context(Beside.started(command, plan.blocks, shape.bytes, plan.seed))
            for command in plan.beside
        ]
        cell.beside = [other.name for other in beside]
        _round(Rounds(), copy, client, beside)  # Memory that nobody has touched yet is another figure.
        for _ in range(plan.rounds):
            _round(cell.rounds, copy, client, beside)
        pages.poison()
        client.get(Rounds())
        pages.check()
        for other in beside:
            other.check()
    return cell


def _round(rounds: Rounds, copy: baselines.Copy, client: _Client, beside: list[Beside]) -> None:
    rounds.add(MEMCPY, seconds(copy))
    client.put(rounds)
    client.get(rounds)
    client.raw(rounds)
    for other in beside:
        other.round(rounds)


def measure_copies(shape: BlockShape, plan: Plan) -> Cell:
    """The seven ways to copy within a machine, one model."""
    cell = Cell(shape, "auto")
    with variables.left_out(), kvik.Engine() as engine, ThreadPoolExecutor(plan.threads) as pool:
        pages = Pages.make(engine, shape, plan.blocks, by_layer=False, seed=plan.seed)
        copies = {MEMCPY: baselines.memcpy(pages, pool, plan.threads)}
        for name, baseline in baselines.BASELINES.items():
            try:
                copies[name] = baseline(pages)
            except BenchError as missing:
                cell.missing[name] = str(missing)
        for rounds in (Rounds(), *([cell.rounds] * plan.rounds)):
            for name, copy in copies.items():
                rounds.add(name, seconds(copy))
    return cell
