"""Pages on a GPU through the Python face."""

import ctypes
import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvik
from kvik._native import gpu_address
from kvik.handover.native import gpu_of
from kvik.handover.near import Spot, choose
from tests.python.doctor.machines.desktops import GIDS
from tests.python.doctor.machines.recording import Device, Machine, bridge, record
from tests.python.doctor.small import examined
from tests.python.gpu import ON_GPU, Array, Cuda, alone, only_standin
from tests.python.gpu_handover import check_order, hand_over, small
from tests.python.peers import LIMIT, engines, random_bytes, random_seed

PAGES, PAGE = 24, 16 << 10
LAYOUT = kvik.Layout(PAGES, PAGE)
LARGE = 64 << 20  # an array that shares no piece of the device's memory with others: its end unmaps it


class Tensor:
    """A torch tensor on a CUDA device, as far as `register` looks at it."""

    def __init__(self, array: Array, contiguous: bool = True) -> None:
        self.array, self.contiguous = array, contiguous

    class device:  # noqa: N801 - torch's name
        type = "cuda"

    def data_ptr(self) -> int:
        return self.array.at

    def is_contiguous(self) -> bool:
        return self.contiguous

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return self.array.count // 2

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def refused(given: Any, *words: str, error: type[kvik.KvikError] = kvik.BufferInvalid) -> None:
    with engines() as start, pytest.raises(error) as told:
        start().register(given)
    assert all(word in str(told.value) for word in words), told.value


@alone
def test_pages_move_between_gpus_and_the_host_both_ways(cuda: Cuda) -> None:
    seed = random_seed()
    given = random_bytes(LAYOUT.nbytes, seed)
    host = np.zeros(LAYOUT.nbytes, np.uint8)
    kinds: list[tuple[Any, Any]] = [
        (cuda.array(LAYOUT.nbytes), cuda.array(LAYOUT.nbytes)),
        (cuda.array(LAYOUT.nbytes), host),
        (host, Tensor(cuda.array(LAYOUT.nbytes))),
        ((cuda.array(LAYOUT.nbytes).at, LAYOUT.nbytes), cuda.array(LAYOUT.nbytes)),
    ]
    with engines() as start:
        owner, other = start(), start()
        for theirs, mine in kinds:
            there, here = owner.register(theirs), other.register(mine)
            assert (there.is_gpu, here.is_gpu) == (theirs is not host, mine is not host)
            assert {there.device, here.device} <= {"cpu", "cuda:0"}
            pages = here.pages(LAYOUT, range(PAGES))
            put(cuda, there, given)
            grant = owner.grant(there.pages(LAYOUT, range(PAGES)))
            report = other.read(pages, grant.ticket, verify="full").wait(LIMIT)
            # CUDA opens no memory in the process that it is of; what lies on the host needs no opening.
            assert report.transport == ("tcp" if there.is_gpu else "local"), report
            refused = any("local: " in why and "on a GPU" in why for why in report.rejected_transports)
            assert refused == there.is_gpu, report
            assert (got(cuda, here) == given).all()
            put(cuda, here, given[::-1].copy())
            grant = owner.grant(there.pages(LAYOUT, range(PAGES)), right="write")
            other.write(pages, grant.ticket, verify="full").wait(LIMIT)
            assert (got(cuda, there) == given[::-1]).all()
            there.close()
            here.close()


def put(cuda: Cuda, region: kvik.Region, given: Any) -> None:
    if region.is_gpu:
        at(cuda, region).now = given
    else:
        view(region)[:] = given


def got(cuda: Cuda, region: kvik.Region) -> Any:
    return at(cuda, region).now if region.is_gpu else view(region).copy()


def at(cuda: Cuda, region: kvik.Region) -> Array:
    array = Array.__new__(Array)
    array.cuda, array.at, array.count = cuda, region.address, region.nbytes
    return array


def view(region: kvik.Region) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address))


