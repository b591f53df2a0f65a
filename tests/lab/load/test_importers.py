"""Results of other tools, as small files of their form, read into the lab's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvik_lab.errors import LabError
from kvik_lab.load.cli import import_command
from kvik_lab.load.importers import FORMATS, read_foreign
from kvik_lab.records import Figure, LoadResult, read_load
from kvik_lab.records.measures import end_to_end, gaps, tpot, ttft, ttft_from_send

VLLM = {
    "date": "20260131-154500", "backend": "openai", "model_id": "m", "num_prompts": 2, "request_rate": "inf",
    "max_concurrency": 2, "duration": 3.0, "completed": 1, "failed": 1, "total_input_tokens": 20,
    "request_throughput": 0.5, "output_throughput": 1.5, "request_goodput": None,
    "input_lens": [10, 12], "output_lens": [3, 0], "ttfts": [0.25, 0.0], "itls": [[0.05, 0.07], []],
    "start_times": [100.0, 100.5], "latencies": [0.4, 0.0], "queue_times": [0.1, 0.0],
    "generated_texts": ["abc", ""], "errors": ["", "Server disconnected"],
    "mean_ttft_ms": 250.0, "median_ttft_ms": 250.0, "std_ttft_ms": 0.0, "p99_ttft_ms": 250.0,
    "p99.9_itl_ms": 70.0,
}  # fmt: skip
AIPERF = [
    {
        "metadata": {"x_request_id": "a", "request_start_ns": 10**18, "request_end_ns": 10**18 + 4 * 10**8,
                     "benchmark_phase": "profiling", "turn_index": 0},
        "metrics": {"time_to_first_token": {"value": 250.0, "unit": "ms"},
                    "inter_chunk_latency": {"value": [50.0, 70.0], "unit": "ms"},
                    "input_sequence_length": {"value": 10, "unit": "tokens"},
                    "output_sequence_length": {"value": 3, "unit": "tokens"}},
        "error": None,
    },
    {
        "metadata": {"x_request_id": "b", "request_start_ns": 10**18 + 10**9, "request_end_ns": None,
                     "benchmark_phase": "warmup"},
        "metrics": {"error_isl": {"value": 12, "unit": "tokens"}},
        "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"},
    },
]  # fmt: skip
GUIDE: dict[str, Any] = {
    "benchmarks": [{
        "requests": {
            "successful": [{
                "request_id": "a", "request_start_time": 1000.1, "request_end_time": 1000.6,
                "prompt_tokens": 10,
                "output_tokens": 3, "time_to_first_token_ms": 250.0, "cached_tokens": 4,
                "info": {"timings": {"targeted_start": 1000.0, "first_token_iteration": 1000.35,
                                     "last_token_iteration": 1000.55}},
            }],
            "errored": [{"request_id": "b", "request_start_time": 1000.0, "request_end_time": 1000.2,
                         "prompt_tokens": 10, "info": {"error": "boom", "timings": {}}}],
            "incomplete": [],
        },
    }]
}  # fmt: skip
TEBENCH = (
    "I0813 21:00:00.1 1 transfer_engine_bench.cpp:564] Test completed: duration 5.25, batch count 42, "
    "throughput "
    "12.500000 GB/s\nnoise\nTest completed: duration 2.00, batch count 8, throughput 80.00 Gb/s\n"
)
SAMPLES = Path(__file__).parent / "samples"
FIO: dict[str, Any] = {
    "fio version": "fio-3.36", "timestamp": 2000,
    "jobs": [{
        "jobname": "kv", "error": 0, "job options": {"bs": "1M", "iodepth": "8"},
        "read": {"total_ios": 100, "bw_bytes": 2_000_000, "iops": 2.0, "runtime": 1500,
                 "clat_ns": {"mean": 5e6, "stddev": 1e6, "min": 1e6, "max": 9e6,
                             "percentile": {"50.000000": 4_000_000, "99.000000": 8_000_000}}},
        "write": {"total_ios": 0},
    }],
}  # fmt: skip
IPERF: dict[str, Any] = {
    "start": {"version": "iperf 3.16", "timestamp": {"timesecs": 1000}},
    "intervals": [{"sum": {"bits_per_second": 8e9}}, {"sum": {"bits_per_second": 16e9}}],
    "end": {"sum_sent": {"seconds": 2.0, "bits_per_second": 12e9, "retransmits": 5},
            "sum_received": {"seconds": 2.0, "bits_per_second": 11e9}},
}  # fmt: skip


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text()


def read(form: str, content: object) -> LoadResult:
    return FORMATS[form](content if isinstance(content, str) else json.dumps(content), "file")


def values(result: LoadResult, metric: str, **levels: Any) -> dict[str, float]:
    found: list[Figure] = [
        one for one in result.figures if one.metric == metric and levels.items() <= one.levels.items()
    ]
    return {one.statistic: one.value for one in found}


def test_vllm_bench() -> None:
    result = read("vllm-bench", VLLM)
    good, bad = result.requests
    assert ttft_from_send(good) == pytest.approx(0.25)
    assert gaps(good) == pytest.approx([0.05, 0.07])
    assert good.end == pytest.approx(0.4)
    assert good.ok
    assert (bad.error, bad.ok, bad.sent) == ("Server disconnected", False, 0.5)
    assert values(result, "load_ttft") == pytest.approx(
        {"mean": 0.25, "p50": 0.25, "stdev": 0.0, "p99": 0.25}
    )
    assert values(result, "load_itl") == pytest.approx({"p99.9": 0.07})
    assert values(result, "load_output_throughput") == {"value": 1.5}
    assert result.client.load["max_concurrency"] == 2
    assert result.ended - result.began == 3 * 10**9


@pytest.mark.parametrize(
    ("load", "due"),
    [
        ({"request_rate": "inf", "max_concurrency": 2}, None),
        ({"request_rate": "inf", "max_concurrency": None}, -0.1),
        ({"request_rate": 4.0, "max_concurrency": 2}, -0.1),
        ({"request_rate": 4.0, "max_concurrency": None}, -0.1),
        ({"request_rate": "inf", "max_concurrency": 2, "ramp_up_strategy": "linear"}, -0.1),
    ],
)
def test_vllm_bench_has_requests_due_where_users_come_by_themselves(
    load: dict[str, Any], due: float | None
) -> None:
    """Of a closed load it makes all requests at once: what they wait is for others to be answered."""
    good = read("vllm-bench", VLLM | load).requests[0]
    assert good.due == (None if due is None else pytest.approx(due))
    assert ttft_from_send(good) == pytest.approx(0.25)
    assert ttft(good) == pytest.approx(0.25 - (due or 0.0))


def test_vllm_bench_of_older_versions_and_without_details() -> None:
    old = {
        key: value for key, value in VLLM.items() if key not in ("start_times", "latencies", "queue_times")
    }
    good = read("vllm-bench", old).requests[0]
    assert good.due is None
    assert ttft_from_send(good) == pytest.approx(0.25)
    lists = ("ttfts", "itls", "input_lens", "output_lens", "errors", "generated_texts")
    plain = read("vllm-bench", {key: value for key, value in old.items() if key not in lists})
    assert plain.requests == ()
    assert values(plain, "load_ttft")["p99"] == 0.25


def test_several_runs_in_one_file_are_refused() -> None:
    with pytest.raises(LabError, match="has 2 runs"):
        read("vllm-bench", f"{json.dumps(VLLM)}\n{json.dumps(VLLM)}\n")
    with pytest.raises(LabError, match="has 2 benchmarks"):
        read("guidellm", {"benchmarks": GUIDE["benchmarks"] * 2})


def test_aiperf() -> None:
    result = read("aiperf", "\n".join(map(json.dumps, AIPERF)))
    good, bad = result.requests
    assert ttft(good) == pytest.approx(0.25)
    assert tpot(good) == pytest.approx(0.06)
    assert (good.id, good.prompt_tokens_counted, good.output_tokens_counted) == ("a", 10, 3)
    assert (bad.phase, bad.status, bad.error) == ("warmup", 499, "RequestCancellationError: cancelled")
    assert result.began == 10**18


def test_lines_of_json_end_where_json_has_it() -> None:
    """Other ends of lines, as Unicode has them, may be in a text."""
    error = {"code": 500, "type": "E", "message": "one\u2028two\u0085three"}
    failed = {**json.loads(json.dumps(AIPERF[1])), "error": error}
    lines = [json.dumps(one, ensure_ascii=False) for one in (AIPERF[0], failed)]
    assert read("aiperf", "\r\n".join(lines)).requests[1].error == f"E: {error['message']}"


def test_aiperf_without_the_gaps_of_messages() -> None:
    line = json.loads(json.dumps(AIPERF[0]))
    del line["metrics"]["inter_chunk_latency"]
    line["metrics"]["inter_token_latency"] = {"value": 60.0, "unit": "ms"}
    assert gaps(read("aiperf", line).requests[0]) == pytest.approx([0.06, 0.06])


def test_guidellm() -> None:
    bad, good = read("guidellm", GUIDE).requests
    assert ttft(good) == pytest.approx(0.35)
    assert ttft_from_send(good) == pytest.approx(0.25)
    assert end_to_end(good) == pytest.approx(0.55)
    assert gaps(good) == pytest.approx([0.1, 0.1])
    assert (good.cached_tokens, bad.error, bad.ok) == (4, "boom", False)


def test_guidellm_that_sends_as_fast_as_it_can_has_no_due_times() -> None:
    """It targets all requests at the beginning: the last one's first token would come after all others."""
    (benchmark,) = GUIDE["benchmarks"]
    for strategy, waited in (("constant", 0.35), ("throughput", 0.25)):
        asked = benchmark | {"config": {"strategy": {"type_": strategy}}}
        first = next(one for one in read("guidellm", {"benchmarks": [asked]}).requests if one.id == "a")
        assert ttft(first) == pytest.approx(waited)


