"""Emulated engines with a router before them, one run on them, and its record as a runner would make it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvik.roles.processes import HttpServer, descendants
from kvik.shapes import ModelShape
from kvik_lab.observe import clocks, engine_counters, scrape
from kvik_lab.records import (
    Clock,
    Counters,
    Finding,
    Key,
    LoadResult,
    Node,
    Place,
    Role,
    RunRecord,
    Stated,
    Times,
    read_load,
)
from tests.python.emulator.servers import Spec, routed, servers

BLOCK = 16
TOKENS = 96
TINY = ModelShape.preset("tiny")
PLAIN = ("--no-prefix-cache", "--page-tokens", str(BLOCK))
LIMIT = 240.0  # seconds for what takes a few
_numbers = itertools.count()
Kind = Literal["prefill", "decode", "unified", "router"]


@dataclass(frozen=True)
class Part:
    """One server of the scene, in the role that it plays for the client."""

    kind: Kind
    server: HttpServer
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def counters(self) -> Counters:
        """What it and the engines in its processes count."""
        return scrape(self.server.url) | engine_counters(self.server.pid)

    def reported(self) -> dict[str, str | int | float | bool]:
        """What it says of itself."""
        if self.kind == "router":
            return {}
        with urllib.request.urlopen(f"{self.server.url}/v1/models", timeout=LIMIT) as answer:  # noqa: S310
            return {"max_model_len": json.load(answer)["data"][0]["max_model_len"]}


@dataclass(frozen=True)
class Scene:
    """What runs."""

    parts: Sequence[Part]
    folder: Path
    start: str

    def url(self, kind: Kind) -> str:
        """The address of a part."""
        return next(part.server.url for part in self.parts if part.kind == kind)

    def run(
        self,
        *,
        to: str | None = None,
        stated: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        beside: contextlib.AbstractContextManager[object] | None = None,
        **load: Any,
    ) -> RunRecord:
        """One run. to: where the load is sent, if not to the router. beside: what happens meanwhile."""
        number = next(_numbers)
        spec: dict[str, Any] = {
            "url": to or self.url("router"),
            "arrival": {"kind": "closed", "concurrency": 2},
            "requests": 8,
            "warmup": 2,
            "prompt": {"tokens": TOKENS, "output": 4},
            "seed": number,
            **load,
        }
        source, out = self.folder / f"load-{number}.json", self.folder / f"result-{number}.json"
        source.write_text(json.dumps(spec))
        began, before, node_before = clocks(), [part.counters() for part in self.parts], self._node()
        with beside or contextlib.nullcontext():
            result, own = _loaded(source, out, environment or {})
        after, node_after, ended = [part.counters() for part in self.parts], self._node(), clocks()
        node_after["kvik_lab_own_cpu_seconds_total"] += own
        clock = Clock(
            wall_before=began.wall,
            wall_after=ended.wall,
            monotonic_before=began.monotonic,
            monotonic_after=ended.monotonic,
        )
        node = Node(name="local", before=node_before, after=node_after, clock=clock)
        counters = list(zip(before, after, strict=True))
        return self._record(number, spec, result, counters, node, stated or {})

    def _record(
        self,
        number: int,
        spec: dict[str, Any],
        result: LoadResult,
        counters: list[tuple[Counters, Counters]],
        node: Node,
        stated: Mapping[str, Any],
    ) -> RunRecord:
        says: dict[str, Any] = {
            "mode": "disaggregated",
            "entry": "router",
            "transport": "tcp",
            "prompt_tokens": spec["prompt"]["tokens"],
            "output_tokens": spec["prompt"]["output"],
            "kv_bytes_per_token": TINY.kv_bytes_per_token(),
            "block_tokens": BLOCK,
        }
        roles = [
            Role(
                name=part.kind,
                kind=part.kind,
                start=self.start,
                url=part.server.url,
                settings=dict(part.settings),
                reported=part.reported(),
                before=before,
                after=after,
            )
            for part, (before, after) in zip(self.parts, counters, strict=True)
        ]
        return RunRecord(
            id=f"run-{number}",
            study="gates",
            key=Key(configuration={"load": spec}),
            levels={"arm": self.start},
            place=Place(order=number, start=self.start),
            times=Times(began=result.began, ended=result.ended, zero=result.zero),
            stated=Stated.model_validate(says | dict(stated)),
            client=result.client,
            requests=result.requests,
            figures=result.figures,
            roles=tuple(roles),
            nodes=(node,),
        )

    def _node(self) -> Counters:
        """The CPU time of this machine, and that of the servers' processes."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        modes = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
        found = {
            f'node_cpu_seconds_total{{mode="{mode}"}}': int(value) / tick
            for mode, value in zip(modes, fields, strict=True)
        }
        own = 0
        for pid in set[int]().union(*(descendants(part.server.pid) for part in self.parts)):
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += int(stat[11]) + int(stat[12])
        found["kvik_lab_own_cpu_seconds_total"] = own / tick
        return found


def _loaded(source: Path, out: Path, environment: Mapping[str, str]) -> tuple[LoadResult, float]:
    """Run the load driver as the process that it is; its result, and its CPU time in seconds."""
    command = [sys.executable, "-m", "kvik.cli", "lab", "load", "--spec", str(source), "--out", str(out)]
    before = os.times()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return read_load(out), used


@contextlib.contextmanager
def pair(
    folder: Path, prefill: Sequence[str] = (), decode: Sequence[str] = (), *, prefill_role: str = "prefill",
    cache: bool = False,
) -> Iterator[Scene]:  # fmt: skip
    """A prefill and a decode engine, and a router."""
    name = folder.name
    plain = PLAIN[1:] if cache else PLAIN
    with (
        servers(
            folder,
            Spec("prefill", prefill_role, (*plain, *prefill)),
            Spec("decode", "decode", (*plain, *decode)),
        ) as (first, second),
        routed(folder, [first], [second]) as router,
    ):
        settings = {"prefix_cache": cache, "page_tokens": BLOCK}
        parts = (Part("prefill", first, settings), Part("decode", second, settings), Part("router", router))
        yield Scene(parts, folder, name)


def finding(record: RunRecord, gate: str) -> Finding:
    """What a gate said."""
    return next(one for one in record.findings if one.gate == gate)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that use a CPU each."""
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield
