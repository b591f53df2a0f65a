"""The emulator's parts by themselves: pages, step times, faults, messages, and who refuses whom."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvik
from kvik.config import EMULATOR
from kvik.doctor import examine, load
from kvik.doctor.cost import MODELS, best_path, path_gbs, step_s
from kvik.emulator import wire
from kvik.emulator.compute import PRESETS, parse_compute
from kvik.emulator.faults import Fault, Faults, parse_fault
from kvik.emulator.memory import pool_memory
from kvik.emulator.options import Options
from kvik.emulator.pool import PagePool
from kvik.emulator.rank import Setup
from kvik.emulator.requests import Request, Sampling, Status
from kvik.emulator.wire import Message
from kvik.handover import native
from kvik.handover.holding import HeldBlocks
from kvik.handover.protocol import RankHello, RankPlace
from kvik.handover.report import ReportFile
from kvik.handover.scheduler import Identity, SchedulerSide
from tests.python.doctor.machines import recorded
from tests.python.emulator.servers import ASK_PREFILL, TINY, prompt_of

OPTIONS = Options(**{**EMULATOR.defaults(), "kv_memory": 1 << 20})
VLLM_MODEL = {"model": "tiny@None", "dtype": "torch.float32", "quantization": "None", "cache_dtype": "auto"}


def _side(engine: kvik.Engine, model: dict[str, str], name: str) -> SchedulerSide:
    """The scheduler side of a server with this identity and the KV of the tiny shape."""
    memory = pool_memory(TINY, TINY.of_rank(16), 64, plain=False)
    identity = Identity(engine_id=name, model=model, ranks=1, is_producer=True, is_consumer=True)
    side = SchedulerSide(native.load(), identity, 60.0, HeldBlocks(2.0, 1), ReportFile(None))
    template = engine.ticket_template(memory.layout(native.load()))
    hello = RankHello(
        RankPlace(), engine.addresses[0], engine.id, (str(template),), (memory.layers,), (memory.shape,)
    )
    side.set_ranks({0: hello})
    return side


def _request(name: str, params: dict[str, Any] | None) -> Request:
    prompt = np.array(prompt_of(40, seed=1), dtype=np.uint32)
    return Request(name, prompt, Sampling(1), TINY.name, kv_transfer_params=params)


@pytest.mark.parametrize("prefill", ["vllm", "emulator"])
def test_an_emulator_and_a_real_engine_refuse_each_other_by_name(
    prefill: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same shape and the same tokens; one of them has no model, and the text says which."""
    emulator = dict(OPTIONS.plan().identity.model)
    models = {"vllm": VLLM_MODEL, "emulator": emulator}
    other = "emulator" if prefill == "vllm" else "vllm"
    with kvik.Engine() as engine:
        first, second = _side(engine, models[prefill], prefill), _side(engine, models[other], other)
        done = _request("one", dict(ASK_PREFILL))
        done.status, done.num_computed_tokens = Status.FINISHED_LENGTH_CAPPED, 40
        held, params = first.request_finished(done, ([0, 1, 2],))
        assert held
        assert params is not None
        with caplog.at_level(logging.WARNING, logger="kvik.handover"):
            assert second.get_num_new_matched_tokens(_request("two", params), 0) == (0, False)
        assert second.take_counters() == {"recomputed_namespace_mismatch": 1}
        assert "namespace_mismatch" in caplog.text
        assert "kvik-emulator:tiny" in caplog.text
        same = _side(engine, models[prefill], "same")
        assert same.get_num_new_matched_tokens(_request("three", params), 0) == (40, True)


