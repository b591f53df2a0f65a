"""What the tests of torch's tensors run in processes of their own, with a torch that has CUDA (and without
vLLM): the owner and the reader of pages, and two servers of `gpu_handover.py`."""

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import kvik
from kvik.handover.memory import KvMemory
from tests.python.gpu import Array
from tests.python.gpu_driver import Driver
from tests.python.gpu_handover import GpuSide, check_order, hand_over
from tests.python.handover_harness import ITEM
from tests.python.peers import LIMIT, Pipe, random_bytes

BLOCKS, TOKENS, HEADS, DIM, LATENT = 40, 16, 4, 64, 576
HALF = 2  # bytes of an element of bfloat16
CYCLES = 100_000_000  # a kernel of 50 ms and more, which is seen by whoever does not wait for it
USED = 99

# How a layer's KV lies in a tensor, by the names that engines have for it: its shape, and its kvik layout.
FORMS: dict[str, tuple[tuple[int, ...], Callable[[], kvik.Layout]]] = {
    "NHD": ((2, BLOCKS, TOKENS, HEADS, DIM),
            lambda: kvik.Layout(BLOCKS, TOKENS * HEADS * DIM * HALF, layers=2)),
    "HND": ((2, BLOCKS, HEADS, TOKENS, DIM),
            lambda: kvik.Layout(BLOCKS, TOKENS * DIM * HALF, layers=2, slices=HEADS)),
    "MLA": ((BLOCKS, TOKENS, LATENT), lambda: kvik.Layout(BLOCKS, TOKENS * LATENT * HALF)),
}  # fmt: skip


def values(form: str, seed: int) -> Any:
    """What the owner writes: any bits, which as numbers need not be equal to themselves."""
    import torch

    shape = FORMS[form][0]
    count = int(np.prod(shape))
    return torch.from_numpy(random_bytes(count * HALF, seed).view(np.int16)).reshape(shape)


def kv(form: str) -> Any:
    """A tensor of this form, behind another one in torch's own piece of the device's memory."""
    import torch

    before = torch.zeros(12345, dtype=torch.uint8, device="cuda")
    tensor = torch.zeros(FORMS[form][0], dtype=torch.bfloat16, device="cuda")
    del before  # which may be anywhere, from here on
    return tensor


def bits(tensor: Any) -> Any:
    """The same memory as integers."""
    import torch

    return tensor.view(torch.int16)


def owner(pipe: Pipe, *, transport: kvik.TransportName) -> None:
    """Writes a tensor, late, and grants some of its blocks behind that: obeys `grant` and `bye`."""
    import torch

    with kvik.Engine(transport=transport) as engine:
        while (heard := pipe.hear())["do"] != "bye":
            form, tensor = heard["form"], kv(heard["form"])
            region = engine.register(tensor)
            given = values(form, heard["seed"]).cuda()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(CYCLES)
                bits(tensor).copy_(given)
                pages = region.pages(FORMS[form][1](), heard["blocks"])
                grant = engine.grant(pages, after=torch.cuda.current_stream())
            pipe.say(ticket=str(grant.ticket))
            pipe.say(state=grant.wait(LIMIT))
            region.close(LIMIT)


def reader(pipe: Pipe, *, transport: kvik.TransportName) -> None:
    """Reads blocks into a tensor that its stream still writes: obeys `read` and `bye`."""
    import torch

    with kvik.Engine(transport=transport) as engine:
        while (heard := pipe.hear())["do"] != "bye":
            form, tensor = heard["form"], kv(heard["form"])
            region, here, there = engine.register(tensor), heard["blocks"], heard["there"]
            torch.cuda.synchronize()
            torch.cuda._sleep(CYCLES)
            tensor.fill_(USED)
            pages = region.pages(FORMS[form][1](), here)
            read = engine.read(pages, heard["ticket"], verify="full", after=torch.cuda.current_stream())
            report = read.wait(LIMIT)
            expected = bits(torch.full_like(tensor, USED, device="cpu"))
            _by_block(expected)[here] = _by_block(values(form, heard["seed"]))[there]
            same = bool(torch.equal(bits(tensor).cpu(), expected))
            region.close(LIMIT)
            why = list(report.rejected_transports)
            pipe.say(same=same, transport=report.transport, rejected=why)