@alone
def test_an_engine_copies_between_its_own_regions(cuda: Cuda) -> None:
    given = random_bytes(LAYOUT.nbytes, random_seed())
    with engines() as start:
        engine = start()
        gpu, host = engine.register(cuda.array(LAYOUT.nbytes)), engine.allocate(LAYOUT.nbytes)
        put(cuda, gpu, given)
        ticket = engine.grant(gpu.pages(LAYOUT, range(PAGES))).ticket
        report = engine.read(host.pages(LAYOUT, range(PAGES)), ticket, verify="full").wait(LIMIT)
        assert (report.transport, report.mechanism) == ("self", "copy")
        assert (np.frombuffer(memoryview(host), np.uint8) == given).all()


@alone
def test_the_stream_of_the_interface_is_waited_for(cuda: Cuda) -> None:
    stream = cuda.stream()
    with engines() as start:
        for named in (stream, 1):
            array = cuda.array(4 << 20, stream=named)
            began = time.monotonic()
            array.fill(stream if named == stream else 0, 7, 200_000)
            done = array.now.any()
            # Of a process that stood still for so long the kernel may have ended.
            assert not done or time.monotonic() - began >= 0.2
            start().register(array)
            assert (array.now == 7).all()


@alone
def test_who_names_no_stream_gets_what_was_there_before(cuda: Cuda) -> None:
    """What tests of streams rely on: that a missing wait is seen."""
    with engines() as start:
        engine, array, stream = start(), cuda.array(LAYOUT.nbytes), cuda.stream()
        host = engine.allocate(LAYOUT.nbytes)
        pages = engine.register(array).pages(LAYOUT, range(PAGES))
        began = time.monotonic()
        array.fill(stream, 7, 1_000_000)
        ticket = engine.grant(pages).ticket
        engine.read(host.pages(LAYOUT, range(PAGES)), ticket).wait(LIMIT)
        done = np.frombuffer(memoryview(host), np.uint8).any()
        assert not done or time.monotonic() - began >= 1.0, "the kernel had not ended"


@alone
def test_an_array_lives_as_long_as_it_is_registered(cuda: Cuda) -> None:
    with engines() as start:
        engine, freed = start(), threading.Event()

        class Watched(Array):
            def __del__(self) -> None:
                freed.set()

        region = engine.register(Watched(cuda, 4096, {}))
        gc.collect()
        assert not freed.is_set()
        assert "on cuda:0" in repr(region)
        region.close()
        assert freed.wait(LIMIT)


@alone
def test_an_array_that_is_read_only_is_a_source_and_nothing_else(cuda: Cuda) -> None:
    array = cuda.array(LAYOUT.nbytes)
    array.changes = {"data": (array.at, True)}
    with engines() as start:
        engine = start()
        region = engine.register(array)
        assert not region.writable
        pages = region.pages(LAYOUT, range(PAGES))
        engine.grant(pages)
        with pytest.raises(kvik.BufferInvalid, match="read-only"):
            engine.grant(pages, right="write")


@alone
def test_what_an_object_says_is_not_believed(cuda: Cuda) -> None:
    array = cuda.array(LARGE)
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"version": 1}, ("version 1",)),
        ({"version": 9}, ("version 9",)),
        ({"mask": array}, ("mask",)),
        ({"typestr": "|u"}, ("typestr",)),
        ({"data": None}, ("data",)),
        ({"shape": (256, 256), "strides": (512, 1)}, ("C-contiguous",)),
        ({"shape": (256, 128), "strides": (1, 256)}, ("C-contiguous",)),
        ({"shape": (256,), "strides": (-1,)}, ("C-contiguous",)),
        ({"shape": (256,), "strides": (10**400,)}, ("C-contiguous",)),
        ({"shape": [256]}, ("no tuple",)),
        ({"shape": (0,)}, ("at least one byte",)),
        ({"shape": (2**40, 2**40)}, ("larger than any memory",)),
        ({"shape": (1 << 40,)}, ("allocated",)),
        ({"data": (array.at + (1 << 40), False)}, ("CUDA does not know it",)),
        ({"stream": 0}, ("stream 0",)),
    ]
    for changes, words in wrong:
        array.changes = changes
        refused(array, *words)
    host = np.zeros(4096, np.uint8)
    array.changes = {"shape": (4096,), "data": (host.ctypes.data, False)}
    refused(array, "CUDA does not know it")
    array.changes = {"shape": (64, 1, 1024), "strides": (1024, 77, 1)}
    with engines() as start:
        assert start().register(array).nbytes == 64 << 10
    refused(Tensor(array, contiguous=False), "contiguous")
    array.changes = {}
    array.free()
    refused(array, "freed")


