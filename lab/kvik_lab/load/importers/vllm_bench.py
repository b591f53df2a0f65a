"""`vllm bench serve --save-result --save-detailed`: a JSON object, or a line of JSON a run
(`--append-result`).

Fields as vLLM 0.33 writes them (vllm/benchmarks/serve.py): lists by request `input_lens`, `output_lens`,
`ttfts`, `itls`, `errors`, of newer versions also `start_times` (s of its own clock), `latencies` and
`queue_times` (s that a request waited within the client). Without --save-detailed there are only figures.
"""

from __future__ import annotations

import datetime

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import Place, maybe_number, parse_json, parse_lines, result
from kvik_lab.records import Figure, LoadResult, Request

_METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}
_KEPT = ("model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
"backend",
         "endpoint_type", "label")  # fmt: skip


def read_vllm_bench(text: str, where: str) -> LoadResult:
    """See the module. Raises `LabError`; also where several runs are in one file, which are several
    records."""
    if text.lstrip().startswith("{") and "\n{" in text.strip():
        runs = parse_lines(text, where)
        if len(runs) > 1:
            raise LabError(
                f"{where}: has {len(runs)} runs; each is a record of its own, so split the file by lines"
            )
        run = runs[0]
    else:
        run = parse_json(text, where)
    requests = _requests(run) if run.find("ttfts") is not None else []
    duration = run.get("duration").number()
    load = {key: found.value for key in _KEPT if (found := run.find(key)) is not None}
    return result(
        "vllm-bench",
        requests=requests,
        figures=_figures(run),
        began=_date(run),
        seconds=duration,
        load=load,
    )


def _requests(run: Place) -> list[Request]:
    ttfts, itls = run.get("ttfts").items(), run.get("itls").items()
    count = len(ttfts)
    lists = {"itls": itls}
    for key in ("input_lens", "output_lens", "errors", "start_times", "queue_times", "latencies"):
        found = run.find(key)
        lists[key] = [] if found is None else found.items()
    for key, entries in lists.items():
        if (entries or key == "itls") and len(entries) != count:
            raise LabError(f"{run.where}: {key} has {len(entries)} entries, and ttfts {count}")
    if _closed(run):  # all are made at once: what a request waited was for others to be answered
        del lists["queue_times"]
    starts = [one.number() for one in lists["start_times"]]
    zero = min(starts, default=0.0)
    return [
        _request(at, {key: e[at] for key, e in lists.items() if e}, ttfts[at], zero) for at in range(count)
    ]


def _closed(run: Place) -> bool:
    """Whether so many users sent one request after another: nothing but their number bounded the rate."""
    rate, users, ramp = (run.find(key) for key in ("request_rate", "max_concurrency", "ramp_up_strategy"))
    return rate is not None and rate.value == "inf" and users is not None and ramp is None


def _request(at: int, own: dict[str, Place], ttft: Place, zero: float) -> Request:
    error = own["errors"].text() if "errors" in own and own["errors"].value else None
    # Without start times each request has a clock of its own, which begins when it is sent.
    sent = own["start_times"].number() - zero if "start_times" in own else 0.0
    tokens: list[float] = []
    if error is None:
        tokens = [sent + ttft.number()]
        for gap in own["itls"].items():
            tokens.append(tokens[-1] + gap.number())
    end = sent + own["latencies"].number() if "latencies" in own else (tokens[-1] if tokens else None)
    queued = maybe_number(own.get("queue_times"))
    return Request(
        id=f"vllm-bench-{at}",
        iteration=at,
        due=None if queued is None else sent - max(0.0, queued),
        sent=sent,
        tokens=tuple(tokens),
        end=end,
        status=200 if error is None else None,
        error=error,
        prompt_tokens=own["input_lens"].whole() if "input_lens" in own else None,
        output_tokens_counted=own["output_lens"].whole() if "output_lens" in own else None,
    )


def _figures(run: Place) -> list[Figure]:
    figures = []
    for theirs, ours in _METRICS.items():
        for key, found in ((key, run.find(key)) for key in run.value if key.endswith(f"_{theirs}_ms")):
            if found is None:
                continue
            statistic = key.removesuffix(f"_{theirs}_ms").replace("median", "p50").replace("std", "stdev")
            figures.append(
                Figure(metric=f"load_{ours}", unit="s", value=found.number() / 1e3, statistic=statistic)
            )
    for theirs, ours in (("request_throughput", "throughput"), ("request_goodput", "goodput")):
        if (found := run.find(theirs)) is not None:
            figures.append(Figure(metric=f"load_{ours}", unit="requests/s", value=found.number()))
    if (found := run.find("output_throughput")) is not None:
        figures.append(Figure(metric="load_output_throughput", unit="tokens/s", value=found.number()))
    return figures


def _date(run: Place) -> float:
    """`date` as 20260131-154500 of the local clock, in s since the epoch; 0 where it is not there."""
    found = run.find("date")
    try:
        return 0.0 if found is None else datetime.datetime.strptime(found.text(), "%Y%m%d-%H%M%S").timestamp()
    except ValueError:
        return 0.0
