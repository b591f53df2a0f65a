"""Copies to and from a GPU that go wrong, over the stand-in for the CUDA driver: `full` checks find each."""

import contextlib
from typing import Any

import numpy as np

import kvik
from tests.python.gpu import Cuda, alone, only_standin
from tests.python.peers import LIMIT, random_bytes, random_seed

PAGES, PAGE = 48, 16 << 10
LAYOUT = kvik.Layout(PAGES, PAGE)
MOST = 200  # copies of the driver's that one transfer takes at most


def damaged(cuda: Cuda, owned: kvik.Region, own: kvik.Region, engine: kvik.Engine, order: Any) -> int:
    """How many of a transfer's copies were damaged, one at a time; none of them may pass."""
    for nth in range(1, MOST):
        ticket = engine.grant(owned.pages(LAYOUT, order)).ticket
        cuda.say(f"flip nth={nth}")
        transfer = engine.read(own.pages(LAYOUT, order[::-1].copy()), ticket, verify="full")
        passed = False
        with contextlib.suppress(kvik.ChecksumMismatch):
            transfer.wait(LIMIT)
            passed = True
        cuda.say("clear")
        if passed:
            return nth - 1
    raise AssertionError(f"a transfer takes more than {MOST} copies")


@only_standin("damages copies on demand")
@alone
def test_a_copy_that_goes_wrong_is_found_wherever_it_goes(cuda: Cuda) -> None:
    seed = random_seed()
    given = random_bytes(LAYOUT.nbytes, seed)
    order = np.random.default_rng(seed).permutation(PAGES).astype(np.uint32)
    with kvik.Engine(transport="tcp") as engine:
        first, second = cuda.array(LAYOUT.nbytes), cuda.array(LAYOUT.nbytes)
        first.now = given
        gpu, other, host = engine.register(first), engine.register(second), engine.allocate(LAYOUT.nbytes)
        within = damaged(cuda, gpu, other, engine, order)
        assert (second.now.reshape(PAGES, PAGE)[order[::-1]] == given.reshape(PAGES, PAGE)[order]).all()
        down = damaged(cuda, gpu, host, engine, order)
        np.frombuffer(memoryview(host), np.uint8)[:] = given
        up = damaged(cuda, host, gpu, engine, order)
        del gpu, other, host
    # There and down from either side; down and down again; up and down again. Of each a copy at the least.
    assert within >= 3, within
    assert min(down, up) >= 2, (down, up)


@only_standin("damages copies on demand")
@alone
def test_what_is_not_to_be_checked_is_not_read_back(cuda: Cuda) -> None:
    given = random_bytes(LAYOUT.nbytes, random_seed())
    with kvik.Engine(transport="tcp") as engine:
        array = cuda.array(LAYOUT.nbytes)
        array.now = given
        gpu, host = engine.register(array), engine.allocate(LAYOUT.nbytes)
        order = np.arange(PAGES, dtype=np.uint32)
        ticket = engine.grant(gpu.pages(LAYOUT, order)).ticket
        cuda.say("flip nth=1")
        engine.read(host.pages(LAYOUT, order), ticket, verify="off").wait(LIMIT)
        wrong = np.frombuffer(memoryview(host), np.uint8) != given
        assert wrong.sum() == 1
        del wrong, gpu, host
