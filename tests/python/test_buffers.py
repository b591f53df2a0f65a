"""What can be registered, what can be a page id, and who may touch registered memory."""

import array
import ctypes
import gc
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvik
from tests.python.peers import LIMIT, empty, engines, never_issued, owned, random_bytes, random_seed, until


def moved(memory: Any, size: int) -> bool:
    """Whether a read into this memory brings what the owner has."""
    with engines() as start:
        here, there = start(), start()
        source = owned(there, 4, size // 4, seed=7)
        region = here.register(memory)
        assert region.nbytes == size
        assert region.writable
        here.read(region.pages(source.layout, range(4)), there.grant(source.of()).ticket).wait(LIMIT)
        region.close()
        return bytes(source.memory) == bytes((ctypes.c_char * size).from_buffer(memory))


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda size: memoryview(bytearray(size)),
        lambda size: mmap.mmap(-1, size),
        lambda size: array.array("d", bytes(size)),
        lambda size: np.zeros(size // 4, np.float32),
        lambda size: np.zeros((2, size // 4), np.int16),
        lambda size: (ctypes.c_char * size)(),
    ],
    ids=["bytearray", "memoryview", "mmap", "array", "numpy", "numpy-2d", "ctypes"],
)
def test_a_writable_buffer_is_a_destination(make: Callable[[int], Any]) -> None:
    assert moved(make(16384), 16384)


@dataclass
class Device:
    """`torch.device`, as far as it matters."""

    type: str = "cpu"


class Tensor:
    """A torch tensor, as far as `register` looks at it."""

    def __init__(self, memory: Any, device: str = "cpu", contiguous: bool = True) -> None:
        self.memory, self.device, self.contiguous = memory, Device(device), contiguous

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)

    def is_contiguous(self) -> bool:
        return self.contiguous

    def element_size(self) -> int:
        return int(self.memory.itemsize)

    def numel(self) -> int:
        return int(self.memory.size)


def test_a_tensor_and_an_address_are_destinations() -> None:
    seed = random_seed()
    with engines() as start:
        here, there = start(), start()
        source = owned(there, seed=seed)
        grant = there.grant(source.of(), use="many")
        for wrap in (Tensor, lambda memory: (memory.ctypes.data, memory.nbytes)):
            memory = np.zeros(8 * 4096, np.uint8)
            region = here.register(wrap(memory))
            assert region.address == memory.ctypes.data
            here.read(region.pages(source.layout, range(8)), grant.ticket).wait(LIMIT)
            assert (memory == source.memory).all()


def test_a_tensor_lives_as_long_as_it_is_registered() -> None:
    with engines() as start:
        engine = start()
        freed = threading.Event()

        class Watched(Tensor):
            def __del__(self) -> None:
                freed.set()

        region = engine.register(Watched(np.zeros(64, np.uint8)))
        gc.collect()
        assert not freed.is_set()
        region.close()
        assert freed.wait(LIMIT)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        bytearray(),
        np.zeros((8, 8), np.uint8)[:, ::2],
        np.zeros((8, 8), np.uint8).T[:4],
        memoryview(bytearray(64))[::2],
        (4096, 0),
        (0, 4096),
        (2**64 - 4096, 8192),
        Tensor(np.zeros(8, np.uint8), contiguous=False),
        Tensor(np.zeros(8, np.uint8), device="cuda"),
        Tensor(np.zeros(0, np.uint8)),
    ],
    ids=[
        "empty-bytes",
        "empty-bytearray",
        "strided-array",
        "transposed-array",
        "strided-view",
        "no-bytes-at-an-address",
        "no-address",
        "beyond-the-address-space",
        "strided-tensor",
        "tensor-of-a-gpu",
        "empty-tensor",
    ],
)
def test_memory_that_cannot_be_registered_is_refused(wrong: Any) -> None:
    with engines() as start, pytest.raises(kvik.BufferInvalid) as told:
        start().register(wrong)
    assert told.value.code == "buffer_invalid"
    assert len(str(told.value)) > 30


def test_objects_without_memory_are_a_type_error() -> None:
    with engines() as start:
        engine = start()
        for wrong in (None, 5, "text", [1, 2], object()):
            with pytest.raises(TypeError, match="bytearray"):
                engine.register(wrong)  # type: ignore[arg-type]