@only_standin("fails on demand")
@alone
def test_what_the_driver_refuses_is_said_in_its_words(cuda: Cuda) -> None:
    array = cuda.array(4096)
    cuda.say("fail cuPointerGetAttributes nth=1 code=999")
    refused(array, "asking what lies at", "nvidia-modprobe", error=kvik.DeviceFailed)


class Elsewhere:
    """An array on a device of another maker."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


@pytest.mark.parametrize(
    ("kind", "name"), [(10, "ROCm"), (8, "Metal"), (14, "oneAPI"), (99, "another maker")]
)
def test_devices_of_other_makers_are_refused_by_name(kind: int, name: str) -> None:
    refused(Elsewhere(kind), name)


def test_cuda_without_a_way_in_is_refused() -> None:
    refused(Elsewhere(2), "__cuda_array_interface__")


def test_without_cuda_no_address_is_a_gpus() -> None:
    class Told:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (64,), "typestr": "|u1", "data": (4096, False), "version": 3}

    refused(Told(), "nobody in this process uses CUDA")


@alone
def test_the_driver_says_which_gpu_memory_lies_on(cuda: Cuda) -> None:
    """By its PCI address in the kernel's letters, whatever number this process has for it."""
    host = np.zeros(64, np.uint8)
    assert gpu_address(host.ctypes.data) is None
    assert gpu_address(0) is None
    places = cuda.places()
    assert ON_GPU or places == ["0000:1a:00.0", "0000:1b:00.0"]
    for number, place in enumerate(places):
        cuda.use(number)
        array = Array(cuda, LARGE, {})
        assert gpu_address(array.at) == place
        assert gpu_of(array.at + LARGE - 1) == place
        array.free()
        assert gpu_of(array.at) == ""


@alone
def test_a_rank_takes_the_nics_near_the_gpu_of_its_kv(cuda: Cuda) -> None:
    """From the driver's word to what the engine is told."""
    link, devices = (32.0, 16), []
    for number, place in enumerate((cuda.places()[0], "0002:1b:00.0")):
        gpu = Device(place, "gpu", 0x10DE, 0x2330, link, link, number)
        nic = Device(f"0002:{0x3A + number:02x}:00.0", "nic", 0x15B3, 0x1021, link, link, number, gids=GIDS)
        nic.name, nic.rate = f"mlx5_{1 - number}", "400 Gb/sec (4X NDR)"
        devices.append(bridge(f"0002:00:{number + 1:02x}.0", [gpu, nic], link, numa=number))
    machine = examined(record(Machine("two", ("a maker", "a board"), devices, nodes=2)))
    taken = choose("verbs", Spot(gpu_of(cuda.array(64).at)), placed=True, machine=lambda: machine)
    assert taken.nics == "verbs:mlx5_1"


@alone
def test_a_handover_comes_behind_the_engines_streams(cuda: Cuda) -> None:
    """And each byte of it arrives."""
    prefill, decode = small(cuda, "prefill"), small(cuda, "decode")
    for number in (10, 11):  # other prompts than those of `check_order`
        hand_over(prefill, decode, number)
    check_order(cuda, prefill, decode)
    prefill.close()
    decode.close()


@alone
def test_a_stream_is_named_by_handle_or_by_an_object(cuda: Cuda) -> None:
    with engines() as start:
        engine = start()
        pages = engine.register(cuda.array(LAYOUT.nbytes)).pages(LAYOUT, range(PAGES))
        host = engine.allocate(LAYOUT.nbytes).pages(LAYOUT, range(PAGES))
        stream = cuda.stream()
        for given in (stream, 0, SimpleNamespace(cuda_stream=stream), Stream(stream), None):
            grant = engine.grant(pages, after=given)
            engine.read(host, grant.ticket).wait(LIMIT)
        wrong: Any
        for wrong in ("a stream", 1.5, -1, object()):
            with pytest.raises((TypeError, kvik.InvalidArgument)):
                engine.grant(pages, after=wrong)
        with pytest.raises(kvik.InvalidArgument, match="leave `after` out"):
            engine.grant(host, after=stream)


class Stream:
    """A stream by CUDA's protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