def _by_block(tensor: Any) -> Any:
    """The same memory with the blocks outermost, where K and V are."""
    return tensor.transpose(0, 1) if tensor.dim() == len(FORMS["NHD"][0]) else tensor


def drawn(seed: int) -> tuple[list[int], list[int]]:
    """Half of the blocks, in some order, at either end."""
    rng = random.Random(seed)
    return rng.sample(range(BLOCKS), BLOCKS // 2), rng.sample(range(BLOCKS), BLOCKS // 2)


class TorchArray(Array):
    """An array whose memory is a tensor's, and whose kernels are torch's."""

    def __init__(self, cuda: "TorchCuda", count: int) -> None:
        import torch

        self.cuda, self.count, self.changes = cuda, count, {}
        self.tensor = torch.zeros(count, dtype=torch.uint8, device="cuda")
        self.at = int(self.tensor.data_ptr())
        torch.cuda.synchronize()

    def fill(self, stream: int, value: int, micros: int) -> None:
        """As of `Array`."""
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            if micros:
                torch.cuda._sleep(CYCLES)
            self.tensor.fill_(value)


class TorchCuda(Driver):
    """The driver as torch uses it."""

    def array(self, count: int, **_: Any) -> Array:
        """As of `Cuda`."""
        return TorchArray(self, count)


def views(storage: Any, form: str, layers: int, blocks: int) -> Iterator[Any]:
    """The tensor of each layer as vLLM gives it to a connector, [blocks, heads, tokens, K and V]; of MLA
    [blocks, tokens, latent]."""
    sizes = {"L": layers, "B": blocks, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    order = {"NHD": "LBNHC", "HND": "LBHNC", "HND, blocks first": "BLHNC", "MLA": "LBNC"}[form]
    whole = storage.reshape([sizes[letter] for letter in order])
    for layer in range(layers):
        one, rest = whole.select(order.index("L"), layer), order.replace("L", "")
        yield one.permute([rest.index(letter) for letter in "BHNC" if letter in rest])


def layout_module() -> ModuleType:
    """`kvik.vllm.layout`, which takes no vLLM, though its package does."""
    if importlib.util.find_spec("vllm") is None:
        package = ModuleType("kvik.vllm")
        package.__path__ = [str(Path(kvik.__file__).parent / "vllm")]
        sys.modules["kvik.vllm"] = package
    return importlib.import_module("kvik.vllm.layout")


def handover(pipe: Pipe, *, form: str) -> None:
    """Hand KV over between two servers whose KV is a tensor of torch's."""
    import torch

    layout, layers, blocks, cuda = layout_module(), 3, 12, TorchCuda()
    kind, heads = ("mla", 1) if form == "MLA" else ("gqa", HEADS)
    model = layout.ModelKv(kind, heads, 1, TOKENS, 0, ("FLASHMLA" if kind == "mla" else "FLASH_ATTN",))
    nbytes = layers * blocks * heads * TOKENS * 2 * DIM * ITEM

    def make(array: Array) -> KvMemory:
        assert isinstance(array, TorchArray)
        tensors = views(array.tensor.view(torch.float32), form, layers, blocks)
        found: KvMemory = layout.inspect({f"layers.{n}.attn": one for n, one in enumerate(tensors)}, model)
        assert found.gpu == cuda.places()[0], found.gpu
        return found

    prefill, decode = (GpuSide(cuda, role, nbytes, make) for role in ("prefill", "decode"))
    for number in range(10, 13):  # other prompts than those of `check_order`
        hand_over(prefill, decode, number)
    check_order(cuda, prefill, decode)
    order = prefill.shape.order
    prefill.close()
    decode.close()
    pipe.say(order=order)
