"""What a slot costs: the time of a decode step, and how it changes with the path between GPU and NIC.

The engines of the model are one GPU a host, as of the article that measured it ("LLM cluster of vLLM and
RDMA", four desktop PCs: RTX 4000 Ada, ConnectX-5, no GPUDirect). A step is

    weights / (TP * memory bandwidth) + step overhead
    + all-reduces * (2 log2(TP) * hop + 2 (TP - 1) / TP * message / path)      (TP > 1)
    + (PP - 1) * (hop + message / path)                                        (PP > 1)

where `hop` grows with each crossing between chipset and CPU on the way from GPU to GPU. Two all-reduces a
layer: Megatron-LM (arXiv:1909.08053, section 3). Bytes of a ring all-reduce: Patarasuk and Yuan, 2009; the
number of its latencies is that of a tree, which NCCL takes for small messages.

`CHIPSET_S` and `STEP_S` are no physical constants: they were chosen so that the model is near the article's
first column of TP = 2, and everything else is predicted with them. Directions and the order of moves are what
it is good for; figures are rough (`docs/doctor.md` has them beside
the measured ones; the worst is seven times what was measured).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvik.doctor.model import Machine, Pair

HOP_S = 10e-6  # NCCL over sockets or RDMA through host memory: a message of a few bytes
CHIPSET_S = 2.5e-6  # more a crossing of the chipset's link
STEP_S = 3e-3  # of the serving engine a step, whatever the model
GPU_MEMORY_GBS = 360.0  # RTX 4000 Ada Generation, by its data sheet


@dataclass(frozen=True)
class Model:
    """A model as its traffic sees it: parameters of 2 bytes, layers, hidden size."""

    name: str
    parameters: float
    layers: int
    hidden: int


# By their config.json.
MODELS = (
    Model("Llama-3.2-1B", 1.24e9, 16, 2048),
    Model("Llama-3.2-3B", 3.21e9, 28, 3072),
    Model("Llama-2-7b", 6.74e9, 32, 4096),
    Model("Llama-3-8B", 8.03e9, 32, 4096),
)


@dataclass(frozen=True)
class Traffic:
    """What the machine is for. `batch`: sequences that decode at once."""

    kv: bool = True
    collectives: bool = True
    load: bool = True
    tp: int = 2
    pp: int = 1
    batch: int = 32
    model: Model = MODELS[0]


@dataclass(frozen=True)
class Prediction:
    """The change of tokens a second, per cent, from one machine to another."""

    model: str
    tp: int
    pp: int
    percent: float


def best_path(machine: Machine) -> Pair | None:
    """The path from a GPU to the wire with the most GB/s, bounded by the NIC's ports; None without one."""
    rates = {pair.a: pair.gbs for pair in machine.pairs if pair.b == "wire" and pair.gbs}
    gpus = {gpu.address for gpu in machine.gpus}
    paths = [pair for pair in machine.pairs if pair.a in gpus and pair.b in rates and pair.gbs]
    return max(paths, key=lambda pair: (min(pair.gbs or 0, rates[pair.b] or 0), -pair.chipset), default=None)


def path_gbs(machine: Machine, path: Pair) -> float:
    """GB/s of a path from a GPU to a NIC and its wire."""
    wire = next((pair.gbs for pair in machine.pairs if pair.a == path.b and pair.b == "wire"), None)
    return min(path.gbs or math.inf, wire or math.inf)


def step_s(model: Model, tp: int, pp: int, batch: int, gbs: float, chipset: int) -> float:
    """Seconds of a decode step of `batch` sequences; `gbs` and `chipset` of the path on each host."""
    message = batch * model.hidden * 2 / (gbs * 1e9)
    hop = HOP_S + 2 * chipset * CHIPSET_S  # the sender's crossings and the receiver's
    seconds = STEP_S + model.parameters * 2 / (tp * GPU_MEMORY_GBS * 1e9)
    if tp > 1:
        seconds += (2 * model.layers + 1) * (2 * math.log2(tp) * hop + 2 * (tp - 1) / tp * message)
    return seconds + (pp - 1) * (hop + message)


def change(before: Machine, after: Machine, traffic: Traffic) -> float | None:
    """Per cent of tokens a second that hosts like `after` give more than hosts like `before`; None where a
    path is not known."""
    paths = best_path(before), best_path(after)
    if paths[0] is None or paths[1] is None:
        return None
    old, new = (
        step_s(traffic.model, traffic.tp, traffic.pp, traffic.batch, path_gbs(machine, path), path.chipset)
        for machine, path in ((before, paths[0]), (after, paths[1]))
    )
    return (old / new - 1) * 100


def predict(before: Machine, after: Machine, batch: int = 32) -> list[Prediction]:
    """A table as the article's: each model at each TP and PP of four hosts."""
    found = []
    for tp, pp in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2)):
        for model in MODELS:
            percent = change(before, after, Traffic(tp=tp, pp=pp, batch=batch, model=model))
            if percent is not None:
                found.append(Prediction(model.name, tp, pp, percent))
    return found


def chipset_percent(path_gbs_now: float, crossings: int, traffic: Traffic) -> float:
    """Per cent of tokens a second lost by the crossings of a path."""
    shape = (traffic.model, traffic.tp, traffic.pp, traffic.batch)
    with_crossings = step_s(*shape, path_gbs_now, crossings)
    return (1 - step_s(*shape, path_gbs_now, 0) / with_crossings) * 100


def width_percent(gbs_now: float, gbs_could: float, traffic: Traffic) -> float:
    """Per cent of tokens a second lost by a path that is narrower than it could be."""
    shape = (traffic.model, traffic.tp, traffic.pp, traffic.batch)
    return (1 - step_s(*shape, gbs_could, 0) / step_s(*shape, gbs_now, 0)) * 100


def roce_share(mtu: int) -> float:
    """Payload's part of the wire for RoCE v2 at an RDMA MTU of `mtu` bytes: 82 more a packet are Ethernet
    with preamble and gap (38), IPv4 (20), UDP (8), BTH (12), ICRC (4) (InfiniBand Architecture 1.4, annex
    A17)."""
    return mtu / (mtu + 82)
