"""Which NICs a rank's engine is told to open, where its threads run, and what is said of it."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvik.doctor import Machine
from kvik.handover import near
from kvik.handover.config import ConnectorConfig
from kvik.handover.memory import KvMemory
from kvik.handover.near import Choice, Spot, choose
from kvik.handover.protocol import RankPlace
from kvik.handover.report import ReportFile
from kvik.handover.worker import WorkerSide
from tests.python.doctor.machines import recorded
from tests.python.doctor.small import examined
from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import shape_of


@pytest.fixture(scope="module")
def server() -> Machine:
    """Eight GPUs and eight NICs on two nodes."""
    return examined(recorded("two-sockets-8x8"))


@pytest.fixture(scope="module")
def instance() -> Machine:
    """Eight GPUs and 32 EFAs on two nodes."""
    return examined(recorded("p5.48xlarge"))


def never() -> Machine:
    raise AssertionError("the machine is not looked at")


def giving(machine: Machine) -> Callable[[], Machine]:
    return lambda: machine


@pytest.mark.parametrize("gpu", [None, "", "0000:12:00.0"])
def test_what_somebody_has_named_is_taken_as_it_is(gpu: str | None) -> None:
    for text in (
        "verbs:mlx5_0@3,mlx5_1",
        "efa:near,b",
        "libfabric:tcp:eth0",
        "libfabric:verbs:mlx5_0",
        "plugin:a",
    ):
        assert choose(text, Spot(gpu), machine=never) == Choice(text)
    assert choose(None, Spot(gpu), machine=never).options() == {}
    for text, prefix in (("efa:all", "efa"), ("verbs:all", "verbs"), ("libfabric:efa:all", "libfabric:efa")):
        assert choose(text, Spot(gpu), machine=never).options() == {"nics": prefix}


def test_without_a_word_it_is_near_for_kv_on_a_gpu_and_all_for_the_hosts(instance: Machine) -> None:
    for gpu in instance.gpus:
        spot, asked = Spot(gpu.address), "efa:near"
        chosen = choose("efa", spot, placed=True, machine=giving(instance))
        assert chosen == choose(asked, spot, placed=True, machine=giving(instance))
        devices = str(chosen.nics).removeprefix("efa:").split(",")
        assert len(devices) == 4
        # The bus is in the name.
        assert {int(name[5:-2]) // 8 for name in devices} == {int(gpu.address[5:7], 16) // 8}
        fabric = choose("libfabric:efa", spot, placed=True, machine=giving(instance))
        assert fabric.nics == f"libfabric:{chosen.nics}"
    for text in ("efa", "verbs", "libfabric:efa", "libfabric:tcp", "plugin"):
        chosen = choose(text, Spot(None, 1, 2), machine=never)
        assert (chosen.nics, chosen.cpus, chosen.unknown) == (text, None, "")
        assert str(chosen) == f"{text} (all: the KV lies in host memory)"


def test_ranks_in_host_memory_share_by_number_where_that_is_asked_for(server: Machine) -> None:
    shares = [choose("verbs:near", Spot(None, rank, 4), machine=giving(server)) for rank in range(4)]
    names = [name for share in shares for name in str(share.nics).removeprefix("verbs:").split(",")]
    assert sorted(names) == [f"mlx5_{number}" for number in range(8)]
    assert all(share.cpus is None for share in shares)


def test_every_way_in_which_ranks_come_to_their_gpus_gives_the_same_map(server: Machine) -> None:
    """What CUDA_VISIBLE_DEVICES, replicas or servers a rank belongs to changes which GPU it has, and nothing
    else: whoever has the GPU has its NICs. Ranks of any two servers share no NIC."""
    taken: list[str | None] = []
    for gpu in server.gpus:
        places = [(number, ranks) for ranks in (1, 2, 8) for number in range(ranks)]
        found = {choose("verbs", Spot(gpu.address, *place), machine=giving(server)).nics for place in places}
        assert len(found) == 1
        taken += found
    assert taken == [f"verbs:mlx5_{number}" for number in range(8)]


def test_what_cannot_be_looked_up_makes_it_all_and_is_said(server: Machine) -> None:
    nowhere = replace(server, nics=())
    for text, prefix, gpu, machine, why in (
        ("verbs", "verbs", "", giving(server), "the driver does not say which GPU the KV lies on"),
        ("verbs:near", "verbs", "", giving(server), "the driver does not say which GPU the KV lies on"),
        ("verbs", "verbs", "0000:99:00.0", giving(server), "GPU 0000:99:00.0 is not among the GPUs"),
        ("efa:near", "efa", server.gpus[0].address, giving(server), "has no EFA with a link"),
        ("verbs:near", "verbs", None, giving(nowhere), "has no RDMA NIC with a link"),
        ("libfabric:tcp:near", "libfabric:tcp", "0000:12:00.0", never, "has no devices that"),
        ("plugin:near", "plugin", None, never, "plugin has no devices that /sys/class/infiniband knows"),
    ):
        chosen = choose(text, Spot(gpu), machine=machine)
        assert chosen.nics == prefix, text
        assert why in chosen.unknown, text
        assert f"{prefix} (all: " in str(chosen)
    # Nobody has asked for what such NICs cannot say: that is no fault.
    assert choose("libfabric:tcp", Spot("0000:12:00.0"), machine=never).unknown == ""


def test_threads_run_on_the_node_of_the_nics(server: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = server.gpus[0].address, server.gpus[7].address
    monkeypatch.setattr(near, "_allowed", lambda: set(range(0, 128, 2)))
    chosen = choose("verbs", Spot(first), machine=giving(server))
    assert chosen.options() == {"nics": "verbs:mlx5_0", "cpus": tuple(range(0, 64, 2))}
    assert "; threads on their NUMA node 0" in str(chosen)
    assert choose("verbs", Spot(last), machine=giving(server)).cpus == tuple(range(64, 128, 2))
    # Options that say where they run win, and so does what the process may use.
    assert choose("verbs", Spot(first), placed=True, machine=giving(server)).options() == {
        "nics": "verbs:mlx5_0"
    }
    monkeypatch.setattr(near, "_allowed", lambda: set(range(64)))
    chosen = choose("verbs", Spot(last), machine=giving(server))
    assert chosen.options() == {"nics": "verbs:mlx5_7"}
    assert "threads not on their NUMA node 1, whose processors are not this process's" in str(chosen)
    # On a machine of one node, and for NICs of two, there is no such place.
    one = replace(server, nodes=server.nodes[:1])
    assert choose("verbs", Spot(first), machine=lambda: one).cpus is None
    two = replace(server, gpus=server.gpus[:1])
    assert choose("verbs", Spot(first), machine=lambda: two).options() == {"nics": "verbs"}


def test_the_processors_are_those_of_the_cpuset() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert near._allowed() >= before
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def rank(
    config: ConnectorConfig, gpu: str | None, report: Path, place: RankPlace, on_host: int = 0
) -> FakeNative:
    """Starts a rank, and gives the module that its engine was asked of."""
    native, shape = FakeNative(), shape_of()
    engine: Any = native
    side = WorkerSide(engine, config, "test", place, ReportFile(str(report)), on_host)
    memory = KvMemory(4096, 2 * 8 * 96, 8, 96, ("0", "1"), [0, 768], 48, shape, None, gpu)
    side.register([memory])
    side.close()
    return native


def test_a_rank_tells_its_engine_and_its_log(
    server: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(near, "look", lambda: server)
    monkeypatch.setattr(near, "_allowed", lambda: {0, 1, 64, 65})
    caplog.set_level(logging.INFO, "kvik.handover")
    gpu, report = server.gpus[5].address, tmp_path / "report.jsonl"
    native = rank(ConnectorConfig(nics="verbs"), gpu, report, RankPlace(tp=1, tp_size=2))
    (engine,) = native.engines.values()
    assert (engine.options["nics"], engine.options["cpus"]) == ("verbs:mlx5_5", (64, 65))
    why = f"near GPU {gpu} of 8 alike; threads on their NUMA node 1"
    assert f"NICs verbs:mlx5_5 ({why}), 8 KV blocks" in caplog.text
    (line,) = map(json.loads, report.read_text().splitlines())
    assert line == {"rank": 1, "nics": "verbs:mlx5_5", "why": why, "unknown": "", "outcome": "nics"}
    # An explicit map, and explicit places, win.
    named = ConnectorConfig(nics={0: "verbs:mlx5_0", 1: "verbs:mlx5_1"}, numa_node=0)
    (engine,) = rank(named, gpu, report, RankPlace(tp=1, tp_size=2)).engines.values()
    assert (engine.options["nics"], engine.options.get("cpus")) == ("verbs:mlx5_1", None)
    (engine,) = rank(ConnectorConfig(nics="verbs", numa_node=0), gpu, report, RankPlace()).engines.values()
    assert (engine.options["nics"], engine.options.get("cpus")) == ("verbs:mlx5_5", None)


def test_a_rank_says_what_it_could_not_look_up(
    server: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(near, "look", lambda: server)
    report = tmp_path / "report.jsonl"
    (engine,) = rank(ConnectorConfig(nics="verbs"), "", report, RankPlace()).engines.values()
    assert engine.options["nics"] == "verbs"
    assert [one.levelname for one in caplog.records if one.levelno > logging.INFO] == ["WARNING"]
    assert "all NICs of verbs are opened" in caplog.text
    assert "the driver does not say which GPU the KV lies on" in json.loads(report.read_text())["unknown"]
    # A rank that is told of no NICs looks at nothing, and writes nothing.
    monkeypatch.setattr(near, "look", never)
    (engine,) = rank(ConnectorConfig(), "", report, RankPlace()).engines.values()
    assert "nics" not in engine.options
    assert len(report.read_text().splitlines()) == 1


def test_ranks_in_host_memory_count_on_their_host(
    server: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four replicas with two ranks each, two replicas are on this host."""
    monkeypatch.setattr(near, "look", lambda: server)
    config, taken = ConnectorConfig(nics="verbs:near"), []
    for dp, tp in itertools.product((2, 3), (0, 1)):
        place = RankPlace(tp=tp, tp_size=2, dp=dp)
        (engine,) = rank(config, None, tmp_path / "report.jsonl", place, on_host=4).engines.values()
        taken.append(engine.options["nics"])
    names = sorted(name for nics in taken for name in nics.removeprefix("verbs:").split(","))
    assert names == [f"mlx5_{number}" for number in range(8)]
