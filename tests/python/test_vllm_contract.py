"""The connector class against the base class of each supported vLLM, and what surrounds requests' lives.

`tools/vllm_base.py` fetches the base classes once. The engine underneath is the stand-in of `fake_engine.py`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.metadata
import inspect
import json
import logging.handlers
import queue
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import (
    V1,
    VERSIONS,
    Current,
    Factory,
    FullAttentionSpec,
    Server,
    SlidingWindowSpec,
    admit,
    base_tool,
    kv_cache_config,
    kv_tensors,
    offer,
    prompt,
    request,
    scheduler_output,
    stand_in,
    vllm_config,
)


def test_overrides_fit_the_base_class(kvik_vllm: ModuleType) -> None:
    base = sys.modules[f"{V1}.base"]
    connector = kvik_vllm.KvikConnector
    assert not connector.__abstractmethods__
    assert issubclass(connector, base.KVConnectorBase_V1)
    assert issubclass(connector, base.SupportsHMA)
    for name, ours in vars(connector).items():
        theirs = getattr(base.KVConnectorBase_V1, name, None) or getattr(base.SupportsHMA, name, None)
        if name.startswith("_") or theirs is None:
            continue
        unbound = [getattr(part, "__func__", part) for part in (ours, theirs)]
        mine, wanted = (list(inspect.signature(part).parameters.values()) for part in unbound)
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in wanted], (
            name
        )


def test_no_hook_is_made_up() -> None:
    """Every public method of the class is a hook of some supported release."""
    hooks: set[str] = set()
    for version in VERSIONS:
        tree = ast.parse((base_tool().fetch(version) / V1.replace(".", "/") / "base.py").read_text())
        hooks |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    with stand_in(VERSIONS[-1]) as module:
        ours = {name for name in vars(module.KvikConnector) if not name.startswith("_")}
    assert ours <= hooks


def test_the_stand_in_leaves_the_modules_of_others_as_they_were() -> None:
    """Also where a package has them as attributes, which `import a.b as c` and `monkeypatch` read."""
    import kvik.handover

    before = kvik.handover
    with stand_in(VERSIONS[-1]):
        pass
    assert kvik.handover is before is sys.modules["kvik.handover"]


def test_everything_that_the_scheduler_calls_is_there(kvik_vllm: ModuleType) -> None:
    folder = base_tool().fetch(sys.modules["vllm"].__version__)
    tree = ast.parse((folder / "vllm/v1/core/sched/scheduler.py").read_text())
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "connector"
    }
    assert "get_num_new_matched_tokens" in called
    assert not {name for name in called if not hasattr(kvik_vllm.KvikConnector, name)}


def test_vllm_knows_the_connector_by_name(kvik_vllm: ModuleType) -> None:
    """By kvik's plugin, in a process that imports nothing else of it, and by the module itself."""
    assert Factory.known.pop("KvikConnector") == ("kvik.vllm", "KvikConnector")
    (plugin,) = (
        one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "kvik"
    )
    for _ in range(2):
        plugin.load()()
        module, name = Factory.known["KvikConnector"]
        assert getattr(importlib.import_module(module), name) is kvik_vllm.KvikConnector


@pytest.mark.usefixtures("kvik_vllm")
def test_other_versions_are_refused() -> None:
    versions = sys.modules["kvik.vllm.versions"]
    assert versions.check("0.32.0+cpu") == (0, 32)
    for wrong in ("0.27.1", "0.34.0", "1.0.0", "dev"):
        with pytest.raises(ImportError, match=r"0\.28 to 0\.33"):
            versions.check(wrong)


def test_unserved_setups_are_refused_by_name(kvik_vllm: ModuleType, native: FakeNative) -> None:
    Server(kvik_vllm, native, "kv_both")  # sets the stand-in engine
    role = sys.modules[f"{V1}.base"].KVConnectorRole.SCHEDULER
    spec = type(kv_cache_config().kv_cache_groups[0].kv_cache_spec)
    other = type("ChunkedLocalAttentionSpec", (), {})
    for config, cache, text in (
        (
            vllm_config("kv_both", decode_context_parallel_size=2),
            kv_cache_config(),
            "decode_context_parallel_size 1",
        ),
        (vllm_config("kv_both"), kv_cache_config((spec, other)), "FullAttentionSpec and ChunkedLocal"),
        (vllm_config("kv_both"), kv_cache_config((other,)), "this model's is ChunkedLocalAttentionSpec"),
        (vllm_config("kv_both"), kv_cache_config(()), "no KV cache"),
        (vllm_config("kv_both", extra={"expiry_s": 3}), kv_cache_config(), "did you mean 'expiry'"),
    ):
        with pytest.raises(ValueError, match=text):
            kvik_vllm.KvikConnector(config, role, cache)


