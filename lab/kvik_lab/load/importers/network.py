"""Benchmarks of a network: perftest (ib_write_bw and its kin), nccl-tests, and iperf3."""

from __future__ import annotations

import re

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import Columns, Place, cell, figure, parse_json, result, row
from kvik_lab.records import Figure, LoadResult

# perftest: MB is 2**20 bytes (its MB is 0x100000); with --report_gbits it is 10**9 bits.
_PERFTEST: Columns = {
    "BW peak[MB/sec]": ("bandwidth", "bytes/s", "max", 2.0**20),
    "BW average[MB/sec]": ("bandwidth", "bytes/s", "mean", 2.0**20),
    # As later releases write it.
    "BW peak[MiB/sec]": ("bandwidth", "bytes/s", "max", 2.0**20),
    "BW average[MiB/sec]": ("bandwidth", "bytes/s", "mean", 2.0**20),
    "BW peak[Gb/sec]": ("bandwidth", "bytes/s", "max", 1e9 / 8),
    "BW average[Gb/sec]": ("bandwidth", "bytes/s", "mean", 1e9 / 8),
    "MsgRate[Mpps]": ("messages", "1/s", "mean", 1e6),
    "t_min[usec]": ("latency", "s", "min", 1e-6),
    "t_max[usec]": ("latency", "s", "max", 1e-6),
    "t_typical[usec]": ("latency", "s", "p50", 1e-6),
    "t_avg[usec]": ("latency", "s", "mean", 1e-6),
    "t_stdev[usec]": ("latency", "s", "stdev", 1e-6),
    "99% percentile[usec]": ("latency", "s", "p99", 1e-6),
    "99.9% percentile[usec]": ("latency", "s", "p99.9", 1e-6),
}
_HEADING = re.compile(r"#bytes|#iterations|tps average|[A-Za-z0-9.%_]+(?: [A-Za-z]+)?\[[A-Za-z/%]+\]")


def read_perftest(text: str, where: str) -> LoadResult:
    """Each row of its table as figures of `bandwidth` and `messages`, or `latency`; its level is `bytes`."""
    figures: list[Figure] = []
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if "#bytes" in line:
            columns = _HEADING.findall(line)
            for name in columns:
                if name.startswith("BW ") and name not in _PERFTEST:
                    raise LabError(f"{where}, line {number}: {name!r} is no unit of bandwidth known here")
            continue
        cells = line.split()
        if not columns or len(cells) != len(columns) or not cells[0].isdigit():
            continue
        found = row(_PERFTEST, columns, cells, {"bytes": int(cells[0])}, f"{where}, line {number}")
        # A peak of 0 (of --duration and --noPeak) was not measured.
        figures += [one for one in found if one.value or (one.metric, one.statistic) != ("bandwidth", "max")]
    if not figures:
        raise LabError(f"{where}: has no table with '#bytes #iterations ...' and a row below it")
    return result("perftest", figures=figures)


def read_nccl_tests(text: str, where: str) -> LoadResult:
    """Each row as figures of `latency` (s), `bandwidth` (the algorithm's) and `bus_bandwidth` (bytes/s), with
    the levels `bytes` and `in_place`. Raises `LabError` where a row has wrong results."""
    figures: list[Figure] = []
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.lstrip("# ").split()
        if bare[:2] == ["size", "count"] and "busbw" in bare:
            columns = bare
            continue
        cells = line.split()
        if not columns or not cells or not cells[0].isdigit() or len(cells) != len(columns):
            continue
        at = f"{where}, line {number}"
        for half, start in enumerate(at_ for at_, name in enumerate(columns) if name == "time"):
            levels = {"bytes": int(cells[0]), "in_place": half == 1}
            wrong = cells[start + 3] if columns[start + 3 : start + 4] == ["#wrong"] else "0"
            if wrong not in ("0", "N/A"):
                raise LabError(
                    f"{at}: {wrong} results of {cells[0]} bytes are wrong; its times count for nothing"
                )
            time, algorithm, bus = (cell(one, at) for one in cells[start : start + 3])
            figures.append(figure("latency", "s", time * 1e-6, "mean", levels))
            figures.append(figure("bandwidth", "bytes/s", algorithm * 1e9, "mean", levels))
            figures.append(figure("bus_bandwidth", "bytes/s", bus * 1e9, "mean", levels))
    if not figures:
        raise LabError(
            f"{where}: has no table with 'size count type ... time algbw busbw' and a row below it"
        )
    return result("nccl-tests", figures=figures)


def read_iperf3(text: str, where: str) -> LoadResult:
    """`iperf3 -J`: each interval's `bandwidth` (bytes/s), and over all `received` and `retransmits`."""
    run = parse_json(text, where)
    if (error := run.find("error")) is not None:
        raise LabError(f"{where}: the test failed: {error.text()}")
    figures = []
    for at, interval in enumerate(run.get("intervals").items()):
        total = interval.get("sum")
        if (omitted := total.find("omitted")) is not None and omitted.value is True:
            continue  # of --omit: iperf3 leaves them out of its own sums, too
        rate = total.get("bits_per_second").number() / 8
        figures.append(figure("bandwidth", "bytes/s", rate, iteration=at))
    end, start = run.get("end"), run.get("start")
    received = end.find("sum_received", "sum")
    if received is not None:
        rate = received.get("bits_per_second").number() / 8
        figures.append(figure("received", "bytes/s", rate, "mean"))
    sent = end.find("sum_sent")
    if sent is not None and (again := sent.find("retransmits")) is not None:
        figures.append(figure("retransmits", "1", again.number()))
    seconds = sent.get("seconds").number() if sent else 0.0
    began = start.find("timestamp")
    version = start.find("version")
    return result(
        "iperf3",
        figures=figures,
        began=_began(began),
        seconds=seconds,
        version=version.text() if version else None,
    )


def _began(timestamp: Place | None) -> float:
    return 0.0 if timestamp is None else timestamp.get("timesecs").number()