def test_a_read_only_buffer_is_a_source_and_nothing_else() -> None:
    frozen = np.zeros(64, np.uint8)
    frozen.flags.writeable = False
    layout = kvik.Layout(1, 64)
    with engines() as start:
        here, there = start(), start()
        grant = there.grant(there.register(bytes(range(64))).pages(layout, [0]), use="many")
        target = bytearray(64)
        here.read(here.register(target).pages(layout, [0]), grant.ticket).wait(LIMIT)
        assert target == bytes(range(64))
        for memory in (bytes(64), frozen, memoryview(bytes(64))):
            region = here.register(memory)
            assert not region.writable
            with pytest.raises(kvik.BufferInvalid, match="writable"):
                here.read(region.pages(layout, [0]), grant.ticket)
            with pytest.raises(kvik.BufferInvalid, match="writable"):
                here.grant(region.pages(layout, [0]), right="write")


def test_a_registered_buffer_cannot_be_resized_until_its_region_is_closed() -> None:
    with engines() as start:
        engine = start()
        grows = bytearray(4096)
        region = engine.register(grows)
        with pytest.raises(BufferError):
            grows.extend(b"more")
        region.close()
        grows.extend(b"more")

        mapped = mmap.mmap(-1, 4096)
        region = engine.register(mapped)
        with pytest.raises(BufferError):
            mapped.close()
        engine.close()
        assert region.closed
        mapped.close()


def test_a_live_grant_keeps_its_region_and_a_region_without_references_is_let_go() -> None:
    with engines() as start:
        engine, reader = start(), start()
        granted, idle = bytearray(range(64)), bytearray(64)
        layout = kvik.Layout(1, 64)
        ticket = engine.grant(engine.register(granted).pages(layout, [0])).ticket
        engine.register(idle)
        gc.collect()
        target = bytearray(64)
        reader.read(reader.register(target).pages(layout, [0]), ticket).wait(LIMIT)
        assert target == granted
        assert until(lambda: grows(idle))


def test_a_region_without_references_is_let_go_with_its_last_grant() -> None:
    with engines() as start:
        engine, reader, granted = start(), start(), bytearray(range(64))
        layout = kvik.Layout(1, 64)
        pages = engine.register(granted).pages(layout, [0])
        revoked, ticket = engine.grant(pages), engine.grant(pages).ticket
        revoked.revoke()
        del pages, revoked
        gc.collect()
        assert not grows(granted)
        target = bytearray(64)
        reader.read(reader.register(target).pages(layout, [0]), ticket).wait(LIMIT)
        assert target == bytes(range(64))
        # Its one reader has confirmed.
        assert until(lambda: grows(granted))


def grows(memory: bytearray) -> bool:
    """Whether no export holds its size."""
    try:
        memory.extend(b"more")
    except BufferError:
        return False
    return True


def test_a_refused_registration_holds_nothing() -> None:
    engine = kvik.Engine()
    engine.close()
    grows = bytearray(4096)
    with pytest.raises(kvik.EngineClosed):
        engine.register(grows)
    grows.extend(b"more")


def test_allocated_memory_is_viewed_and_not_closed_under_a_view() -> None:
    with engines() as start:
        engine = start()
        region = engine.allocate("64KiB")
        assert region.shared
        assert region.writable
        assert region.nbytes == 65536
        view = memoryview(region)
        assert (view.nbytes, view.readonly, view.format) == (65536, False, "B")
        array_view = np.frombuffer(region, np.float32)  # type: ignore[call-overload]
        array_view[:] = 1.5
        assert bytes(view[:4]) == np.float32(1.5).tobytes()
        with pytest.raises(kvik.RegionBusy, match="2 memoryview"):
            region.close(0.1)
        assert not region.closed
        view.release()
        del array_view
        gc.collect()
        region.close()
        with pytest.raises(kvik.RegionClosed):
            memoryview(region)


def test_a_view_outlives_its_engine() -> None:
    with engines() as start:
        engine = start()
        view = np.frombuffer(memoryview(engine.allocate(4096)), np.uint8)
        view[:] = 7
        engine.close()
        assert view.sum() == 7 * 4096


