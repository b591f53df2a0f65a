"""From a planned start to its system, and from a planned run to its load and to what it can be held to."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from kvik.roles.node import Node
from kvik.shapes import ModelShape
from kvik_lab.design.factor import Level
from kvik_lab.errors import LabError, validated
from kvik_lab.load.spec import LoadSpec, Trace, parse_spec
from kvik_lab.load.tools import INSTEAD, refused
from kvik_lab.load.traces import longest
from kvik_lab.records import Stated
from kvik_lab.run import machine
from kvik_lab.run.drivers import DRIVERS, emulator, nixl, vllm
from kvik_lab.run.drivers.system import Setup, System
from kvik_lab.run.slots import Levels, Slot, Start
from kvik_lab.run.spec import ENGINES, EnginesSpec, RoleSpec, RunSpec
from kvik_lab.storage.measure import REPORTED, SETTINGS
from kvik_lab.storage.spec import FileLoad
from kvik_lab.study import Study
from kvik_lab.study.model import Program, Warmup
from kvik_lab.study.programs import put_levels
from kvik_lab.study.unit import Model
from kvik_lab.transfers.spec import TransferLoad

MODEL = "model"
"""The factor whose levels are names of the study's models."""
Load: TypeAlias = LoadSpec | FileLoad | TransferLoad
PLAIN: Mapping[str, type[FileLoad | TransferLoad]] = {"storage": FileLoad, "transfers": TransferLoad}
"""What a run of these drivers does, in place of sending requests."""
NOWHERE = "http://127.0.0.1:1"  # stands for the entry until there is one
TEMPLATE = 32  # tokens that a chat's template may add to a turn's two messages
FOUND_BY = ("python", *vllm.FOUND_BY)
"""What a factor changes where it is the programs that are studied."""
PROGRAMS = (*vllm.PROGRAMS, *nixl.PROGRAMS)


@dataclass(frozen=True)
class Planned:
    """A planned run with its levels put in."""

    slot: Slot
    spec: RunSpec
    load: Load


@dataclass(frozen=True)
class PlannedStart:
    """A planned start: its runs, which have all but their loads in common."""

    start: Start
    spec: RunSpec
    runs: tuple[Planned, ...]
    shape: ModelShape
    model: str
    most_tokens: int
    """Of a prompt and its answer, over the whole study: all its starts have the same memory for KV."""
    most_requests: int
    """At once, likewise."""
    most_bytes: int
    """Of one transfer, likewise."""


def resolve(study: Study, starts: Sequence[Start]) -> tuple[PlannedStart, ...]:
    """Every start of a plan. Raises `LabError` for a study without `run`, a value that a row cannot have,
    and runs of one start that need other servers."""
    if study.program is None:
        raise LabError(
            f"{study.file}: nothing says what is to be run; add `run: ...` (see `kvik lab schema`)"
        )
    found = tuple(_resolved(study, study.program, start) for start in starts)
    every = [run.load for start in found for run in start.runs]
    loads = [load for load in every if isinstance(load, LoadSpec)]
    moves = max((load.bytes for load in every if isinstance(load, TransferLoad)), default=0)
    tokens = max(map(_longest, loads), default=0)
    requests = max(map(_at_once, loads), default=0)
    return tuple(
        replace(start, most_tokens=tokens, most_requests=requests, most_bytes=moves) for start in found
    )


def _resolved(study: Study, program: Program, start: Start) -> PlannedStart:
    runs = []
    for slot in start.slots:
        spec = put_levels(program, slot.levels, study.constants)
        runs.append(Planned(slot, spec, _load(study, spec, slot)))
        DRIVERS[spec.driver].check(spec)
    first, model = servers(runs[0].spec), _unit(study, runs[0])
    for one in runs:
        if servers(one.spec) != first or _unit(study, one) != model:
            changed = ", ".join(
                name for name, level in one.slot.levels.items() if runs[0].slot.levels.get(name) != level
            )
            raise LabError(
                f"{study.file}: {one.slot.pattern} and {runs[0].slot.pattern} share a start of the servers, "
                f"and need other ones; write `restart: true` at what changes them (of {changed})"
            )
    return PlannedStart(start, runs[0].spec, tuple(runs), model.shape, model.text, 0, 0, 0)


def contents(loads: Iterable[Load]) -> dict[str, str]:
    """SHA-256 of each file that requests are made from, by its path. What cannot be read is left out: the
    load itself says why."""
    files = {file for load in loads if isinstance(load, LoadSpec) for file in load.files()}
    found = {}
    for file in sorted(files):
        with contextlib.suppress(OSError), file.open("rb") as opened:
            found[str(file)] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def servers(spec: RunSpec) -> dict[str, Any]:
    """All of a resolved run but its load, and what its load is held to."""
    return spec.model_dump(mode="json", exclude={"load", "limit", "ready_limit", "stated"})


def _unit(study: Study, run: Planned) -> Model:
    """The model of a run: a level of a factor of that name, or the study's."""
    return study.unit.find(_model(run.slot.levels))


def _model(levels: Levels) -> str | None:
    name = levels.get(MODEL)
    return name if isinstance(name, str) else None


def _load(study: Study, spec: RunSpec, slot: Slot) -> Load:
    """The load's specification: the study's, its warm-up where the load says none, and a seed of its own
    for each run, so that no two runs send the same prompts."""
    where, load = f"{study.file}: run.load", {"warmup": _warm_up(study.warmup), **spec.load}
    if (form := PLAIN.get(spec.driver)) is not None:
        if "warmup" not in spec.load and study.warmup.until_steady:
            raise LabError(
                f"{study.file}: warmup.until: changepoint is for requests, and none are sent by the driver "
                f"{spec.driver}; write until: count"
            )
        return validated(form, load, where)
    load = {"arrival": {"kind": "closed", "concurrency": 1}, **load}
    seed = int(load.get("seed", 0)) + study.design.seed * 100_000 + slot.order
    asked = parse_spec({**load, "url": NOWHERE, "seed": seed}, where)
    for key, why in refused(asked):
        raise LabError(f"{where}.{key}: {why}; {INSTEAD}")
    return asked


