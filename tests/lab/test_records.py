"""Records: what is written is what is read, and the table that an analysis takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from kvik_lab.errors import LabError
from kvik_lab.records import (
    Figure,
    Key,
    Place,
    Request,
    RunRecord,
    Times,
    append,
    dump,
    iterate,
    read,
)
from kvik_lab.records.measures import Goals
from kvik_lab.records.schema import Client
from kvik_lab.records.table import COLUMNS, metrics, table, unit


def request(at: int, sent: float, *tokens: float, **more: Any) -> Request:
    times = tuple(sent + one for one in tokens)
    return Request(id=f"r{at}", iteration=at, sent=sent, tokens=times, end=sent + 1, status=200, **more)


def record(number: int, **more: Any) -> RunRecord:
    values: dict[str, Any] = {
        "id": f"run-{number}",
        "study": "s",
        "key": Key(configuration={"tokens": 1000, "roles": [{"flags": ["--x"], "port": None}]}),
        "levels": {"transport": "tcp", "tokens": 1000, "share": 0.5, "mode": None},
        "place": Place(order=number, start="start-1", group="g1"),
        "times": Times(began=1, ended=2),
        "requests": (request(0, 1.0, 0.3, 0.4, 0.6), request(1, 2.0, 0.5)),
    }
    return RunRecord.model_validate(values | more)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, second = record(0), record(1, requests=(), outcome="failed", error="no such host")
    for one in (first, second):
        append(path, one)
    assert read([path]) == (first, second)
    assert all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())


def test_a_record_that_comes_again_is_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    judged = record(0, verdict="invalid")
    for one in (record(0), record(1), judged):
        append(path, one)
    assert len(list(iterate(path))) == 3
    assert read([path]) == (judged, record(1))


def test_a_line_that_a_killed_writer_had_begun_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append(path, record(0))
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert read([path]) == (record(0),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "line 1: has form 2, and this program reads 1"),
        ({"studie": "s"}, "is no RunRecord: studie: Extra inputs"),
        ({"place": {"order": -1, "start": "a"}}, r"place\.order: Input should be greater"),
        ({"levels": {"a": [1]}}, r"levels\.a"),
        ({"verdict": "fine"}, "verdict"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps(json.loads(dump(record(0))) | change) + "\n")
    with pytest.raises(LabError, match=said):
        read([path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"none\.jsonl: cannot be read"):
        read([tmp_path / "none.jsonl"])


def test_equal_keys_have_equal_digests_whatever_their_order() -> None:
    one = Key(configuration={"a": 1, "b": {"c": [1, 2], "d": None}}, code={"kvik": "1"})
    two = Key.model_validate_json('{"code":{"kvik":"1"},"configuration":{"b":{"d":null,"c":[1,2]},"a":1}}')
    assert one.digest() == two.digest()
    assert one.digest() != Key(configuration={"a": 1}).digest()


def test_the_table_has_a_row_a_request_and_a_column_a_factor() -> None:
    frame = table([record(1), record(0)], "ttft")
    assert list(frame.columns) == [*COLUMNS, "transport", "tokens", "share", "mode"]
    assert frame["order"].tolist() == [0, 0, 1, 1]
    assert frame["value"].tolist() == pytest.approx([0.3, 0.5, 0.3, 0.5])
    assert frame["group"].tolist() == ["g1"] * 4


def test_what_is_missing_is_a_row_with_its_reason() -> None:
    failed = request(1, 2.0).model_copy(update={"error": "HTTP 500: x", "status": 500})
    runs = [
        record(0, requests=(request(0, 1.0, 0.3, 0.4), failed)),
        record(1, verdict="invalid"),
        record(2, outcome="lost", requests=()),
        record(3, verdict="suspect"),
    ]
    frame = table(runs, "tpot")
    assert [(row.run, row.missing) for row in frame.itertuples() if isinstance(row.missing, str)] == [
        ("run-0", "failed"),
        ("run-1", "invalid"),
        ("run-2", "lost"),
        ("run-3", "not measured"),  # an answer of one token has no pace
    ]
    assert frame["value"].notna().sum() == 2


def test_warm_up_is_left_out_unless_it_is_asked_for() -> None:
    one = record(0, requests=(request(0, 1.0, 0.3, phase="warmup"), request(1, 2.0, 0.5)))
    assert table([one], "ttft")["value"].tolist() == [0.5]
    assert table([one], "ttft", warmup=True)["phase"].tolist() == ["warmup", "measure"]


def test_latency_counts_from_when_a_request_was_due() -> None:
    one = record(0, requests=(request(0, 1.0, 0.3, due=0.6),))
    assert table([one], "ttft")["value"].tolist() == pytest.approx([0.7])
    assert table([one], "ttft_from_send")["value"].tolist() == pytest.approx([0.3])


def test_metrics_of_a_run_have_one_row() -> None:
    # From the first that was sent, at 1, to the last that ended, at 3.
    assert table([record(0)], "throughput")["value"].tolist() == pytest.approx([1.0])
    assert table([record(0)], "output_throughput")["value"].tolist() == pytest.approx([2.0])
    assert table([record(0)], "goodput", goals=Goals(ttft=0.4))["value"].tolist() == pytest.approx([0.5])
    with pytest.raises(LabError, match="no goal is stated"):
        Goals()


def test_figures_are_values_with_levels_of_their_own() -> None:
    figures = (
        Figure(metric="bandwidth", unit="bytes/s", value=1e9, levels={"bytes": 4096}),
        Figure(metric="bandwidth", unit="bytes/s", value=2e9, levels={"bytes": 8192}),
        Figure(metric="latency", unit="s", statistic="mean", value=1e-5, levels={"bytes": 4096}),
        Figure(metric="latency", unit="s", statistic="p99", value=9e-5, levels={"bytes": 4096}),
    )
    one = record(0, requests=(), figures=figures)
    frame = table([one], "bandwidth")
    assert frame["bytes"].tolist() == [4096, 8192]
    assert frame["value"].tolist() == [1e9, 2e9]
    assert table([one], "latency")["value"].tolist() == [1e-5]
    assert table([one], "latency:p99")["value"].tolist() == [9e-5]
    assert set(metrics([one])) >= {"bandwidth", "latency", "latency:p99"}


def test_a_metric_that_nobody_measured_is_refused() -> None:
    with pytest.raises(LabError, match="has the metric 'tttft'; did you mean 'ttft'"):
        table([record(0)], "tttft")
    with pytest.raises(LabError, match="there are no records"):
        table([], "ttft")
    with pytest.raises(LabError, match="a factor is called 'value'"):
        table([record(0, levels={"value": 1})], "ttft")


def test_a_study_without_one_good_run_has_no_value_and_all_its_rows() -> None:
    frame = table([record(0, verdict="invalid"), record(1, outcome="failed")], "ttft")
    assert len(frame) == 2
    assert all(math.isnan(value) for value in frame["value"])


def test_goodput_holds_the_goals_that_the_load_states() -> None:
    """Without any there is none, and that is said."""
    stated: dict[str, JsonValue] = {"goals": {"ttft": 0.4, "itl": None}}
    one = record(0).model_copy(update={"client": Client(driver="builtin", load=stated)})
    assert table([one], "goodput")["value"].tolist() == pytest.approx([0.5])
    assert "goodput" in metrics([one])
    with pytest.raises(LabError, match="no run's load states goals"):
        table([record(0)], "goodput")


def test_parts_of_server_timing_are_metrics() -> None:
    """In seconds, of the requests that have them."""
    timed = request(0, 1.0, 0.3).model_copy(update={"timing": {"kv_wait": 0.2}})
    one = record(0, requests=(timed, request(1, 2.0, 0.5)))
    frame = table([one], "timing.kv_wait")
    assert frame["value"].tolist()[0] == 0.2
    assert frame["missing"].tolist()[1] == "not measured"
    assert unit([one], "timing.kv_wait") == "s"
    with pytest.raises(LabError, match=r"did you mean 'timing\.kv_wait'"):
        table([one], "timing.kv_wai")


def test_starts_of_several_journals_are_told_apart(tmp_path: Path) -> None:
    """Each study calls its first start s1; and one run in two journals is refused."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for number, file in enumerate(files):
        append(file, record(number))
    names = {one.place.start for one in read(files[:1])}
    found = read(files)
    assert [one.place.start for one in found] == [f"{at}/{name}" for at in (1, 2) for name in names]
    assert len({one.place.group for one in found if one.place.group}) in (0, 2)
    append(files[1], record(0))
    with pytest.raises(LabError, match=r"b\.jsonl: has run .*, which an earlier file has, too"):
        read(files)