def test_pages_are_counted_cached_and_reused() -> None:
    """A freed page is found by its key until it is handed out again, the longest free first."""
    pool = PagePool(4)
    first = pool.take(2)
    assert [page.number for page in first] == [0, 1]
    assert pool.usage == 0.5
    for page, key in zip(first, (b"a", b"b"), strict=True):
        pool.cache(page, key)
    pool.free_blocks(reversed(first))
    assert pool.free == 4
    found = pool.find([b"a", b"b", b"c"])
    assert found == first
    assert pool.can_take(found, 2)
    assert not pool.can_take(found, 3)
    pool.touch(found)
    assert [page.number for page in pool.take(2)] == [2, 3]
    assert pool.free == 0
    pool.touch(found[:1])
    pool.free_blocks(reversed(found))
    assert pool.free == 1, "the first page has another reference"
    assert [page.number for page in pool.take(1)] == [1]
    assert pool.find([b"a", b"b"]) == found[:1], "the second page's content is gone"


def test_a_second_page_with_the_same_content_is_not_the_one_found() -> None:
    pool = PagePool(3)
    one, other = pool.take(2)
    pool.cache(one, b"same")
    pool.cache(other, b"same")
    assert pool.find([b"same"]) == [one]
    pool.free_blocks([one, other])
    pool.take(3)
    assert pool.find([b"same"]) == []


def test_compute_models() -> None:
    """The presets are what their formulas say, and keys override them."""
    large = PRESETS["h100-70b-like"]
    assert large.fixed == pytest.approx(141.2e9 / (4 * 0.8 * 3.35e12))
    assert large.prefill_token == pytest.approx(2 * 70.6e9 / (4 * 0.5 * 989e12))
    assert large.context_token == pytest.approx(327_680 / (4 * 0.8 * 3.35e12))
    assert large.seconds(100, 10, 1000) == pytest.approx(
        large.fixed + 110 * large.prefill_token + 1000 * large.context_token
    )
    assert parse_compute("instant").seconds(9, 9, 9) == 0
    # Tokens 100 to 250 in steps of 100: of 100 with 200 of context, and of 50 with 250.
    steps = parse_compute("fixed=1,prefill_token=0.01,context_token=0.001,step_tokens=100")
    assert steps.prefill_seconds(100, 250) == pytest.approx(2 + 1.5 + 0.45)
    assert steps.prefill_seconds(7, 7) == 0
    changed = parse_compute("h100-70b-like,fixed=0.5,step_tokens=77")
    assert changed == replace(large, fixed=0.5, step_tokens=77)
    for text in (
        "",
        "h200",
        "fixed",
        "fixed=x",
        "fixed=-1",
        "fixed=nan",
        "step_tokens=0",
        "a=1",
        "fixed=1,instant",
    ):
        with pytest.raises(kvik.InvalidArgument):
            parse_compute(text)


def test_a_step_of_hardware_that_the_doctor_has_recorded(tmp_path: Path) -> None:
    """As the doctor's cost model says; what is not known is named."""
    file = tmp_path / "host.json"
    file.write_text(json.dumps(recorded("desktop-h770-before")))
    machine = examine(load(file))
    path = best_path(machine)
    assert path is not None
    found = parse_compute(f"doctor={file},model=llama-3-8b,tp=2,pp=2")
    for batch in (1, 8):
        wanted = step_s(MODELS[-1], 2, 2, batch, path_gbs(machine, path), path.chipset)
        assert found.seconds(0, batch, 0) == pytest.approx(wanted)
    for text, said in (
        (f"doctor={file},model=other", "model='other'; the doctor's cost model knows Llama-3.2-1B"),
        (f"doctor={file},model=Llama-3-8B,tp=0", "tp='0' is no whole number"),
        (f"doctor={file},model=Llama-3-8B,fixed=1", "'fixed' is none of doctor, model, tp, pp"),
        (f"doctor={tmp_path / 'none'},model=Llama-3-8B", "make one with `kvik doctor --save`"),
    ):
        with pytest.raises(kvik.InvalidArgument, match=re.escape(said)):
            parse_compute(text)


