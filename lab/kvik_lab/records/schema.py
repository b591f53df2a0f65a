"""The record of a run: what was to be run, what ran, what was measured, and whether it counts.

One form for every command. A run is one combination of levels, measured under one start of the servers, in
one place of the order; it holds the requests of all its iterations. A record is written whole, when the run
has ended, and never changed: a verdict that is judged anew is a new record with the same `id`, and the last
one counts.

Times without a date are seconds on the monotonic clock of the client's node, from `times.zero`. Dates are
nanoseconds since the epoch. Counters are named as Prometheus names them, labels included:
`vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"}`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA: Literal[1] = 1
"""The version of this form. A reader refuses a newer one by name."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Level: TypeAlias = bool | int | Finite | str
Counters: TypeAlias = dict[str, Finite]
Gate = Literal["V1", "V2", "V3", "V4", "V5", "V6", "V7", "V8", "V9"]
Verdict = Literal["valid", "suspect", "invalid"]
Phase = Literal["warmup", "measure", "anchor"]
Outcome = Literal["completed", "failed", "lost", "cancelled"]


class Section(BaseModel):
    """A mapping of a file: no key but its own, and no value turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Key(Section):
    """What makes two runs replicates of each other: runs with equal keys are."""

    configuration: dict[str, JsonValue] = Field(
        description="Everything that was set: levels, constants, roles with their flags."
    )
    code: dict[str, str] = Field(default={}, description="Version or revision of each program, by its name.")
    facts: dict[str, JsonValue] = Field(
        default={}, description="What of the nodes' facts a result depends on."
    )

    def digest(self) -> str:
        """SHA-256 of the key as canonical JSON: sorted keys, no spaces, UTF-8."""
        text = json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        return hashlib.sha256(text.encode()).hexdigest()


class Stated(Section):
    """What the study says of the run, for the gates to hold it to. What is None is not stated, nor judged."""

    mode: Literal["unified", "disaggregated", "transfer", "storage"] = "disaggregated"
    entry: Text | None = Field(default=None, description="Role that the client is to talk to.")
    transport: Text | None = Field(
        default=None,
        description="That the KV is to be moved by: tcp, local, nics (verbs, libfabric or plugin), verbs, "
        "libfabric, ucx, ...; of a file that "
        "is loaded: tcp, rdma, or local.",
    )
    moved_bytes: Positive | None = Field(
        default=None, description="By all transfers of a run without a serving system, its warm-up's too."
    )
    file_bytes: Positive | None = Field(default=None, description="Of the file that each load reads.")
    prompt_tokens: Positive | None = Field(
        default=None, description="Of each measured request; None where it varies."
    )
    output_tokens: Positive | None = None
    kv_bytes_per_token: Positive | None = Field(
        default=None, description="Of the whole model, over all ranks."
    )
    block_tokens: Positive = Field(
        default=1, description="Tokens of a KV block: KV is handed over in whole ones."
    )
    prefix_hit_share: Share = Field(
        default=0.0, description="Prompt tokens that are to be found in a prefix cache."
    )
    store_hit_share: Share = Field(default=0.0, description="Prompt tokens that are to come from a store.")
    ttft_floor: Seconds | None = Field(
        default=None,
        description="No first token can come sooner: FLOPs of prefill over the peak, plus KV over the link.",
    )
    unified_ttft: Seconds | None = Field(
        default=None,
        description="Lower end of the interval of one engine's TTFT, same prompts, same hardware.",
    )
    interfaces: tuple[Text, ...] | None = Field(
        default=None,
        description="Network devices that KV is to go through, as the nodes' counters name them.",
    )
    varied: tuple[Text, ...] = Field(
        default=(), description="Settings that the factors under test change between arms."
    )


class Clock(Section):
    """Both clocks of a node around the run: they differ where one was set meanwhile."""

    wall_before: Count = Field(description="ns since the epoch")
    wall_after: Count
    monotonic_before: Count = Field(description="ns")
    monotonic_after: Count
    largest_step: Seconds = Field(
        default=0.0, description="Of all looks in between, the largest step of wall against monotonic."
    )
    offset: Finite | None = Field(
        default=None, description="Seconds ahead of the reference (chrony, or the client's node)."
    )


class Role(Section):
    """One process of the serving system, or several that are one service, around the run."""

    name: Text
    kind: Literal[
        "prefill", "decode", "unified", "router", "store", "target", "load", "storage", "telemetry", "other"
    ]  # fmt: skip
    node: Text = "local"
    start: Text = Field(description="Which start of its processes this is; a restart is another one.")
    url: Text | None = None
    ready_seconds: Seconds | None = Field(default=None, description="From its start until it was ready.")
    settings: dict[str, Level] = Field(
        default={}, description="Its flags and environment as they were resolved."
    )
    reported: dict[str, Level] = Field(
        default={}, description="What it says of itself: version, max_model_len, ..."
    )
    before: Counters = {}
    after: Counters = {}
    log: Text | None = Field(default=None, description="File with what it wrote.")

    def delta(self, name: str) -> float | None:
        """How much the counter of this very name and labels grew; None where it was not there afterwards."""
        last = self.after.get(name)
        return None if last is None else last - self.before.get(name, 0.0)


class Node(Section):
    """A machine of the run: facts, and its counters in node-exporter's names.

    `kvik_lab_own_cpu_seconds_total` is the CPU time of the run's own processes there.
    """

    name: Text
    facts: dict[str, JsonValue] = {}
    before: Counters = {}
    after: Counters = {}
    clock: Clock | None = None


class Request(Section):
    """One request as its client saw it. Times are seconds from `times.zero`."""

    id: Text = Field(description="Sent as X-Request-Id.")
    iteration: Count
    phase: Phase = "measure"
    conversation: Count | None = None
    turn: Count | None = None
    due: Finite | None = Field(
        default=None, description="When it was to be sent; None where it waited for another's end."
    )
    sent: Finite | None = Field(default=None, description="When it was; None where no connection came to be.")
    tokens: tuple[Finite, ...] = Field(
        default=(), description="When each token came; those of one message at once."
    )
    end: Finite | None = None
    status: int | None = Field(default=None, description="Of HTTP; None without an answer.")
    error: Text | None = None
    attempts: Positive = 1
    prompt_tokens: Count | None = Field(default=None, description="Of the prompt that was sent.")
    prompt_tokens_counted: Count | None = Field(default=None, description="As the server counted them.")
    cached_tokens: Count | None = Field(
        default=None, description="Prompt tokens that the server says it had."
    )
    output_tokens: Count | None = Field(default=None, description="That were asked for.")
    output_tokens_counted: Count | None = Field(default=None, description="As the server counted them.")
    prompt_digest: Text | None = Field(default=None, description="SHA-256 of what was sent as the prompt.")
    answer_digest: Text | None = Field(default=None, description="SHA-256 of the answer's text.")
    finish_reason: Text | None = None
    timing: dict[str, Seconds] = Field(default={}, description="`Server-Timing`, in seconds.")
    headers: dict[str, str] = Field(default={}, description="Of the answer, those that tell its way.")

    @property
    def ok(self) -> bool:
        """Whether it was answered whole and at the first attempt's word."""
        return self.error is None and self.status is not None and self.status < 400 and bool(self.tokens)