def test_transfer_engine_bench() -> None:
    result = read("transfer_engine_bench", TEBENCH)
    rates = [one.value for one in result.figures if one.metric == "bandwidth"]
    assert rates == pytest.approx([12.5e9, 10e9])
    assert [one.value for one in result.figures if one.metric == "batches"] == pytest.approx([8.0, 4.0])


def test_nixlbench() -> None:
    result = read("nixlbench", sample("nixlbench"))
    assert values(result, "bandwidth", bytes=4096, batch=1) == {"value": 0.25e9}
    assert values(result, "transfer", bytes=8192, batch=2) == pytest.approx({"mean": 9.9e-6, "p99": 16e-6})
    assert len(result.figures) == 16


def test_perftest() -> None:
    assert values(read("perftest", sample("ib_write_bw")), "bandwidth", bytes=65536)["mean"] == 10000 * 2**20
    assert values(read("perftest", sample("ib_write_bw_gbits")), "bandwidth", bytes=8388608)[
        "mean"
    ] == pytest.approx(10e9)
    later = sample("ib_write_bw").replace("MB/sec", "MiB/sec")
    assert values(read("perftest", later), "bandwidth", bytes=65536)["mean"] == 10000 * 2**20
    with pytest.raises(LabError, match=r"'BW peak\[TB/sec\]' is no unit of bandwidth known here"):
        read("perftest", sample("ib_write_bw").replace("MB/sec", "TB/sec"))
    latency = values(read("perftest", sample("ib_read_lat")), "latency", bytes=2)
    assert latency["p50"] == pytest.approx(1.2e-6)
    assert latency["p99.9"] == pytest.approx(7.2e-6)
    assert len(latency) == 7