def _warm_up(warmup: Warmup) -> int | dict[str, Any]:
    if not warmup.until_steady:
        return warmup.least
    return {"until": "changepoint", "min": warmup.least, "max": warmup.most, "metric": warmup.metric}


def setup(start: PlannedStart, nodes: Mapping[str, Node], logs: Path, mark: str) -> Setup:
    """What the driver makes a system from. A secret goes with every role that may be reached from
    elsewhere."""
    env = {machine.VARIABLE: mark}
    if any(node.address != "127.0.0.1" for node in nodes.values()):
        env["KVIK_SECRET"] = secrets.token_hex(16)
    return Setup(
        start.spec,
        nodes,
        start.shape,
        start.model,
        start.most_tokens,
        start.most_requests,
        start.most_bytes,
        logs,
        env,
    )


def _longest(load: LoadSpec) -> int:
    """Tokens of its longest prompt with the answer: of a conversation those of its last turn."""
    prompt, turns = load.prompt, load.turns
    one = prompt.tokens + prompt.output
    if isinstance(load.arrival, Trace):
        with contextlib.suppress(LabError):  # is said when it is to be replayed
            return max(one, longest(load.arrival, load.requests))
    if turns is None:
        return one
    template = TEMPLATE if load.endpoint == "chat" else 0
    return one + (turns.turns - 1) * (turns.new_tokens + prompt.output + template)


def _at_once(load: LoadSpec) -> int:
    """Requests that may be open at once; of an open load what a few seconds bring is a guess that options
    replace."""
    arrival = load.arrival
    return arrival.concurrency if arrival.kind in ("closed", "rounds") else 8


def stated(start: PlannedStart, run: Planned, system: System, varied: Sequence[str]) -> Stated:
    """What the study says of a run, for the gates."""
    spec = run.spec
    if isinstance(run.load, FileLoad):
        size = run.load.bytes
        return Stated(mode="storage", transport=spec.transport, file_bytes=size, varied=tuple(varied))
    transport = None if spec.transport == "auto" else spec.transport
    if isinstance(run.load, TransferLoad):
        moved = run.load.bytes * (run.load.warmup + run.load.repetitions)
        return Stated(mode="transfer", transport=transport, moved_bytes=moved, varied=tuple(varied))
    prompt = run.load.prompt
    fixed = run.load.arrival.kind != "trace" and run.load.turns is None
    return Stated(
        mode=spec.mode,
        entry=system.entry,
        transport=transport if spec.mode == "disaggregated" else None,
        prompt_tokens=prompt.tokens if fixed else None,
        output_tokens=prompt.output if fixed else None,
        kv_bytes_per_token=start.shape.kv_bytes_per_token(),
        block_tokens=system.block_tokens,
        interfaces=("eth0",) if spec.link is not None else None,
        varied=tuple(varied),
        **spec.stated.model_dump(),
    )


def varied(study: Study) -> tuple[str, ...]:
    """The settings of roles that factors change: flags and variables by their names."""
    if study.program is None:
        return ()
    base: dict[str, Level | None] = {factor.name: factor.levels[0] for factor in study.factors}
    found: dict[str, None] = {}
    for factor in study.factors:
        specs = [
            put_levels(study.program, {**base, factor.name: level}, study.constants)
            for level in factor.levels
        ]
        seen = [_settings(spec) for spec in specs]
        names = {name for one in seen for name in one}
        found |= dict.fromkeys(sorted(n for n in names if any(one.get(n) != seen[0].get(n) for one in seen)))
        backends = {nixl.asked(spec, kind) for spec in specs for kind in ENGINES} - {None}
        if len(backends) > 1:  # an arm without NIXL has no such setting, and no other value of it
            found[nixl.BACKENDS] = None
    changed = [name.rpartition("\0")[2] for name in found]
    # What a mount says of itself follows from what is mounted, versions from where programs are found, and an
    # emulator's memory from the model and its parts.
    models = any(factor.name == MODEL for factor in study.factors)
    follow = (
        *(emulator.OF_MODEL if models else emulator.OF_PARTS if emulator.PARTS in changed else ()),
        *(REPORTED if {*SETTINGS} & {*changed} else ()),
        *(PROGRAMS if {*FOUND_BY} & {*changed} else ()),
    )
    return tuple(dict.fromkeys((*changed, *follow)))


def _settings(spec: RunSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "\0transport": spec.transport, "\0mode": spec.mode, "\0kv_connector": spec.connector,
    }  # fmt: skip
    # What sends requests is no server: where it is found leads none of them to another build.
    kept = [(name, role) for name, role in spec.roles.items() if name != "load" or spec.driver in PLAIN]
    roles: list[tuple[str, EnginesSpec | RoleSpec]] = [("engines", spec.engines), *kept]
    for name, role in roles:
        found |= {f"{name}\0{key}": value for key, value in {**role.options, **role.env}.items()}
        named = getattr(role, "nodes", None) or [role.node]
        if there := [spec.nodes[one] for one in named if one in spec.nodes]:
            found[f"{name}\0python"] = " ".join(str(one.python) for one in there)
    if spec.driver == "storage":
        found |= {f"storage\0{key}": value for key, value in spec.storage.model_dump().items()}
        found |= {f"file\0{key}": value for key, value in spec.load.items()}
    return found