class WarmUp(Section):
    """The requests before those that count: how many there were, and what ended them.

    What is measured is numbered from the bound on, so iterations have a gap where it was not reached.
    """

    rule: Literal["count", "changepoint"] = Field(
        description="So many; or until their times kept a level, by the test of `kvik lab series`."
    )
    requests: Count
    seconds: Seconds = Field(description="That they took, with what was looked at between them.")
    metric: Text | None = Field(default=None, description="Whose level was looked at.")
    level_from: Count | None = Field(
        default=None,
        description="Of these requests the first of the level that the last ones kept; None by count, and "
        "where the bound was reached before a level had lasted.",
    )


class Client(Section):
    """The program that made the load."""

    driver: Text = Field(description="builtin, vllm-bench, aiperf, guidellm, nixlbench, ...")
    version: Text | None = None
    target: Text | None = Field(default=None, description="The URL that it was really sent to.")
    load: dict[str, JsonValue] = Field(default={}, description="Its specification.")
    seed: int | None = None
    warmup: WarmUp | None = None
    cpu_seconds: Seconds | None = None
    wall_seconds: Seconds | None = None
    largest_lag: Seconds | None = Field(
        default=None, description="Of its own loop: how much later than due a timer of it ran, at most."
    )
    clock: Clock | None = None