def test_nccl_tests() -> None:
    result = read("nccl-tests", sample("all_reduce_perf"))
    assert values(result, "bus_bandwidth", in_place=False) == {"mean": 15e9}
    assert values(result, "latency", in_place=True) == pytest.approx({"mean": 40e-6})
    with pytest.raises(LabError, match="3 results of 1048576 bytes are wrong"):
        read("nccl-tests", sample("all_reduce_perf").replace("15.00      0", "15.00      3"))


def test_fio() -> None:
    result = read("fio", FIO)
    assert values(result, "bandwidth", job="kv", operation="read", bs="1M") == {"mean": 2e6}
    assert values(result, "latency")["p99"] == pytest.approx(0.008)
    assert {one.levels["operation"] for one in result.figures} == {"read"}
    failed = json.loads(json.dumps(FIO))
    failed["jobs"][0]["error"] = 5
    with pytest.raises(LabError, match="fio says error 5"):
        read("fio", failed)


def test_iperf3() -> None:
    result = read("iperf3", IPERF)
    assert [one.value for one in result.figures if one.metric == "bandwidth"] == [1e9, 2e9]
    assert values(result, "received") == {"mean": 11e9 / 8}
    assert values(result, "retransmits") == {"value": 5.0}
    with pytest.raises(LabError, match="the test failed: unable to connect"):
        read("iperf3", {"error": "unable to connect"})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "nonsense", '{"jobs": 3}', '{"benchmarks": {}}'])
def test_what_is_no_such_file_is_refused_by_name(form: str, content: str) -> None:
    with pytest.raises(LabError, match="file"):
        read(form, content)


@pytest.mark.parametrize("where", ["ttfts", "itls", "input_lens", "duration", "errors"])
def test_values_of_the_wrong_kind_are_refused_with_their_place(where: str) -> None:
    with pytest.raises(LabError, match=where):
        read("vllm-bench", VLLM | {where: "wrong"})
    if where != "duration":
        with pytest.raises(LabError, match=where):
            read("vllm-bench", VLLM | {where: [1]})


