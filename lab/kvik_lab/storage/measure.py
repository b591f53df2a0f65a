"""The loader's command, and from what it printed to the parts of a run's record."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvik_lab.errors import LabError
from kvik_lab.records import Client, Counters, Figure, Level, LoadResult
from kvik_lab.records import Role as RoleRecord
from kvik_lab.storage import loader
from kvik_lab.storage.spec import FileLoad

LOAD_TIME, BANDWIDTH, RESIDENT, BYTES, WARMUP = (
    "load_time", "bandwidth", "resident_share", "file_bytes", "warmup_load_time",
)  # fmt: skip
SETTINGS = ("type", "source", "options", "path")
REPORTED = ("file_system", "mounted", "protocol")
"""What differs between arms by design, beside the digest, which may not."""
_PROTOCOL = re.compile(r'kvik_lab_nfs_transport\{protocol="([^"]+)"\}')
# Of a mount's options: where its ends are, which no run has in common with another.
_OWN = re.compile(r"(?:^|,)(?:clientaddr|addr|mountaddr)=[^,]*")


def command(python: str, storage: Mapping[str, str], load: FileLoad) -> list[str]:
    """What loads the file on a node; it needs nothing there but Python."""
    source = Path(loader.__file__).read_text(encoding="utf-8")
    return [python, "-S", "-c", source, json.dumps({"storage": dict(storage), "load": load.model_dump()})]


@dataclass(frozen=True)
class Loaded:
    """What one run of the loader gives to a record."""

    result: LoadResult
    role: RoleRecord


def understood(
    said: str, storage: Mapping[str, str], load: FileLoad, *, node: str, start: str, began: int
) -> Loaded:
    """From what the loader printed. Raises `LabError` where that is no result."""
    lines = said.strip().splitlines()
    try:
        found = json.loads(lines[-1])
        loads, before, after = found["loads"], found["before"], found["after"]
        result = _result(found, load, f"{storage['source']}/{load.path}", began, time.time_ns())
        role = RoleRecord(
            name="storage", kind="storage", node=node, start=start,
            settings={**dict(storage), **load.model_dump(mode="json")},
            reported=_reported(found, after), before=before, after=after,
        )  # fmt: skip
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"the loader's result cannot be read: {error!r}; it said: {said[-300:]!r}") from error
    if len(loads) != load.loads + load.warmup:
        raise LabError(f"the loader made {len(loads)} loads of {load.loads + load.warmup}")
    return Loaded(result, role)


def protocol(after: Counters) -> str | None:
    """What carries a mount of NFS, as the kernel counts it; None where it is no NFS."""
    found = sorted(match[1] for name in after if (match := _PROTOCOL.match(name)))
    return ", ".join(found) or None


def _reported(found: Mapping[str, Any], after: Counters) -> dict[str, Level]:
    mount = found["mount"]
    told: dict[str, Level] = {
        "file_system": mount["type"], "mounted": _OWN.sub("", mount["options"]), "digest": found["digest"],
    }  # fmt: skip
    carried = protocol(after)
    return told if carried is None else {**told, "protocol": carried}


def _result(found: Mapping[str, Any], load: FileLoad, target: str, began: int, ended: int) -> LoadResult:
    figures: list[Figure] = []
    loads: Sequence[Mapping[str, float]] = found["loads"]
    for number, one in enumerate(loads):
        at = number - load.warmup
        figures.append(Figure(metric=RESIDENT, unit="1", value=one["resident"], iteration=number))
        figures.append(Figure(metric=BYTES, unit="bytes", value=one["bytes"], iteration=number))
        if at < 0:
            figures.append(Figure(metric=WARMUP, unit="s", value=one["seconds"], iteration=number))
            continue
        figures.append(Figure(metric=LOAD_TIME, unit="s", value=one["seconds"], iteration=at))
        rate = one["bytes"] / one["seconds"]
        figures.append(Figure(metric=BANDWIDTH, unit="bytes/s", value=rate, iteration=at))
    client = Client(
        driver="storage", version=version("kvik-lab"), target=target, load=load.model_dump(mode="json"),
        cpu_seconds=found["cpu_seconds"],
    )  # fmt: skip
    return LoadResult(began=began, ended=ended, client=client, figures=tuple(figures))
