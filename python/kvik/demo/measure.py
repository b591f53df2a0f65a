"""One prompt, answered twice: by one engine alone, and by the pair through the router; and the verdict.

A row is good when both answers have the same tokens and the decode engine reports that the KV of the
prompt's KV blocks came over.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvik.demo import client, words
from kvik.demo.reports import Load
from kvik.demo.scene import KvFacts, Scene
from kvik.demo.timeline import Compute, Evidence, Moving, Span, server_timing, spans
from kvik.roles.processes import HttpServer

TOKENS = 24
SEED = 2024
QUEUE = "vllm:request_queue_time_seconds_sum"
PREFILL = "vllm:request_prefill_time_seconds_sum"
REPORT_WAIT = 2.0  # seconds for the report of a load, whose request has ended already
NO_LOAD_WAIT = 0.3  # where none has to come


@dataclass(frozen=True)
class Moved:
    """The load of one request over all decode ranks. The slowest rank's times count: all are waited for."""

    bytes: int
    total_s: float
    wire_s: float
    over: str  # such as `tcp`
    mechanism: str

    @classmethod
    def of(cls, loads: tuple[Load, ...]) -> "Moved | None":
        """None unless every rank has loaded."""
        if not loads or any(load.outcome != "loaded" for load in loads):
            return None
        slowest = max(loads, key=lambda load: load.total_s or 0.0)
        return cls(
            sum(load.bytes for load in loads),
            slowest.total_s or 0.0,
            slowest.wire_s or 0.0,
            ", ".join(sorted({load.transport or "?" for load in loads})),
            ", ".join(sorted({f"{load.transport} by {load.mechanism}" for load in loads})),
        )


@dataclass(frozen=True)
class Row:
    """One prompt, answered twice; and what the two engines of the pair counted meanwhile."""

    length: int
    kv: KvFacts
    alone: client.Completion
    handed: client.Completion
    loads: tuple[Load, ...]
    prefill: Compute
    decode: Compute

    @property
    def load(self) -> Moved | None:
        """What came over, if it did."""
        return Moved.of(self.loads)

    @property
    def equal(self) -> bool:
        """Whether both answers have the same tokens, all of them."""
        return self.alone.tokens == self.handed.tokens and len(self.handed.tokens) == TOKENS

    @property
    def moved(self) -> bool:
        """Whether the prompt's KV really came from the prefill engine."""
        if not self.loads:
            return self.kv.bytes_of(self.length) == 0
        return self.load is not None and self.load.bytes == self.kv.blocks(self.length) * self.kv.block_bytes

    @property
    def good(self) -> bool:
        """What the exit status hangs on."""
        return self.equal and self.moved

    @property
    def complaint(self) -> str:
        """What is wrong with this row; empty when it is good."""
        said = [] if self.equal else [_difference(self.alone.tokens, self.handed.tokens)]
        if not self.moved:
            said.append(self._not_moved())
        prompt = "1 token" if self.length == 1 else f"{self.length:,} tokens"
        return f"{prompt}: {'; '.join(said)}" if said else ""

    def _not_moved(self) -> str:
        if not self.loads:
            return "the decode engine reports no load: no KV came from the prefill engine"
        bad = [load for load in self.loads if load.outcome != "loaded"]
        if bad:
            return f"KV not moved ({bad[0].outcome}: {bad[0].reason}), so decode computed the prompt itself"
        got = words.size(sum(load.bytes for load in self.loads))
        return f"{got} came over, and {words.size(self.kv.bytes_of(self.length))} had to"

    def spans(self) -> list[Span]:
        """Where the time to the first token went."""
        load = self.load
        moving = None if load is None else Moving(load.total_s - load.wire_s, load.wire_s)
        phases = server_timing(self.handed.headers.get("server-timing", ""))
        return spans(Evidence(self.handed.ttft, phases, self.prefill, self.decode, moving))


def rows(scene: Scene, lengths: tuple[int, ...]) -> Iterator[Row]:
    """A row for each length, as soon as it is there. Raises `client.RequestError` and `OSError`."""
    for number, length in enumerate(lengths, start=1):
        yield _ask(scene, prompt_of(scene.kv, length, number), f"demo-{number}")


def warm_up(scene: Scene, length: int) -> None:
    """Ask once what is not shown: it pays for first connections, and, when its length is the greatest of all,
    for the memory that is touched for the first time. Raises as `rows` does."""
    _ask(scene, prompt_of(scene.kv, length, 0), "demo-0")


def prompt_of(kv: KvFacts, length: int, number: int) -> list[int]:
    """Token ids, the same in every run; no two prompts begin alike, so that no prefix cache can help."""
    rng = random.Random(SEED * 1_000_003 + number)  # noqa: S311 - prompts, not secrets
    return [rng.choice(kv.vocabulary) for _ in range(length)]


def _ask(scene: Scene, prompt: list[int], request_id: str) -> Row:
    alone = client.complete(scene.alone.url, prompt, TOKENS, model=scene.model, request_id=request_id)
    engines = (scene.prefill, scene.decode)
    before = [_counted(engine) for engine in engines]
    scene.reports.new()
    handed = client.complete(scene.router.url, prompt, TOKENS, model=scene.model, request_id=request_id)
    wanted = scene.kv.bytes_of(len(prompt))
    loads = scene.reports.wait_for(
        lambda loads: _complete(loads, wanted), REPORT_WAIT if wanted else NO_LOAD_WAIT
    )
    prefill, decode = (_since(engine, counted) for engine, counted in zip(engines, before, strict=True))
    return Row(len(prompt), scene.kv, alone, handed, tuple(loads), prefill, decode)


def _complete(loads: list[Load], wanted: int) -> bool:
    """Whether nothing more is to be expected: all bytes are accounted for, or something went wrong."""
    failed = any(load.outcome != "loaded" for load in loads)
    return bool(loads) and (failed or sum(load.bytes for load in loads) >= wanted)


def _counted(engine: HttpServer) -> dict[str, float]:
    return client.metrics(engine.url)


def _since(engine: HttpServer, before: dict[str, float]) -> Compute:
    """What an engine has counted since: of the one request that it had meanwhile."""
    now = _counted(engine)

    def grown(name: str) -> float | None:
        return now[name] - before.get(name, 0.0) if name in now else None

    return Compute(grown(QUEUE), grown(PREFILL))


def _difference(alone: list[int], handed: list[int]) -> str:
    same = next((n for n, (a, b) in enumerate(zip(alone, handed, strict=False)) if a != b), None)
    if same is None:
        return f"{len(alone)} output tokens alone, {len(handed)} handed over, {TOKENS} were asked for"
    return f"output token {same + 1} is {handed[same]}, and {alone[same]} alone: the KV was not the right one"