def test_registered_memory_is_viewed_through_its_own_object() -> None:
    with engines() as start:
        region = start().register(bytearray(64))
        with pytest.raises(kvik.BufferInvalid, match="registered"):
            memoryview(region)


def test_a_region_in_use_is_not_closed() -> None:
    with engines() as start:
        here, there = start(), start()
        target = empty(here)
        transfer = here.read(target.of(), never_issued(there, target.layout))
        with pytest.raises(kvik.RegionBusy):
            target.region.close(0.2)
        transfer.cancel()
        with pytest.raises(kvik.Cancelled):
            transfer.wait(LIMIT)
        target.region.close()
        assert target.region.closed


INTEGERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_arrays_of_any_kind_are_ids(dtype: str) -> None:
    want = kvik.content_chain(b"", b"", [3, 1, 2, 100], 4)
    ids = np.array([3, 1, 2, 100], dtype)
    wide = np.zeros((4, 3), dtype)
    wide[:, 1] = ids
    unaligned = np.frombuffer(b"\0" + ids.tobytes(), np.uint8)[1:].view(dtype)
    for form in (ids, ids.data, wide[:, 1], ids[::-1].copy()[::-1], unaligned):
        assert kvik.content_chain(b"", b"", form, 4) == want


def test_other_forms_of_ids() -> None:
    class Like:
        def __array__(self) -> Any:
            return np.array([4, 6, 8])

    want = kvik.content_chain(b"", b"", [4, 6, 8], 4)
    forms: tuple[Any, ...] = (
        range(4, 10, 2),
        (4, 6, 8),
        [np.int64(4), 6, np.uint8(8)],
        array.array("Q", [4, 6, 8]),
        Like(),
    )
    for form in forms:
        assert kvik.content_chain(b"", b"", form, 4) == want
    assert kvik.content_chain(b"", b"", range(8, 3, -2), 4) == kvik.content_chain(b"", b"", [8, 6, 4], 4)
    assert kvik.content_chain(b"", b"", range(5, 5), 4) == b""


@pytest.mark.parametrize(
    ("ids", "position"),
    [
        ([0, 1, -1], 2),
        ([0, 2**32], 1),
        ([10**30], 0),
        (np.array([0, 1, -1]), 2),
        (np.array([2**32]), 0),
        (range(-2, 4), 0),
        (range(2**32 - 2, 2**32 + 2), 3),
        (range(0, 2**62, 2**60), 3),
    ],
    ids=str,
)
def test_an_id_that_is_none_is_named_with_its_position(ids: Any, position: int) -> None:
    with pytest.raises(kvik.PageOutOfRange, match=f"position {position}") as told:
        kvik.content_chain(b"", b"", ids, 4)
    assert isinstance(told.value, IndexError)


@pytest.mark.parametrize(
    "ids",
    [np.array([1.0]), np.zeros((2, 2), np.uint32), np.array([1], ">i4"), np.array([True]), range(2**30)],
    ids=str,
)
def test_arrays_that_are_no_ids_are_refused(ids: Any) -> None:
    with pytest.raises(kvik.InvalidArgument):
        kvik.content_chain(b"", b"", ids, 4)


@pytest.mark.parametrize("ids", [None, 5, "12", [1.5], ["1"], {1, 2}], ids=str)
def test_objects_that_are_no_ids_are_a_type_error(ids: Any) -> None:
    with pytest.raises(TypeError):
        kvik.content_chain(b"", b"", ids, 4)


def test_ids_that_change_later_do_not_change_the_page_set() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there, seed=random_seed()), empty(here)
        ids = np.array([6, 2], np.uint32)
        pages = source.of(ids)
        ids[:] = 9999
        here.read(target.of([0, 1]), there.grant(pages).ticket).wait(LIMIT)
        assert (target.rows[:2] == source.rows[[6, 2]]).all()


def test_many_pages_make_no_python_objects() -> None:
    with engines() as start:
        engine = start()
        region = engine.register(random_bytes(1 << 20, 1))
        layout = kvik.Layout(1 << 20, 1)
        ids = np.arange(1 << 20, dtype=np.uint32)
        region.pages(layout, ids[:4])
        gc.collect()
        before = len(gc.get_objects())
        pages = region.pages(layout, ids)
        assert len(pages) == pages.nbytes == 1 << 20
        assert len(gc.get_objects()) - before < 50
