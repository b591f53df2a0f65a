"""`aiperf profile`: profile_export.jsonl, a line a request, as its guide "Working with Profile Export Files"
has it.

`metadata` has times in ns since the epoch, `metrics` values with their units. The gap between tokens is
known by message (`inter_chunk_latency`) where the run recorded it, else as one mean.
"""

from __future__ import annotations

import itertools

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import Place, output_tokens, parse_lines, result
from kvik_lab.records import LoadResult, Request

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


def read_aiperf(text: str, where: str) -> LoadResult:
    """See the module. Raises `LabError`."""
    lines = parse_lines(text, where)
    starts = [line.get("metadata").get("request_start_ns").whole() for line in lines]
    zero = min(starts)
    requests = [_request(at, line, zero) for at, line in enumerate(lines)]
    ends = [request.end for request in requests if request.end is not None]
    return result("aiperf", requests=requests, began=zero / 1e9, seconds=max(ends, default=0.0))


def _request(at: int, line: Place, zero: int) -> Request:
    metadata, metrics = line.get("metadata"), line.find("metrics") or Place({}, line.where)
    sent = (metadata.get("request_start_ns").whole() - zero) / 1e9
    ended = metadata.find("request_end_ns")
    failed = line.find("error")
    tokens = [] if failed else _tokens(sent, metrics)
    prompt = metrics.find("usage_prompt_tokens", "input_sequence_length", "error_isl")
    cached = metrics.find("usage_prompt_cache_read_tokens")
    output = metrics.find("output_sequence_length")
    request_id, turn = metadata.find("x_request_id"), metadata.find("turn_index")
    return Request(
        id=request_id.text() if request_id else f"aiperf-{at}",
        iteration=at,
        phase="warmup" if _phase(metadata) == "warmup" else "measure",
        turn=turn.whole() if turn else None,
        sent=sent,
        tokens=tuple(tokens),
        # Its stamps and its latencies are of two clocks; an answer ends no sooner than its last token.
        end=max((ended.whole() - zero) / 1e9, *tokens[-1:], 0.0) if ended else None,
        status=_status(failed),
        error=_error(failed),
        prompt_tokens_counted=prompt.get("value").whole() if prompt else None,
        cached_tokens=cached.get("value").whole() if cached else None,
        output_tokens_counted=output.get("value").whole() if output else None,
    )


def _phase(metadata: Place) -> str:
    found = metadata.find("benchmark_phase")
    return found.text() if found else "profiling"


def _status(failed: Place | None) -> int | None:
    if failed is None:
        return 200
    code = failed.find("code")
    return code.whole() if code else None


def _error(failed: Place | None) -> str | None:
    if failed is None:
        return None
    parts = [found.text() for key in ("type", "message") if (found := failed.find(key)) is not None]
    return ": ".join(parts) or "failed"


def _tokens(sent: float, metrics: Place) -> list[float]:
    """The first token's time, and those after it by the gaps that are known."""
    ttft = metrics.find("time_to_first_token")
    if ttft is None:
        return []
    first = sent + _seconds(ttft.get("value"), ttft)
    chunks, mean = metrics.find("inter_chunk_latency"), metrics.find("inter_token_latency")
    gaps: list[float] = []
    if chunks is not None:
        gaps = [_seconds(one, chunks) for one in chunks.get("value").items()]
    elif mean is not None and (length := metrics.find("output_sequence_length")) is not None:
        count = output_tokens(length.get("value")) or 0
        gaps = [_seconds(mean.get("value"), mean)] * max(0, count - 1)
    return list(itertools.accumulate(gaps, initial=first))


def _seconds(value: Place, of: Place) -> float:
    unit = of.get("unit").text()
    if unit not in _SECONDS:
        raise LabError(f"{of.where}: its unit is {unit!r}, not one of {', '.join(_SECONDS)}")
    return value.number() * _SECONDS[unit]
