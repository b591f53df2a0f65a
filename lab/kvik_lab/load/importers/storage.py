"""`fio --output-format=json`, as its manual's section on JSON output has it."""

from __future__ import annotations

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import Place, cell, parse_json, result
from kvik_lab.records import Figure, LoadResult


def read_fio(text: str, where: str) -> LoadResult:
    """Each job's reads and writes: `bandwidth` (bytes/s), `operations` (1/s), and of `latency` (completion,
    s) mean, stdev, min, max and percentiles; the levels are `job`, `operation`, and `bs` and `iodepth` where
    said."""
    run = parse_json(text[text.find("{") :] if "{" in text else text, where)
    figures: list[Figure] = []
    seconds = 0.0
    for job in run.get("jobs").items():
        if (error := job.find("error")) is not None and error.number() != 0:
            raise LabError(f"{job.where}: fio says error {error.number():g}; its figures count for nothing")
        for operation in ("read", "write"):
            side = job.find(operation)
            if side is None or side.get("total_ios").number() == 0:
                continue
            figures += _figures(side, _levels(job, operation))
            seconds = max(seconds, side.get("runtime").number() / 1e3)
    if not figures:
        raise LabError(f"{where}: no job has read or written anything")
    version, stamp = run.find("fio version"), run.find("timestamp")
    began = stamp.number() - seconds if stamp else 0.0
    return result(
        "fio", figures=figures, began=began, seconds=seconds, version=version.text() if version else None
    )


def _levels(job: Place, operation: str) -> dict[str, object]:
    name = job.find("jobname")
    levels: dict[str, object] = {"job": name.text() if name else "", "operation": operation}
    options = job.find("job options")
    for key in ("bs", "iodepth"):
        if options is not None and (found := options.find(key)) is not None:
            levels[key] = found.text()
    return levels


def _figures(side: Place, levels: dict[str, object]) -> list[Figure]:
    found = [("bandwidth", "bytes/s", "mean", side.get("bw_bytes").number())]
    found.append(("operations", "1/s", "mean", side.get("iops").number()))
    latency = side.find("clat_ns", "lat_ns")
    if latency is not None:
        for theirs, ours in (("mean", "mean"), ("stddev", "stdev"), ("min", "min"), ("max", "max")):
            if (value := latency.find(theirs)) is not None:
                found.append(("latency", "s", ours, value.number() * 1e-9))
        if (percentiles := latency.find("percentile")) is not None:
            for key, value in percentiles.entries():
                found.append(("latency", "s", f"p{cell(key, value.where):g}", value.number() * 1e-9))
    return [
        Figure.model_validate(
            {"metric": metric, "unit": unit, "statistic": statistic, "value": value, "levels": levels}
        )
        for metric, unit, statistic, value in found
    ]
