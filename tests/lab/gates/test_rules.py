"""The gates' rules on records as other systems give them: vLLM with NIXL, RDMA devices, several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvik_lab.gates import judge, judge_study
from kvik_lab.gates.cli import gate_command
from kvik_lab.records import (
    Client,
    Clock,
    Counters,
    Finding,
    Key,
    Node,
    Place,
    Request,
    Role,
    RunRecord,
    Stated,
    Times,
    WarmUp,
    append,
    read,
)
from kvik_lab.run.gating import judge_again, judged
from kvik_lab.run.journal import Journal
from tests.lab.gates.scene import finding

COUNT, TOKENS, BLOCK, BYTES = 10, 1000, 16, 2048
KV = float(COUNT * 992 * BYTES)  # 62 whole blocks a request
SECOND = 10**9
RDMA = "node_infiniband_port_data_transmitted_bytes_total"
LABEL = '{engine="0",model_name="m"}'


def prefill(**grown: float) -> Counters:
    return {
        f"vllm:prompt_tokens_total{LABEL}": COUNT * TOKENS,
        f"vllm:prefix_cache_hits_total{LABEL}": 0.0,
        f"vllm:external_prefix_cache_hits_total{LABEL}": 0.0,
        'vllm:request_success_total{engine="0",finished_reason="length"}': COUNT,
        **{f"vllm:{name}{LABEL}": value for name, value in grown.items()},
    }


def decode(**grown: float) -> Counters:
    return {
        f"vllm:prompt_tokens_total{LABEL}": COUNT * TOKENS,
        f"vllm:prefix_cache_hits_total{LABEL}": 0.0,
        f"vllm:external_prefix_cache_hits_total{LABEL}": COUNT * (TOKENS - 1),
        'vllm:request_success_total{engine="0",finished_reason="stop"}': 4,
        'vllm:request_success_total{engine="0",finished_reason="length"}': 6,
        f"vllm:nixl_bytes_transferred_sum{LABEL}": KV,
        **{f"vllm:{name}{LABEL}": value for name, value in grown.items()},
    }


def requests(**more: Any) -> tuple[Request, ...]:
    return tuple(
        Request(
            **{
                "id": f"r{at}", "iteration": at, "sent": float(at), "tokens": (at + 0.5, at + 0.6),
                "end": at + 0.7,
                "status": 200, "prompt_tokens": TOKENS, "prompt_tokens_counted": TOKENS, "output_tokens": 2,
                "prompt_digest": f"{at:064x}", **more,
            }
        )
        for at in range(COUNT)
    )  # fmt: skip


def clock(**more: Any) -> Clock:
    values = {
        "wall_before": 0,
        "wall_after": 10 * SECOND,
        "monotonic_before": 5,
        "monotonic_after": 10 * SECOND + 5,
    }
    return Clock(**values | more)


def node(more: Counters | None = None, *, name: str = "a", facts: dict[str, Any] | None = None) -> Node:
    """Eight CPUs for ten seconds, of which the run used twenty seconds."""
    after = {
        'node_cpu_seconds_total{mode="user"}': 15.0, 'node_cpu_seconds_total{mode="nice"}': 0.0,
        'node_cpu_seconds_total{mode="system"}': 6.0, 'node_cpu_seconds_total{mode="irq"}': 0.0,
        'node_cpu_seconds_total{mode="softirq"}': 0.0, 'node_cpu_seconds_total{mode="idle"}': 59.0,
        'node_cpu_seconds_total{mode="iowait"}': 0.0, "kvik_lab_own_cpu_seconds_total": 20.0, **(more or {}),
    }  # fmt: skip
    return Node(name=name, facts=facts or {}, before={}, after=after, clock=clock())


def record(**more: Any) -> RunRecord:
    """vLLM with NIXL, everything as it is to be."""
    values: dict[str, Any] = {
        "id": "run-0",
        "study": "s",
        "key": Key(configuration={}, code={"vllm": "0.33.0"}),
        "levels": {},
        "place": Place(order=0, start="1"),
        "times": Times(began=0, ended=10 * SECOND),
        "stated": stated(),
        "client": client(),
        "requests": requests(),
        "roles": roles(),
        "nodes": (node(),),
    }
    return RunRecord.model_validate(values | more)


def stated(**more: Any) -> Stated:
    values = {
        "entry": "router", "prompt_tokens": TOKENS, "output_tokens": 2, "kv_bytes_per_token": BYTES,
        "block_tokens": BLOCK,
    }  # fmt: skip
    return Stated.model_validate(values | more)


def client(**more: Any) -> Client:
    values = {
        "driver": "builtin", "target": "http://127.0.0.1:8000", "cpu_seconds": 1.0, "wall_seconds": 10.0,
        "largest_lag": 0.001, "clock": clock(),
    }  # fmt: skip
    return Client.model_validate(values | more)


def roles(
    first: Counters | None = None,
    second: Counters | None = None,
    router: Counters | None = None,
    **settings: Any,
) -> tuple[Role, ...]:
    def role(name: Any, port: int, after: Counters) -> Role:
        url = f"http://127.0.0.1:{port}"
        return Role(name=name, kind=name, start="1", url=url, settings=settings, after=after)

    routed = {'kvik_router_requests_total{endpoint="completions",outcome="ok"}': float(COUNT)}
    return (
        role("prefill", 8100, prefill() if first is None else first),
        role("decode", 8200, decode() if second is None else second),
        role("router", 8000, routed if router is None else router),
    )


def test_what_is_right_is_valid() -> None:
    judged = judge(record())
    assert judged.verdict == "valid", judged.findings
    assert {one.status for one in judged.findings} <= {"passed", "unchecked"}


ETH1 = 'node_network_transmit_bytes_total{device="eth1"}'
NO_NIXL = {name: value for name, value in decode().items() if "nixl" not in name}
INVALID, SUSPECT = "invalid", "suspect"


def counted(transport: str) -> Counters:
    """A decode engine of kvik that took everything in by this transport."""
    return decode() | {f'kvik_transfer_bytes_total{{direction="in",transport="{transport}"}}': KV}


RESTLESS = WarmUp(rule="changepoint", requests=60, seconds=30.0, metric="ttft")
UNSYNCED = (node().model_copy(update={"clock": clock(offset=0.02)}), node(name="b"))

# What is changed, the gate that finds it, how grave it is, and what is said.
WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"roles": roles(prefill(prefix_cache_hits_total=5000.0))}, "V1", INVALID, "prefill: 5000 of 10000"),
    ({"roles": roles(prefill(prefix_cache_hits_total=48.0))}, "V1", SUSPECT, "48 of 10000"),
    ({"roles": roles(None, decode(prefix_cache_hits_total=999.0))}, "V1", INVALID, "decode: 999"),
    ({"roles": roles(prefill(external_prefix_cache_hits_total=4000.0))}, "V1", INVALID, "from a store"),
    ({"roles": roles({"up": 1.0})}, "V1", SUSPECT, "does not count prefix-cache hits"),
    ({"roles": roles(None, decode(nixl_bytes_transferred_sum=KV / 2))}, "V2", INVALID, "the prompts have"),
    ({"roles": roles(None, decode(nixl_bytes_transferred_sum=KV * 1.06))}, "V2", SUSPECT, "decode took in"),
    ({"roles": roles(None, NO_NIXL)}, "V2", SUSPECT, "does not count the bytes"),
    ({"roles": roles(None, decode(external_prefix_cache_hits_total=0.0))}, "V3", INVALID, "computed 10000"),
    ({"roles": roles(None, decode(external_prefix_cache_hits_total=9700.0))}, "V3", SUSPECT, "computed 300"),
    ({"client": client(target="http://10.0.0.9:1")}, "V4", INVALID, "none of the run's roles"),
    ({"roles": roles(router={"kvik_router_requests_total": 0.0})}, "V4", INVALID, "counted 0 of 10"),
    ({"roles": roles(router={})}, "V4", SUSPECT, "0 of 10 answers have its Server-Timing"),
    ({"stated": stated(ttft_floor=0.6)}, "V5", INVALID, "10 of 10 first tokens are below"),
    ({"stated": stated(unified_ttft=0.55)}, "V5", SUSPECT, "one engine takes 550.000 ms"),
    ({"requests": requests(prompt_tokens_counted=130)}, "V6", INVALID, "one has 130 tokens and is to"),
    ({"requests": requests(prompt_tokens_counted=None)}, "V6", SUSPECT, "tokens of 0 of 10 prompts"),
    ({"requests": requests(output_tokens=3)}, "V6", SUSPECT, "one has 2 of 3"),
    ({"requests": requests(prompt_digest="f" * 64)}, "V6", SUSPECT, "was sent 10 times"),
    ({"stated": stated(transport="ucx")}, "V7", SUSPECT, "ucx is not shown"),
    (
        {"stated": stated(transport="tcp"), "nodes": (node({f'{RDMA}{{device="mlx5_0"}}': KV}),)},
        "V7", INVALID, "RDMA devices sent",
    ),
    (
        {"stated": stated(transport="nics"), "roles": roles(None, counted("tcp"))},
        "V7", INVALID, "bytes by tcp, and nics is stated",
    ),
    (
        {"stated": stated(transport="tcp"), "roles": roles(None, counted("verbs"))},
        "V7", INVALID, "bytes by verbs, and tcp is stated",
    ),
    (
        {"stated": stated(interfaces=("eth1",)), "nodes": (node({ETH1: 1e5}),)},
        "V7", INVALID, "eth1 carried 100,000 bytes",
    ),
    (
        {"stated": stated(interfaces=("eth1",)), "nodes": (node({ETH1: 9 * KV}),)},
        "V7", SUSPECT, "something else used them",
    ),
    ({"roles": roles(None, decode(num_preemptions_total=3.0))}, "V9", SUSPECT, "decode: 3 preemptions"),
    ({"roles": roles(prefill(nixl_num_kv_expired_reqs_total=1.0))}, "V9", SUSPECT, "KV expired"),
    ({"requests": requests(status=500, error="HTTP 500", tokens=())}, "V9", INVALID, "10 of 10 requests"),
    ({"client": client(cpu_seconds=8.5)}, "V9", SUSPECT, "85% of a CPU"),
    ({"client": client(cpu_seconds=9.9)}, "V9", INVALID, "99% of a CPU"),
    ({"client": client(largest_lag=0.05)}, "V9", SUSPECT, "up to 50.0 ms late"),
    ({"client": client(warmup=RESTLESS)}, "V9", SUSPECT, "the warm-up ended at its bound of 60 requests"),
    ({"nodes": (node({"kvik_lab_own_cpu_seconds_total": 5.0}),)}, "V9", SUSPECT, "used 20% of its CPUs"),
    ({"nodes": (node({'node_cpu_seconds_total{mode="steal"}': 20.0}),)}, "V9", SUSPECT, "a: others than"),
    ({"nodes": (node({"node_cpu_core_throttles_total": 4.0}),)}, "V9", SUSPECT, "4 throttled cores"),
    ({"client": client(clock=clock(wall_after=12 * SECOND))}, "V9", SUSPECT, "set by 2000.0 ms"),
    ({"client": client(clock=clock(largest_step=0.4))}, "V9", SUSPECT, "set by 400.0 ms"),
    ({"nodes": UNSYNCED}, "V9", SUSPECT, "a: its clock is +20.000 ms off"),
    ({"requests": requests(sent=99.0)}, "V9", INVALID, "a token before it was sent"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "gate", "verdict", "said"), WRONG, ids=[case[3] for case in WRONG])
def test_what_is_wrong_is_found(changes: dict[str, Any], gate: str, verdict: str, said: str) -> None:
    judged = judge(record(**changes))
    assert said in finding(judged, gate).what
    assert finding(judged, gate).status == verdict
    assert finding(judged, gate).remedy
    assert judged.verdict == (
        "invalid" if "invalid" in {one.status for one in judged.findings} else "suspect"
    )
    assert judged.verdict in (verdict, "invalid")


def test_an_engine_that_was_started_anew() -> None:
    first = roles()[0].model_copy(update={"before": {f"vllm:prompt_tokens_total{LABEL}": 10**6}})
    judged = judge(record(roles=(first, *roles()[1:])))
    assert "is lower after the run: its process was started anew" in finding(judged, "V9").what


def test_devices_that_carried_the_kv() -> None:
    carried = {'node_network_transmit_bytes_total{device="eth1"}': 1.02 * KV}
    judged = judge(record(stated=stated(transport="ucx", interfaces=("eth1",)), nodes=(node(carried),)))
    assert finding(judged, "V7").status == "passed"


@pytest.mark.parametrize("transport", ["verbs", "libfabric", "plugin"])
def test_nics_are_whatever_the_engine_drives_them_by(transport: str) -> None:
    """An engine is told of `nics`, and counts what they moved by their kind; devices of RDMA may send it."""
    seen = {f'{RDMA}{{device="mlx5_0"}}': KV}
    told = roles(None, counted(transport))
    told = (*told[:1], told[1].model_copy(update={"reported": {"transport": transport}}), *told[2:])
    found = finding(judge(record(stated=stated(transport="nics"), roles=told, nodes=(node(seen),))), "V7")
    assert (found.status, found.measured) == ("passed", 1.0), found


@pytest.mark.parametrize(
    "warmup",
    [
        RESTLESS.model_copy(update={"level_from": 50}),
        WarmUp(rule="count", requests=10, seconds=5.0),
        WarmUp(rule="count", requests=0, seconds=0.0),
    ],
)
def test_a_warm_up_that_ended_as_it_is_to(warmup: WarmUp) -> None:
    assert finding(judge(record(client=client(warmup=warmup))), "V9").status == "passed"


@pytest.mark.parametrize(
    ("driver", "counted", "status"),
    [("aiperf", 2, "unchecked"), ("aiperf", 20, "suspect"), ("vllm-bench", 20, "suspect"),
     ("aiperf", None, "unchecked"), ("builtin", 20, "passed")],
)  # fmt: skip
def test_messages_of_tools_that_are_not_tokens(driver: str, counted: int | None, status: str) -> None:
    """Two messages with twenty tokens: as many as were asked for, and times a token that are none."""
    asked = 2 if counted is None or driver == "builtin" else counted
    sent = requests(output_tokens=asked, output_tokens_counted=counted)
    found = finding(judge(record(client=client(driver=driver), requests=sent)), "V6")
    assert found.status == status, found
    said = "10 of 10 answers came in other messages than one a token: one has 20 tokens in 2"
    assert (said in found.what) == (status == "suspect")
    assert status != "suspect" or "tool: builtin" in found.remedy


def test_what_is_not_stated_is_not_judged() -> None:
    bare = RunRecord.model_validate(
        record().model_dump(by_alias=True)
        | {"stated": Stated(mode="unified"), "roles": (), "nodes": (), "client": Client(driver="aiperf")}
    )
    judged = judge(bare)
    assert judged.verdict == "valid"
    assert {one.gate for one in judged.findings if one.status != "unchecked"} == set()
    for gate in ("V6", "V9"):
        assert finding(judged, gate).what.startswith("not seen, as aiperf does not record it: ")
    own = judge(bare.model_copy(update={"client": Client(driver="builtin")}))
    assert {one.gate for one in own.findings if one.status != "unchecked"} == {"V6", "V9"}


def test_arms_are_compared_setting_by_setting() -> None:
    def run(number: int, **settings: Any) -> RunRecord:
        return record(id=f"run-{number}", roles=roles(**settings))

    usual = [run(at, tp=2, port=at) for at in range(3)]
    other = run(3, tp=4, port=3)
    judged = judge_study([*usual, other])
    assert [finding(one, "V8").status for one in judged] == ["passed"] * 3 + ["invalid"]
    assert "prefill: tp is 4 here and 2 in other runs" in finding(judged[3], "V8").what
    assert all(finding(one, "V8").status == "invalid" for one in judge_study([usual[0], other]))


def test_a_setting_of_one_of_several_engines_is_compared() -> None:
    """Whichever of them it is: the last one has the usual value."""

    def run(number: int, *lengths: int) -> RunRecord:
        engines = [
            Role(name=f"prefill-{at}", kind="prefill", start="s1", settings={"max_model_len": length})
            for at, length in enumerate(lengths)
        ]
        return record(id=f"run-{number}", roles=(*engines, *roles()[1:]))

    other = run(3, 4096, 8192)
    judged = judge_study([*(run(at, 8192, 8192) for at in range(3)), other])
    assert [finding(one, "V8").status for one in judged] == ["passed"] * 3 + ["invalid"]
    assert "prefill: max_model_len is 4096 and 8192 here and 8192 in other" in finding(judged[3], "V8").what
    assert finding(judge(run(0, 8192), [run(1, 8192, 8192)]), "V8").status == "passed"


def test_builds_and_nodes_are_compared() -> None:
    two = record(id="run-1", key=Key(configuration={}, code={"vllm": "0.34.0"}))
    assert "vllm is 0.33.0 here and 0.34.0 in run run-1" in finding(judge(record(), [two]), "V8").what
    one, two = (record(id=f"run-{at}", nodes=(node(facts={"kernel": f"6.{at}"}),)) for at in range(2))
    assert finding(judge(one, [two]), "V8").status == "suspect"
    elsewhere = record(id="run-2", study="another", nodes=(node(facts={"kernel": "6.9"}),))
    assert finding(judge(one, [elsewhere]), "V8").status == "unchecked"


def test_files_that_requests_are_made_from_are_compared() -> None:
    def run(number: int, **files: Any) -> RunRecord:
        return record(id=f"run-{number}", key=Key(configuration={"files": files}))

    one, two = run(0, trace="a"), run(1, trace="b")
    assert "trace had other content than in run run-1" in finding(judge(one, [two]), "V8").what
    assert finding(judge(one, [two]), "V8").status == "invalid"
    assert finding(judge(one, [run(1, trace="a"), run(2, another="b")]), "V8").status == "passed"


@pytest.mark.parametrize("program", ["nixl", "nixl-cu12", "ucx"])
def test_versions_of_nixl_are_compared_where_both_runs_have_it(program: str) -> None:
    """An arm without NIXL has none, and is beside one with it; one that is studied may differ."""

    def run(number: int, version: str | None, **said: Any) -> RunRecord:
        code = {"vllm": "0.33.0"} | ({} if version is None else {program: version})
        return record(id=f"run-{number}", key=Key(configuration={}, code=code), **said)

    found = finding(judge(run(0, "1.5.1"), [run(1, "1.6.0")]), "V8")
    assert (found.status, f"{program} is 1.5.1 here and 1.6.0 in run run-1" in found.what) == (
        "invalid",
        True,
    )
    assert finding(judge(run(0, "1.5.1"), [run(1, None), run(2, "1.5.1")]), "V8").status == "passed"
    studied = run(0, "1.5.1", stated=stated(varied=(program,)))
    assert finding(judge(studied, [run(1, "1.6.0")]), "V8").status == "passed"


def test_backends_of_nixl_are_compared() -> None:
    one, two = (
        record(id=f"run-{at}", roles=roles(nixl_backends=name)) for at, name in enumerate(("UCX", "GDS"))
    )
    assert "nixl_backends is 'UCX' here and 'GDS' in other runs" in finding(judge(one, [two]), "V8").what
    without = record(id="run-1")
    assert finding(judge(one, [without]), "V8").status == "passed"


def test_what_the_doctor_says_of_nodes_is_compared() -> None:
    def run(number: int, **seen: Any) -> RunRecord:
        facts = {
            "kernel": "6.1",
            "doctor": {"nics": ["a: 100 Gbit/s", "b: 100 Gbit/s"], "clock": "tsc"} | seen,
        }
        return record(id=f"run-{number}", nodes=(node(facts=facts),))

    def v8(one: RunRecord, two: RunRecord) -> Finding:
        return finding(judge(one, [two]), "V8")

    usual = run(0)
    slower = run(1, nics=["a: 100 Gbit/s", "b: 25 Gbit/s"])
    found = v8(usual, slower)
    assert found.status == "suspect"
    assert "a: doctor.nics is ['b: 100 Gbit/s'] here and ['b: 25 Gbit/s'] in run run-1" in found.what
    assert v8(usual, run(1)).status == "passed"
    # What was not read is no other machine, whether it is a fact or all of them.
    assert v8(usual, run(1, clock=None)).status == "passed"
    assert v8(usual, run(1, unread="a reason")).status == "passed"
    without = record(id="run-1", nodes=(node(facts={"kernel": "6.1"}),))
    assert v8(usual, without).status == "passed"
    for varied in ("doctor.nics", "doctor"):
        studied = usual.model_copy(update={"stated": usual.stated.model_copy(update={"varied": (varied,)})})
        assert v8(studied, slower).status == "passed"


def test_a_verdict_is_a_function_of_the_record() -> None:
    first = judge(record(roles=roles(prefill(prefix_cache_hits_total=5000.0))))
    assert judge(first) == first
    assert judge(first, gates=["V2"]).verdict == "valid"


def test_hits_of_a_store_that_are_designed() -> None:
    """Prompts are sent again for them; and decode, which has its KV handed over, need ask no store."""
    unasked = decode() | {'kvik_emulator_store_blocks_total{result="hit"}': 0.0}
    served = roles(prefill(external_prefix_cache_hits_total=9000.0), unasked)
    again = requests(prompt_digest="f" * 64)
    judged = judge(record(requests=again, roles=served, stated=stated(store_hit_share=0.9)))
    assert [finding(judged, gate).status for gate in ("V1", "V6")] == ["passed", "passed"], judged.findings
    other = judge(record(requests=again, roles=served, stated=stated(store_hit_share=0.1)))
    assert "90.0%, and 10.0% was designed" in finding(other, "V1").what


def several(first: Counters, second: Counters) -> tuple[Role, ...]:
    """Two prefill engines, between which a router deals out the requests."""
    one, *rest = roles(first)
    other = one.model_copy(update={"name": "prefill-1", "url": "http://127.0.0.1:8101", "after": second})
    return (one.model_copy(update={"name": "prefill-0"}), other, *rest)


def test_engines_of_a_kind_have_their_hits_together() -> None:
    """Each of two engines has half the requests, so half the hits."""
    half = prefill(prefix_cache_hits_total=2500.0)
    designed = judge(record(roles=several(half, half), stated=stated(prefix_hit_share=0.5)))
    assert finding(designed, "V1").status == "passed", finding(designed, "V1")
    few = prefill(prefix_cache_hits_total=40.0)
    undesigned = finding(judge(record(roles=several(few, few))), "V1")
    assert (undesigned.status, undesigned.what[:20]) == ("invalid", "prefill-0, prefill-1"), undesigned
    blocks = prefill() | {'kvik_emulator_store_blocks_total{result="hit"}': 156.25}
    stored = judge(record(roles=several(blocks, blocks), stated=stated(store_hit_share=0.5)))
    assert finding(stored, "V1").status == "passed", finding(stored, "V1")
    silent = finding(judge(record(roles=several(half, {"up": 1.0}))), "V1")
    assert "prefill-1 does not count prefix-cache hits" in silent.what


def test_an_engine_that_told_nothing_leaves_the_sum_unknown() -> None:
    """What its like have counted is half, and no proof that the other half was not there."""
    first, one, router = roles(second={name: value / 2 for name, value in decode().items()})
    silent = one.model_copy(update={"name": "decode-1", "after": {}})
    judged = judge(record(roles=(first, one, silent, router)))
    assert {gate: finding(judged, gate).status for gate in ("V2", "V3", "V4")} == {
        "V2": "suspect", "V3": "suspect", "V4": "suspect",
    }  # fmt: skip


def test_what_did_not_complete_is_given_back() -> None:
    lost = record(id="run-1", outcome="lost", error="no such host", requests=())
    assert judge_study([record(), lost])[1] == lost


def test_the_command(tmp_path: Path) -> None:
    journal, out = tmp_path / "journal.jsonl", tmp_path / "judged.jsonl"
    append(journal, record())
    done = CliRunner().invoke(gate_command, [str(journal), "--out", str(out)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "1 valid, 0 suspect, 0 invalid")
    append(journal, record(id="run-1", roles=roles(prefill(prefix_cache_hits_total=5000.0))))
    append(journal, record(id="run-2", outcome="failed", error="x"))
    done = CliRunner().invoke(gate_command, [str(journal), "--out", str(out)])
    assert done.exit_code == 3
    assert "V1 invalid: prefill: 5000 of 10000 prompt tokens came from its prefix cache" in done.output
    assert "--no-enable-prefix-caching" in done.output
    assert done.output.splitlines()[-1] == "1 valid, 0 suspect, 1 invalid, 1 not completed"
    assert [one.verdict for one in read([out])] == ["valid", "invalid", None]
    assert CliRunner().invoke(gate_command, [str(tmp_path / "none")]).exit_code == 2


def test_verdicts_go_into_a_journal_without_harm_to_it(tmp_path: Path) -> None:
    """A last line without its end is neither made longer nor lost, and who writes there is not disturbed."""
    journal = tmp_path / "runs.jsonl"
    append(journal, record())
    whole = journal.read_bytes()
    for half in (b'{"schema":1,"id":"run-', whole[:-1], b"what somebody else had written"):
        journal.write_bytes(whole + half)
        refused = CliRunner().invoke(gate_command, [str(journal), "--out", str(journal)])
        assert (refused.exit_code, journal.read_bytes()) == (2, whole + half)
        assert "runs.jsonl: its last line has no end" in refused.output
    journal.write_bytes(whole)
    assert CliRunner().invoke(gate_command, [str(journal), "--out", str(journal)]).exit_code == 0
    assert [one.verdict for one in read([journal])] == ["valid"]
    before = journal.read_bytes()
    (tmp_path / "study.yaml").write_text("text")
    with Journal.opened(tmp_path, "text", resume=True):
        refused = CliRunner().invoke(gate_command, [str(journal), "--out", str(journal)])
    assert (refused.exit_code, journal.read_bytes()) == (2, before)
    assert "a study that runs writes there" in refused.output


def test_what_is_judged_otherwise_at_the_end_is_written_again_and_no_more(tmp_path: Path) -> None:
    """The first two runs could be compared with none and with one; the fourth has another arm's setting."""
    with Journal.opened(tmp_path / "j", "text", resume=False) as journal:
        for at, tp in enumerate((2, 2, 2, 4)):
            journal.add(judged(record(id=f"run-{at}", roles=roles(tp=tp)), journal, ("V1", "V8")))
        first = [finding(one, "V8").status for one in journal.records.values()]
        assert first == ["unchecked", "passed", "passed", "invalid"]
        assert judge_again(journal, ("V1", "V8")) == [], "no verdict has changed"
        assert [one.id for one in read([journal.file])] == [f"run-{at}" for at in range(4)]
        assert sum(1 for _ in journal.file.open()) == 5, "only the first run's comparison is news"
        assert finding(journal.records["run-0"], "V8").status == "passed"
        assert judge_again(journal, ("V1", "V8")) == []
        assert sum(1 for _ in journal.file.open()) == 5


def test_a_verdict_that_changes_at_the_end_is_told(tmp_path: Path) -> None:
    with Journal.opened(tmp_path / "j", "text", resume=False) as journal:
        for at, tp in enumerate((4, 2, 2, 2)):
            journal.add(judged(record(id=f"run-{at}", roles=roles(tp=tp)), journal, ("V8",)))
        changed = [(one.id, one.verdict) for one in judge_again(journal, ("V8",))]
    assert ("run-0", "invalid") in changed
    assert ("run-3", "valid") not in changed
    assert {one.id: one.verdict for one in read([journal.file])}["run-0"] == "invalid"
