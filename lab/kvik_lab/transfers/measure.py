"""The initiator's command, and from what it printed to the parts of a run's record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvik_lab.errors import LabError
from kvik_lab.records import Client, Counters, Figure, LoadResult
from kvik_lab.transfers.spec import TransferLoad

TRANSFER_TIME, BANDWIDTH, WARMUP = "transfer_time", "bandwidth", "warmup_transfer_time"
FORMAT = "kvik-bench-transfer/1"


def command(python: str, address: str, transport: str, load: TransferLoad, more: Sequence[str]) -> list[str]:
    """What moves pages between its node and the target at `address`. `more` are further flags."""
    said = {
        "target": address, "transport": transport, "op": load.op, "page": f"{load.page_bytes}B",
        "pages": load.pages, "class": load.traffic_class, "repetitions": load.repetitions,
        "warmup": load.warmup, "json": "-",
    }  # fmt: skip
    flags = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    return [python, "-m", "kvik.cli", "bench", "transfer", *flags, *more]


@dataclass(frozen=True)
class Moved:
    """What one run gives to a record; of each engine what it counted before and after, by its role."""

    result: LoadResult
    counters: Mapping[str, tuple[Counters, Counters]]


def understood(said: str, target: str, load: TransferLoad, *, began: int, ended: int) -> Moved:
    """From what the initiator printed, beside what it told people. Raises `LabError` where that is no
    result."""
    _, found, text = f"\n{said}".rpartition("\n{\n")
    try:
        told = json.loads(f"{{\n{text}")
        if not found or told["format"] != FORMAT:
            raise ValueError(f"no result in the form {FORMAT}")
        (cell,) = told["cells"]
        (part,) = cell["kvik"]
        counters = {
            role: _counters(part["counted"][side])
            for role, side in (("load", "initiator"), ("target", "target"))
        }
        figures = _figures(part["warmup_s"], part["repetitions_s"], load)
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(
            f"the initiator's result cannot be read: {error!r}; it said: {said[-300:]!r}"
        ) from error
    if len(part["repetitions_s"]) != load.repetitions:
        raise LabError(f"{len(part['repetitions_s'])} transfers were made of {load.repetitions}")
    client = Client(
        driver="transfers", version=told["initiator"]["kvik"], target=target,
        load=load.model_dump(mode="json", by_alias=True), seed=told["options"]["seed"],
        cpu_seconds=told["initiator"]["cpu_s"],
    )  # fmt: skip
    return Moved(LoadResult(began=began, ended=ended, client=client, figures=figures), counters)


def _counters(both: Any) -> tuple[Counters, Counters]:
    before, after = ({str(name): float(value) for name, value in one.items()} for one in both)
    return before, after


def _figures(warmup: Sequence[float], seconds: Sequence[float], load: TransferLoad) -> tuple[Figure, ...]:
    found = [Figure(metric=WARMUP, unit="s", value=one, iteration=at) for at, one in enumerate(warmup)]
    for at, one in enumerate(seconds):
        found.append(Figure(metric=TRANSFER_TIME, unit="s", value=one, iteration=at))
        found.append(Figure(metric=BANDWIDTH, unit="bytes/s", value=load.bytes / one, iteration=at))
    return tuple(found)


def why(said: str) -> str | None:
    """Why it failed, as it told people; None where it did not say."""
    lines = [line for line in said.splitlines() if line.startswith("FAILED: ")]
    return lines[-1] if lines else None