@pytest.mark.parametrize("extra", [{}, {"store": {"host_cache": "1MiB"}}])
def test_kv_that_depends_on_what_comes_after_it_is_refused(
    kvik_vllm: ModuleType, native: FakeNative, extra: dict[str, Any]
) -> None:
    """Of prefix LMs, which vLLM keeps as full attention with a mark: two prompts that begin alike have other
    KV from the first token on."""
    Server(kvik_vllm, native, "kv_both")  # sets the stand-in engine
    whole = type("FullAttentionSpec", (), {"non_causal": True})
    config = vllm_config("kv_both", extra=extra)
    for role in sys.modules[f"{V1}.base"].KVConnectorRole:
        with pytest.raises(ValueError, match=r"see all of the prompt \(non_causal\)"):
            kvik_vllm.KvikConnector(config, role, kv_cache_config((whole,)))


def test_several_groups_are_served_where_a_failed_load_of_them_can_be_told(
    kvik_vllm: ModuleType, native: FakeNative
) -> None:
    Server(kvik_vllm, native, "kv_both")  # sets the stand-in engine
    base = sys.modules[f"{V1}.base"]
    cache = kv_cache_config((FullAttentionSpec, SlidingWindowSpec))
    if hasattr(base, "KVConnectorTransferResults"):
        made = kvik_vllm.KvikConnector(vllm_config("kv_both"), base.KVConnectorRole.SCHEDULER, cache)
        assert made.get_loaded_kv_cache_group_ids(None) == (0, 1)
    else:
        with pytest.raises(ValueError, match=r"with vLLM 0\.30 or later.*this model has 2"):
            kvik_vllm.KvikConnector(vllm_config("kv_both"), base.KVConnectorRole.SCHEDULER, cache)


def test_a_step_without_tokens_waits_for_a_load(pair: tuple[Server, Server], native: FakeNative) -> None:
    """And no longer than 4 ms; a step that computes waits for nothing. So does prefill's for its reader."""
    p, d = pair
    params = offer(p, prompt(4), [3])  # prefill's step that grants it has not run
    assert admit(d, request("d-1", prompt(4), params), [5]) == 4
    assert not d.step(scheduler_output([("d-0", [7], 0, 7)])).received
    assert native.waits == []
    assert not d.step().received
    assert native.waits == [0.004]
    p.step(scheduler_output([("p-0", [7], 0, 7)]))
    assert native.waits == [0.004]
    assert not p.step().sent
    assert native.waits == [0.004] * 2
    assert d.step().received == {"d-1"}
    assert p.step().sent == {"p-1"}
    for server in (d, p):
        server.step()
    assert native.waits == [0.004] * 2  # one that has ended needs no waiting, nor does nothing