def test_faults() -> None:
    """What is ordered strikes when it is due, as often as it says."""
    parse = partial(parse_fault, dp=2, tp=3)
    assert parse("slow") == Fault("slow")
    assert parse("slow:ms=5") == Fault("slow", factor=1.0, ms=5.0)
    assert parse("dead:after=3,what=rank,dp=1") == Fault("dead", after=3, what="rank", dp=1)
    for text in (
        "",
        "ded",
        "slow:after=1",
        "dead:after=0",
        "dead:what=engine",
        "slow:factor=nan",
        "slow:ms=-1",
    ):
        with pytest.raises(kvik.InvalidArgument):
            parse(text)
    faults = Faults(
        tuple(map(parse, ["slow:factor=3", "stalled:after=2,ms=500", "dead:what=rank,dp=1,rank=2"]))
    )
    first, second, third = (faults.of_step(0) for _ in range(3))
    assert (first.factor, first.stand_s, first.signals) == (3.0, 0.0, ())
    assert second.stand_s == 0.5
    assert third.stand_s == 0.0
    assert faults.of_step(1).signals == ((2, 9),)
    assert faults.of_step(1).signals == ()
    faults.order(parse("stalled"))
    assert faults.of_step(0).stand_s is None
    wrong = Faults((parse("wrong-page:after=2,times=2"),))
    assert [wrong.wrong_page([4], 1) is not None for _ in range(5)] == [False, True, True, False, False]
    assert all(Faults((parse("wrong-page:times=0"),)).wrong_page([4], 1) for _ in range(3))


def test_a_fault_of_a_replica_or_rank_that_is_not_there_is_refused() -> None:
    """It would strike nobody, and whoever ordered it would take the server for one that stands it."""
    there = parse_fault("stalled:what=rank,dp=1,rank=2", dp=2, tp=3)
    assert there == Fault("stalled", what="rank", dp=1, rank=2)
    for text, said in (
        ("stalled:rank=1", "rank is without effect where what=engine"),
        ("stalled:what=rank,ms=500", "ms is without effect where what=rank"),
        ("dead:rank=1", "rank is without effect where what=server"),
        ("stalled:dp=2", "dp=2 is out of range: here it is 0 to 1"),
        ("dead:rank=3", "0 to 2"),
    ):
        with pytest.raises(kvik.InvalidArgument, match=said):
            parse_fault(text, dp=2, tp=3)
    with pytest.raises(kvik.InvalidArgument, match="dp=1 is out of range"):
        replace(OPTIONS, fault=("stalled:dp=1",)).faults()


def test_messages() -> None:
    """What is sent is what comes, whatever its size; what is too long or cut short is an error or an end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arrays = [np.arange(size, dtype=np.uint64) for size in (0, 1, 200_000)]
        sender = threading.Thread(target=wire.send, args=(ours, Message("kind", {"a": [1, "x"]}, arrays)))
        sender.start()
        got = wire.receive(theirs)
        sender.join()
        assert got is not None
        assert (got.kind, got.fields) == ("kind", {"a": [1, "x"]})
        assert all(
            np.array_equal(one, other.view(np.uint64)) for one, other in zip(arrays, got.arrays, strict=True)
        )
        ours.sendall(b"\xff" * 8)
        with pytest.raises(wire.WireError):
            wire.receive(theirs)
        ours.sendall(b"\x05\x00")
        ours.close()
        assert wire.receive(theirs) is None


def test_setups_and_plans_survive_the_wire() -> None:
    """Dataclasses with dataclasses, tuples, dicts with numbers for keys, and nothing."""
    setup = OPTIONS.plan().setup
    assert wire.build(Setup, wire.plain(setup)) == setup
    memory = pool_memory(TINY, TINY.of_rank(16), 4, plain=True)
    hello = wire.plain(RankHello(RankPlace(dp=1), "a", "e", ("t",), (memory.layers,), (memory.shape,)))
    assert wire.plain(wire.build(RankHello, hello)) == hello
    assert wire.build(dict[int, tuple[str, int | None]], {"3": ["x", None]}) == {3: ("x", None)}
    assert wire.build(list[tuple[int, ...]], [[1, 2], []]) == [(1, 2), ()]