@pytest.mark.parametrize(
    ("form", "content", "said"),
    [
        ("vllm-bench", VLLM | {"itls": []}, "itls has 0 entries, and ttfts 2"),
        ("vllm-bench", VLLM | {"duration": 10**400}, "duration: is '1000.*not a number"),
        ("guidellm", {"benchmarks": [{"requests": {"successful": [
            GUIDE["benchmarks"][0]["requests"]["successful"][0] | {"output_tokens": 10**12}]}}]},
         "output_tokens: is 1e[+]12 tokens"),
        ("vllm-bench", VLLM | {"duration": 1e300}, "file: has a number that is no time"),
        ("guidellm", {"benchmarks": [{"requests": {"errored": [{
            "request_id": "", "request_start_time": 1.0}]}}]}, "gives no record: id is ''"),
        ("transfer_engine_bench", TEBENCH.replace("GB/s", "Tib/s").replace("Gb/s", "iB/s"), "has no line"),
        ("fio", {"jobs": [{"read": FIO["jobs"][0]["read"] | {"clat_ns": {"percentile": {"p50": 1}}}}]},
         "'p50' is no number"),
        ("nccl-tests", "# size count busbw time\n8 2 1.0 5.0\n", "file: is none of nccl-tests"),
        ("perftest", "#bytes #iterations BW average[Gb/sec]\n\u00b2 5 1.0\n", "file: is none of perftest"),
    ],
)  # fmt: skip
def test_odd_files_are_refused_by_name(tmp_path: Path, form: str, content: Any, said: str) -> None:
    source = tmp_path / "file"
    source.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(LabError, match=said):
        read_foreign(form, source)


@pytest.mark.parametrize("form", ["vllm-bench", "aiperf", "guidellm", "fio", "iperf3"])
def test_whatever_a_file_has_it_is_read_or_refused(tmp_path: Path, form: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    draw, source = random.Random(seed), tmp_path / "file"
    whole = {"vllm-bench": VLLM, "aiperf": AIPERF, "guidellm": GUIDE, "fio": FIO, "iperf3": IPERF}[form]
    for number in range(200):
        changed = _changed(whole, draw)
        lines = changed if form == "aiperf" and isinstance(changed, list) else [changed]
        source.write_text("\n".join(map(json.dumps, lines)))
        try:
            read_foreign(form, source)
        except LabError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}, file {number}: {source.read_text()}") from error


def _changed(value: Any, draw: random.Random) -> Any:
    """The same with one part of it, at any depth, otherwise."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        copy = value.copy()
        key = draw.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if isinstance(copy, dict) and draw.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _changed(copy[key], draw)
        return copy
    return draw.choice(
        [None, "", "x", -1, 0, 1e300, 10**400, True, [], {}, [[]], {"x": 1}, [None], float("nan")]
    )


def test_the_command_writes_what_a_load_would(tmp_path: Path) -> None:
    source, out = tmp_path / "bench.json", tmp_path / "out.json"
    source.write_text(json.dumps(VLLM))
    done = CliRunner().invoke(import_command, ["vllm-bench", str(source), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert read_load(out) == read_foreign("vllm-bench", source)
    source.write_text("{}")
    assert CliRunner().invoke(import_command, ["vllm-bench", str(source), "--out", str(out)]).exit_code == 2
    done = CliRunner().invoke(import_command, ["fio", str(tmp_path / "none"), "--out", str(out)])
    assert done.exit_code == 2
    assert "cannot be read" in done.output


def test_iperf3_without_what_it_was_told_to_omit() -> None:
    """As it leaves these intervals out of its own sums."""
    slow = {"sum": {"bits_per_second": 8e6, "omitted": True}}
    rest = [{"sum": {**one["sum"], "omitted": False}} for one in IPERF["intervals"]]
    result = read("iperf3", {**IPERF, "intervals": [slow, *rest]})
    assert [one.value for one in result.figures if one.metric == "bandwidth"] == [1e9, 2e9]


def test_perftest_by_duration() -> None:
    """It prints a peak of 0, which it has not measured, and of latencies the mean alone."""
    heading = " #bytes  #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]    CPU_Util[%]"
    row = " 65536      884736           0.00               92.77              0.176949       1.50"
    found = values(read("perftest", f"{heading}\n{row}\n"), "bandwidth", bytes=65536)
    assert found == {"mean": pytest.approx(92.77e9 / 8)}
    text = " #bytes   #iterations    t_avg[usec]    tps average\n 2       1577611      1.90     262864.28\n"
    assert values(read("perftest", text), "latency", bytes=2) == {"mean": pytest.approx(1.9e-6)}
