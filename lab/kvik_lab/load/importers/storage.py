"""`fio --output-format=json`, as its manual's section on JSON output has it."""

from __future__ import annotations

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import Place, cell, figure, parse_json, result
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
    found = [
        figure("bandwidth", "bytes/s", side.get("bw_bytes").number(), "mean", levels),
        figure("operations", "1/s", side.get("iops").number(), "mean", levels),
    ]
    latency = side.find("clat_ns", "lat_ns")
    if latency is None:
        return found
    known = [("mean", "mean"), ("stddev", "stdev"), ("min", "min"), ("max", "max")]
    times = [(ours, value) for theirs, ours in known if (value := latency.find(theirs)) is not None]
    if (percentiles := latency.find("percentile")) is not None:
        times += [(f"p{cell(key, value.where):g}", value) for key, value in percentiles.entries()]
    return found + [figure("latency", "s", value.number() * 1e-9, name, levels) for name, value in times]
