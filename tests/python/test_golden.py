"""What earlier releases handed to clients and wrote into files is read by this one: docs/compatibility.md.

KVIK_TEST_GOLDEN=write makes the files of this release that are not there yet.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvik
from kvik.handover import protocol
from kvik.handover.report import LoadRecord
from kvik.trace import file as trace

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WRITE = os.environ.get("KVIK_TEST_GOLDEN") == "write"
RELEASE = ".".join(kvik.__version__.split(".")[:2])

SHAPE = protocol.KvShape(
    kind="gqa",
    layers=28,
    kv_heads=8,
    content=256,
    dtype="bfloat16",
    tp=2,
    stages=(28,),
    heads=4,
    block_tokens=16,
    order="HNC",
    block_bytes=32768,
)
LATENT = dataclasses.replace(
    SHAPE, kind="mla", kv_heads=1, content=576, tp=1, heads=1, order="NHC", block_bytes=18432
)
BLOCKS = [7, 4_000_000_000, 0]  # for foreign proxies; nothing reads them
OFFERS = {
    "two ranks": protocol.Handover(
        remote_request_id="cmpl-17",
        remote_engine_id="prefill-0",
        address="10.77.1.1:4000",
        num_tokens=40,
        tickets=(
            protocol.RankTicket(0, 0, 0, 0, "kvik1.first"),
            protocol.RankTicket(0, 1, 0, 0, "kvik1.second"),
        ),
        digest="ab" * 32,
        namespace="cd" * 32,
        model="a/model",
        shapes=(SHAPE,),
        firsts=(0,),
        expires_in=120.0,
    ),
    "two stages of two ranks": protocol.Handover(
        remote_request_id="cmpl-18",
        remote_engine_id="prefill-0",
        address="10.77.1.1:4000",
        num_tokens=17,
        tickets=tuple(
            protocol.RankTicket(0, tp, pp, 0, f"kvik1.{pp}.{tp}")
            for pp, tp in itertools.product(range(2), repeat=2)
        ),
        digest="ab" * 32,
        namespace="cd" * 32,
        model="a/model",
        shapes=(dataclasses.replace(SHAPE, stages=(16, 12)),),
        firsts=(0,),
        expires_in=120.0,
    ),
    "a window beside all tokens": protocol.Handover(
        remote_request_id="cmpl-20",
        remote_engine_id="prefill-0",
        address="10.77.1.1:4000",
        num_tokens=2049,
        tickets=tuple(
            protocol.RankTicket(group, tp, 0, 0, f"kvik1.{group}.{tp}")
            for group, tp in itertools.product(range(2), repeat=2)
        ),
        digest="ab" * 32,
        namespace="cd" * 32,
        model="a/model",
        shapes=(
            dataclasses.replace(SHAPE, members="12" * 16),
            dataclasses.replace(SHAPE, members="34" * 16, window=1024),
        ),
        firsts=(0, 64),
        expires_in=120.0,
    ),
    "one latent": protocol.Handover(
        remote_request_id="größe",
        remote_engine_id="prefill-1",
        address="[fd77::1]:65535",
        num_tokens=1,
        tickets=(protocol.RankTicket(0, 0, 0, 3, "kvik1.only"),),
        digest="00" * 32,
        namespace="ff" * 32,
        model="another",
        shapes=(LATENT,),
        firsts=(0,),
        expires_in=1.0,
    ),
}
RECORDS = (
    LoadRecord("cmpl-17", None, "recomputed", "params_not_kvik", None),
    LoadRecord("cmpl-18", "cmpl-17", "failed", "grant_expired", 1, 0, 3),
    LoadRecord(
        "cmpl-19", "cmpl-17", "loaded", None, 0, 1, 3, 917504, 84, 28, "tcp", "4 channels",
        plan_s=0.25, post_s=0.5, wire_s=1.0, verify_s=0.125, total_s=2.0,
    ),
)  # fmt: skip


def kept(name: str, make: Callable[[], str]) -> Iterator[tuple[Path, str]]:
    """The golden files of a name, of all releases; that of this release is what this release makes."""
    own = GOLDEN / RELEASE / name
    if WRITE and not own.exists():
        own.write_text(make(), encoding="utf-8")
    assert own.exists(), f"{own} is missing: docs/compatibility.md says how it is made"
    assert own.read_text(encoding="utf-8") == make(), f"{own} is not what this release makes"
    for path in sorted(GOLDEN.glob(f"*/{name}")):
        yield path, path.read_text(encoding="utf-8")


def as_json(value: Any) -> Any:
    """A dataclass as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


def offers() -> str:
    """What prefill servers offer, each beside what it says."""
    told = [
        {"name": name, "says": as_json(offer), "kv_transfer_params": offer.encode([BLOCKS])}
        for name, offer in OFFERS.items()
    ]
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def test_kv_transfer_params_of_every_release_are_read() -> None:
    for path, text in kept("kv_transfer_params.json", offers):
        for offer in json.loads(text):
            params = offer["kv_transfer_params"]
            read = protocol.decode(params)
            assert as_json(read) == offer["says"], (path, offer["name"])
            if params["kvik"]["version"] == protocol.PROTOCOL_VERSION:
                assert json.loads(json.dumps(read.encode([BLOCKS]))) == params, (path, offer["name"])


@pytest.mark.parametrize("version", [1, 2, protocol.PROTOCOL_VERSION + 1])
def test_another_version_of_the_params_is_refused_by_name(version: int) -> None:
    params = OFFERS["two ranks"].encode([BLOCKS])
    params["kvik"]["version"] = version
    with pytest.raises(protocol.RefusedError) as refused:
        protocol.decode(params)
    assert refused.value.code == "params_version"


def test_lines_of_report_files_of_every_release_are_read() -> None:
    lines = "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in RECORDS)
    for path, text in kept("report_file.jsonl", lambda: lines):
        for line in text.splitlines():
            told = json.loads(line)
            again = dataclasses.asdict(LoadRecord(**told))
            assert {name: again[name] for name in told} == told, path


def shown(recording: trace.Trace) -> Any:
    """A recording as JSON."""
    return json.loads(json.dumps(dataclasses.asdict(recording), default=lambda ids: ids.tolist()))


def test_recordings_of_every_release_are_read() -> None:
    own = GOLDEN / RELEASE / "trace.jsonl"
    assert own.exists(), f"{own} is missing: record one with `kvik trace record`"
    for path in sorted(GOLDEN.glob("*/trace.jsonl")):
        says = path.with_name("trace.says.json")
        recording = shown(trace.read(path))
        if WRITE and path == own and not says.exists():
            says.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
        told = json.loads(says.read_text(encoding="utf-8"))
        assert {name: recording[name] for name in told} == told, path
        assert trace.read(path).complete