@pytest.mark.parametrize("awaited", [True, False])
def test_a_step_waits_for_a_store_before_a_send(
    pair: tuple[Server, Server], native: FakeNative, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    """A request waits for the one, and nobody for the other."""
    p, _ = pair
    offer(p, prompt(4), [3])
    p.step(scheduler_output([("p-0", [7], 0, 7)]))
    (worker,) = p.workers
    given: list[float] = []
    clock = iter([7.0, 7.001])  # before the wait for handovers, and after it
    cache = SimpleNamespace(awaited=awaited, take_received=set, collect=given.append)
    monkeypatch.setattr(worker, "_cache_rank", cache)
    monkeypatch.setattr(
        sys.modules[type(worker).__module__], "time", SimpleNamespace(monotonic=clock.__next__)
    )
    worker._idle = True
    worker._collect()
    monkeypatch.undo()
    assert native.waits == ([] if awaited else [0.004])
    assert given == [pytest.approx(0.003)]


def test_report_file(kvik_vllm: ModuleType, native: FakeNative, tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    p, d = (
        Server(kvik_vllm, native, role, extra={"report_file": str(path)})
        for role in ("kv_producer", "kv_consumer")
    )
    for number, fault in enumerate((None, "peer_lost", "other prompt")):
        params = offer(p, prompt(8), [1, 2], request_id=f"p-{number}")
        p.step()
        native.faults = [fault] if fault == "peer_lost" else []
        admit(
            d, request(f"d-{number}", prompt(8, first=5 if fault == "other prompt" else 100), params), [5, 6]
        )
        d.step()
    every = [json.loads(line) for line in path.read_text().splitlines()]
    sent = [(line["request_id"], line["reason"]) for line in every if line["outcome"] == "sent"]
    assert sent[0] == ("p-0", "consumed")
    lines = [line for line in every if line["outcome"] != "sent"]
    assert [(line["request_id"], line["outcome"], line["reason"], line["rank"]) for line in lines] == [
        ("d-0", "loaded", None, 0),
        ("d-1", "failed", "peer_lost", 0),
        ("d-2", "recomputed", "digest_mismatch", None),
    ]
    assert lines[0]["remote_request_id"] == "p-0"
    assert lines[0]["blocks"] == lines[0]["pages"] == 2
    assert lines[0]["bytes"] == 2 * 3 * (2 * 4 * 8) * 2
    assert lines[0]["mechanism"] == "4 channels"


def test_stats_add_up_and_reach_the_log_line(pair: tuple[Server, Server], kvik_vllm: ModuleType) -> None:
    p, d = pair
    for number in range(2):
        params = offer(p, prompt(8), [1, 2], request_id=f"p-{number}")
        p.step()
        admit(d, request(f"d-{number}", prompt(8), params), [5, 6])
        d.step()
    build = kvik_vllm.KvikConnector.build_kv_connector_stats
    first, second = (build(stats) for stats in d.stats)
    summary = first.aggregate(second).reduce()
    assert summary["loads"] == 2
    assert summary["mean ms"] == 2.0
    assert not first.is_empty()
    assert build().is_empty()


def test_a_replica_of_a_model_without_experts_is_not_the_first_rank_again(
    kvik_vllm: ModuleType, native: FakeNative
) -> None:
    """vLLM tells each such replica that its data-parallel rank is 0 of 1; only its index says which it is."""
    Server(kvik_vllm, native, "kv_both")  # sets the stand-in engine
    config = vllm_config("kv_both", data_parallel_index=1, data_parallel_rank=0)
    config.kv_transfer_config.kv_connector_extra_config = {
        "listen": "127.0.0.1:7400",
        "nics": ["efa:a", "efa:b"],
    }
    role = sys.modules[f"{V1}.base"].KVConnectorRole.WORKER
    with vllms_log() as records:
        worker = kvik_vllm.KvikConnector(config, role, kv_cache_config())
        taken(records)
        worker.register_kv_caches(kv_tensors(blocks=16))
        (line,) = taken(records)
    hello = worker.get_handshake_metadata().hello
    options = next(engine.options for engine in native.engines.values() if engine.id == hello.kvik_engine_id)
    assert (options["name"], options["listen"], options["nics"]) == (
        "vllm-both-rank1",
        ["127.0.0.1:7401"],
        "efa:b",
    )
    assert line.startswith("INFO kvik: vllm-both-rank1: engine ")
    assert ", NICs efa:b, 16 KV blocks" in line
    assert hello.place.dp == 1


def test_nics_that_do_not_fit_the_ranks_are_refused(kvik_vllm: ModuleType, native: FakeNative) -> None:
    """On both sides of a server, before anything is opened."""
    Server(kvik_vllm, native, "kv_both")  # sets the stand-in engine
    config = vllm_config("kv_both", tp=2, extra={"nics": ["efa"]})
    for role in sys.modules[f"{V1}.base"].KVConnectorRole:
        with pytest.raises(ValueError, match="nics names no NICs for rank 1 of this server, but for 0"):
            kvik_vllm.KvikConnector(config, role, kv_cache_config())


def warned(text: str) -> int:
    return text.count('"kv_load_failure_policy": "recompute"')


@pytest.mark.parametrize(
    ("role", "policy", "warnings"),
    [
        ("kv_consumer", "fail", 1),
        ("kv_both", "fail", 1),
        ("kv_producer", "fail", 0),
        ("kv_both", "recompute", 0),
    ],
)
def test_the_policy_that_fails_requests_is_warned_of(
    kvik_vllm: ModuleType, native: FakeNative, role: str, policy: str, warnings: int
) -> None:
    """Once a server, by those who load."""
    with vllms_log() as records:
        Server(kvik_vllm, native, role, tp=2, policy=policy)
        assert warned("\n".join(taken(records))) == warnings


@pytest.mark.parametrize(
    ("outer", "inner", "warnings"), [("recompute", "fail", 0), ("fail", "recompute", 1), (None, "fail", 0)]
)
def test_the_policy_is_that_of_the_server_and_not_of_one_of_its_connectors(
    kvik_vllm: ModuleType, native: FakeNative, outer: str | None, inner: str, warnings: int
) -> None:
    """As vLLM's `MultiConnector` makes its connectors: of a copy of the config, with a part in place of the
    whole. Where the whole cannot be seen, nothing is said of it."""
    Server(kvik_vllm, native, "kv_both")  # sets the stand-in engine
    whole = vllm_config("kv_consumer")
    whole.kv_transfer_config.kv_load_failure_policy = outer
    config = copy.copy(whole)
    config.kv_transfer_config = copy.copy(whole.kv_transfer_config)
    config.kv_transfer_config.kv_load_failure_policy = inner
    roles = sys.modules[f"{V1}.base"].KVConnectorRole
    with vllms_log() as records:
        kvik_vllm.KvikConnector(config, roles.SCHEDULER, kv_cache_config())
        with Current.set(None if outer is None else whole):
            kvik_vllm.KvikConnector(config, roles.WORKER, kv_cache_config())
        assert warned("\n".join(taken(records))) == warnings


@contextlib.contextmanager
def vllms_log() -> Iterator[queue.SimpleQueue[logging.LogRecord]]:
    """The records that vLLM's handlers get while the block runs, at vLLM's usual level."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    ours, vllm = logging.getLogger("kvik"), logging.getLogger("vllm")
    before = ours.level, vllm.level
    ours.setLevel(logging.NOTSET)
    vllm.setLevel(logging.INFO)
    vllm.addHandler(handler)
    try:
        yield records
    finally:
        vllm.removeHandler(handler)
        ours.setLevel(before[0])
        vllm.setLevel(before[1])


def taken(records: queue.SimpleQueue[logging.LogRecord]) -> list[str]:
    """Level and text of what was logged since the last call."""
    found = []
    while not records.empty():
        record = records.get_nowait()
        found.append(f"{record.levelname} {record.getMessage()}")
    return found


def test_the_handover_speaks_in_vllms_log(kvik_vllm: ModuleType, native: FakeNative) -> None:
    """At vLLM's level and with its handlers, and once, however many connectors a process has."""
    with vllms_log() as records:
        p, _ = (Server(kvik_vllm, native, role) for role in ("kv_producer", "kv_consumer"))
        taken(records)
        offer(p, prompt(8), [1, 2])
        (line,) = taken(records)
    assert line.startswith("INFO kvik: request p-1: 8 tokens in 2 KV blocks offered")


def test_engines_speak_in_vllms_log(kvik_vllm: ModuleType, native: FakeNative) -> None:
    """Why a session ended is known to the engine alone."""
    with vllms_log() as records:
        Server(kvik_vllm, native, "kv_producer")
        taken(records)
        logging.getLogger("kvik.engine").info("session 3 ended: the peer closed a channel")
        assert taken(records) == ["INFO session 3 ended: the peer closed a channel"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_handover_is_a_line_on_either_side_with_one_id(
    kvik_vllm: ModuleType, native: FakeNative, ranks: int
) -> None:
    with vllms_log() as records:
        p, d = (Server(kvik_vllm, native, role, tp=ranks) for role in ("kv_producer", "kv_consumer"))
        params = offer(p, prompt(8), [1, 2])
        p.step()
        assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
        taken(records)
        d.step()
        (line,) = taken(records)
        moved = 2 * 3 * (2 * 4 * 8) * 2  # blocks, layers, a block of the rank's heads, bytes
        assert line == (
            "INFO kvik: request d-1: KV of prefill's request p-1 loaded: 2 KV blocks, "
            f"{moved} bytes on rank 0 of {ranks}, over tcp (4 channels) in 2.00 ms"
        )
        p.step()
        (line,) = taken(records)
    assert re.fullmatch(
        r"INFO kvik: request p-1: every reader has confirmed, 2 KV blocks "
        rf"\({moved} bytes on rank 0 of {ranks}\) go back after \d+\.\d\d ms",
        line,
    )


def test_other_ends_name_the_same_id_and_speak_up(kvik_vllm: ModuleType, native: FakeNative) -> None:
    with vllms_log() as records:
        p, d = (Server(kvik_vllm, native, role) for role in ("kv_producer", "kv_consumer"))
        params = offer(p, prompt(8), [1, 2])
        p.step()
        native.now += 121
        taken(records)
        p.step()
        (line,) = taken(records)
        assert line.startswith("WARNING kvik: request p-1: its grant ended as expired, 2 KV blocks (")
        assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
        d.step()
        (line,) = taken(records)
        assert line.startswith(
            "WARNING kvik: request d-1: load of prefill's request p-1 from its rank 0 failed"
        )
        # A client may have changed it: it must not look like a line of another request.
        params["remote_request_id"] = "p-1\nINFO kvik: request d-1: all is well"
        assert admit(d, request("d-2", prompt(8, first=50), params), [5, 6]) == 0
        (line,) = taken(records)
    assert line.startswith("WARNING kvik: request d-2, with KV of prefill's request 'p-1\\nINFO")
    assert "\n" not in line


def test_shutdown(pair: tuple[Server, Server], native: FakeNative) -> None:
    for server in pair:
        for side in (server.scheduler, *server.workers):
            side.shutdown()
            side.shutdown()
    assert all(engine.closed for engine in native.engines.values())