class Figure(Section):
    """A measured number that belongs to no request: of a transfer, of a whole run, or from another tool."""

    metric: Text = Field(description="ttft, bandwidth, latency, elapsed, load_time, ...")
    unit: Literal["s", "bytes/s", "bytes", "tokens/s", "requests/s", "tokens", "1", "1/s"]
    value: Finite
    statistic: Text = Field(default="value", description="value, mean, stdev, min, max, p50, p99, ...")
    iteration: Count | None = None
    levels: dict[str, Level] = Field(
        default={}, description="Of factors within the run, such as bytes and threads."
    )


class Times(Section):
    """When the run was."""

    began: Count = Field(description="ns since the epoch")
    ended: Count
    zero: Count = Field(default=0, description="The client's monotonic clock where its times begin, in ns.")


class Place(Section):
    """Where the run stands in the study."""

    order: Count = Field(description="Of the whole study, from 0.")
    start: Text = Field(
        description="Of the servers: the whole plot's replicate. Equal: measured without a restart."
    )
    group: Text | None = Field(default=None, description="Replicate group (the statistician's block).")
    whole_plot: Text | None = Field(
        default=None, description="Combination of the levels that take a restart."
    )
    pattern: Text | None = Field(default=None, description="The plan's id of the row.")
    anchor: bool = False


class Finding(Section):
    """What one gate says of the run."""

    gate: Gate
    status: Literal["passed", "suspect", "invalid", "unchecked"]
    what: Text = Field(description="What was seen, with its numbers.")
    remedy: str = Field(default="", description="What to do next; empty where it passed.")
    measured: Finite | None = None
    expected: Finite | None = None


class RunRecord(Section):
    """A run."""

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    id: Text
    study: Text
    key: Key
    levels: dict[str, Level | None] = Field(description="Of each factor; None where it does not exist.")
    place: Place
    times: Times
    outcome: Outcome = "completed"
    error: Text | None = Field(default=None, description="Why it is not completed.")
    stated: Stated = Stated()
    client: Client | None = None
    requests: tuple[Request, ...] = ()
    figures: tuple[Figure, ...] = ()
    roles: tuple[Role, ...] = ()
    nodes: tuple[Node, ...] = ()
    findings: tuple[Finding, ...] = ()
    verdict: Verdict | None = Field(default=None, description="None: not judged.")

    model_config = ConfigDict(populate_by_name=True)

    @property
    def counts(self) -> bool:
        """Whether it may enter a mean: completed, and not found invalid."""
        return self.outcome == "completed" and self.verdict != "invalid"

    def role(self, *kinds: str) -> tuple[Role, ...]:
        """The roles of these kinds."""
        return tuple(role for role in self.roles if role.kind in kinds)

    def measured(self) -> tuple[Request, ...]:
        """The requests that are not warm-up."""
        return tuple(request for request in self.requests if request.phase != "warmup")


class LoadResult(Section):
    """What a load driver hands to who started it; its parts enter the run's record as they are."""

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    zero: Count = 0
    began: Count
    ended: Count
    client: Client
    requests: tuple[Request, ...] = ()
    figures: tuple[Figure, ...] = ()

    model_config = ConfigDict(populate_by_name=True)
