"""`guidellm run`: benchmarks.json, as GuideLLM 0.8 writes it (src/guidellm/schemas/base/request_stats.py,
info.py).

`benchmarks[].requests` has lists `successful`, `errored` and `incomplete`. A request's times are s since the
epoch in `info.timings`; of its tokens the first and the last are known, so those between are taken as even.
"""

from __future__ import annotations

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import (
    Place,
    maybe_number,
    maybe_whole,
    output_tokens,
    parse_json,
    result,
)
from kvik_lab.records import LoadResult, Request


def read_guidellm(text: str, where: str) -> LoadResult:
    """See the module. Raises `LabError`; also where several benchmarks are in the file: each is a record."""
    benchmarks = parse_json(text, where).get("benchmarks").items()
    if len(benchmarks) != 1:
        raise LabError(
            f"{where}: has {len(benchmarks)} benchmarks; each is a record of its own: run guidellm with one "
            f"rate a "
            "file (a profile that is no sweep)"
        )
    groups, closed = benchmarks[0].get("requests"), _closed(benchmarks[0])
    found = [
        (one, failed)
        for key, failed in (("successful", False), ("errored", True), ("incomplete", True))
        if (group := groups.find(key)) is not None
        for one in group.items()
    ]
    if not found:
        raise LabError(f"{where}: has no requests; it was written without them")
    starts = [(one.get("request_start_time").number(), one, failed) for one, failed in found]
    zero = min(start for start, _, _ in starts)
    starts.sort(key=lambda entry: entry[0])
    requests = [
        _request(at, one, start - zero, zero, failed, closed)
        for at, (start, one, failed) in enumerate(starts)
    ]
    ends = [request.end for request in requests if request.end is not None]
    return result("guidellm", requests=requests, began=zero, seconds=max(ends, default=0.0))


def _closed(benchmark: Place) -> bool:
    """Whether it sent as fast as it could. Then all requests are targeted at its start, and what one waited
    was for others to be answered."""
    config = benchmark.find("config") or Place({}, benchmark.where)
    strategy = config.find("strategy") or Place({}, benchmark.where)
    kind = strategy.find("type_")
    return kind is not None and kind.value == "throughput"


def _request(at: int, one: Place, sent: float, zero: float, failed: bool, closed: bool) -> Request:
    info = one.find("info") or Place({}, one.where)
    timings = info.find("timings") or Place({}, one.where)
    output = output_tokens(one.find("output_tokens"))
    due, end = maybe_number(timings.find("targeted_start")), maybe_number(one.find("request_end_time"))
    request_id, error = one.find("request_id"), info.find("error")
    return Request(
        id=request_id.text() if request_id else f"guidellm-{at}",
        iteration=at,
        due=None if due is None or closed else due - zero,
        sent=sent,
        tokens=() if failed else tuple(_tokens(one, timings, sent, zero, output)),
        end=None if end is None else end - zero,
        status=None if failed else 200,
        error=(error.text() if error else "not completed") if failed else None,
        prompt_tokens_counted=maybe_whole(one.find("prompt_tokens")),
        cached_tokens=maybe_whole(one.find("cached_tokens")),
        output_tokens_counted=output,
    )


def _tokens(one: Place, timings: Place, sent: float, zero: float, count: int | None) -> list[float]:
    first, last = maybe_number(timings.find("first_token_iteration")), timings.find("last_token_iteration")
    if first is None:
        ttft = maybe_number(one.find("time_to_first_token_ms"))
        if ttft is None:
            return []
        first = sent + ttft / 1e3 + zero
    final = first if last is None else last.number()
    if not count or count < 2 or final <= first:
        return [first - zero]
    step = (final - first) / (count - 1)
    return [first - zero + step * number for number in range(count)]
