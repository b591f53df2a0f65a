"""The specification of a load: a JSON or YAML file with a strict form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

import yaml
from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from kvik_lab.errors import LabError, validated
from kvik_lab.infer.arrays import LONGEST, SHORTEST
from kvik_lab.records.measures import PER_REQUEST
from kvik_lab.records.schema import Count, Positive, Seconds, Section, Text

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Closed(Section):
    """So many users, each of whom sends the next request when the last is answered."""

    kind: Literal["closed"]
    concurrency: Positive
    pause: Seconds = Field(default=0.0, description="Seconds between an answer and the next request.")


class Rounds(Section):
    """Rounds of `concurrency` requests at one moment; the next when all are answered."""

    kind: Literal["rounds"]
    concurrency: Positive
    pause: Seconds = Field(default=0.0, description="Seconds between the rounds.")


class Constant(Section):
    """One request each 1 / rate seconds, whatever becomes of the others."""

    kind: Literal["constant"]
    rate: Rate = Field(description="Requests a second.")


class Poisson(Section):
    """Independent users: exponential times between requests."""

    kind: Literal["poisson"]
    rate: Rate


class Gamma(Section):
    """Gamma-distributed times between requests."""

    kind: Literal["gamma"]
    rate: Rate
    shape: Rate = Field(
        description="1 is Poisson, smaller burstier; the coefficient of variation is shape ** -0.5."
    )


class Trace(Section):
    """Arrivals, lengths and shared beginnings of a recording, a line of JSON a request:
    `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""

    kind: Literal["trace"]
    file: Text
    speed: Rate = Field(default=1.0, description="2 replays it in half the time.")
    first: Count = Field(default=0, description="Lines that are left out at its beginning.")
    scale_tokens: Rate = Field(default=1.0, description="Of all lengths, for servers with a shorter context.")
    block_tokens: Positive = Field(default=512, description="Tokens that one hash id stands for.")


Arrival: TypeAlias = Annotated[
    Closed | Rounds | Constant | Poisson | Gamma | Trace, Field(discriminator="kind")
]


class Ids(Section):
    """Prompts as token ids, drawn evenly from `low` to `high` (not included): exact by construction."""

    kind: Literal["ids"]
    low: Count = 3
    high: Positive = 259

    @model_validator(mode="after")
    def _range(self) -> Ids:
        if self.high - self.low < 2:
            raise ValueError(f"ids from {self.low} to {self.high} are no choice; give two at least")
        return self


class ByteTokens(Section):
    """Prompts as text of which each byte is a token, as kvik's emulator and its demo's checkpoint have it."""

    kind: Literal["bytes"]


class HuggingFace(Section):
    """Prompts as text, exact by the model's own tokenizer."""

    kind: Literal["hf"]
    path: Text = Field(description="A tokenizer.json, or the folder that has one.")

    def file(self) -> Path:
        """The tokenizer.json."""
        path = Path(self.path)
        return path / "tokenizer.json" if path.is_dir() else path


Tokens: TypeAlias = Annotated[Ids | ByteTokens | HuggingFace, Field(discriminator="kind")]


class Shared(Section):
    """A beginning that several prompts have in common."""

    share: Annotated[float, Field(gt=0, lt=1)] = Field(description="Of each prompt's tokens.")
    groups: Positive = Field(default=1, description="How many different beginnings there are, in turn.")


class Prompt(Section):
    """What requests ask."""

    tokens: Positive = Field(
        default=128, description="Of each prompt; a trace and later turns have their own."
    )
    output: Positive = Field(default=16, description="Tokens of each answer.")
    by: Tokens = Field(default_factory=lambda: Ids(kind="ids"))
    unique: Literal["prefix", "suffix", "none"] = Field(
        default="prefix",
        description="Where each prompt differs from all others. With `suffix` and `none` they share a "
        "beginning, "
        "which a prefix cache finds.",
    )
    shared: Shared | None = None
    system: str | None = Field(default=None, description="Of chat: a system message before the first one.")
    overhead: Count | None = Field(
        default=None,
        description="Tokens that the server adds to a prompt (a chat template, a begin token). None: for "
        "chat it is "
        "asked by one request before all others, else 0.",
    )


class Turns(Section):
    """Conversations: each turn sends all that was said before, and something new."""

    turns: Annotated[int, Field(ge=2)]
    new_tokens: Positive = Field(description="Of each turn after the first.")
    pause: Seconds = Field(default=0.0, description="Seconds from an answer to the next turn.")


class GoalSpec(Section):
    """Seconds that a request has to hold to be good."""

    ttft: Rate | None = None
    itl: Rate | None = None
    tpot: Rate | None = None
    e2e: Rate | None = None


class Search(Section):
    """The highest rate at which the goals are held."""

    low: Rate = Field(description="Requests a second that surely hold.")
    high: Rate | None = Field(default=None, description="Where to stop looking; None: where it fails.")
    attainment: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="Share of requests that have to hold all goals."
    )
    precision: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.1, description="Relative width of the interval at which it ends."
    )
    most: Positive = Field(default=16, description="Rates that are tried, at most.")


class UntilSteady(Section):
    """A warm-up that ends when its times keep a level."""

    until: Literal["changepoint"]
    min: Annotated[int, Field(ge=SHORTEST)] = Field(
        default=10, description="Requests that the level has lasted for when it ends."
    )
    max: Annotated[int, Field(ge=SHORTEST, le=LONGEST)] = Field(
        default=60, description="Requests after which it ends without one; V9 says so."
    )
    metric: Text = Field(default="ttft", description="Whose level it is: ttft, tpot, e2e, ...")

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str) -> str:
        if metric not in PER_REQUEST:
            raise ValueError(f"no request has the metric {metric!r}; there are: {', '.join(PER_REQUEST)}")
        return metric

    @model_validator(mode="after")
    def _order(self) -> UntilSteady:
        if self.max < self.min:
            raise ValueError(
                f"at most {self.max} and at least {self.min} requests; write max: {self.min} or more"
            )
        return self


def _rule(warmup: object) -> str:
    return "changepoint" if isinstance(warmup, dict | UntilSteady) else "count"


WarmUpSpec: TypeAlias = Annotated[
    Annotated[Count, Tag("count")] | Annotated[UntilSteady, Tag("changepoint")], Discriminator(_rule)
]


class LoadSpec(Section):
    """A load."""

    tool: Literal["builtin", "vllm-bench", "aiperf"] = Field(
        default="builtin", description="Which program sends it: the lab's own, or one of a study's run."
    )
    url: Text
    endpoint: Literal["completions", "chat"] = "completions"
    model: Text | None = Field(default=None, description="None: the one that the server names.")
    arrival: Arrival
    requests: Positive = Field(default=30, description="That are measured; of a search, a rate.")
    warmup: WarmUpSpec = Field(
        default=0,
        description="Requests of the measured shape before them, one by one: so many, or until they keep a "
        "level.",
    )
    prompt: Prompt = Prompt()
    turns: Turns | None = None
    goals: GoalSpec | None = None
    search: Search | None = None
    seed: Count = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=600.0, description="Seconds from sending a request to its last token."
    )
    most_in_flight: Positive = Field(
        default=4096, description="Requests that are open at once; more wait, and their waiting counts."
    )
    temperature: Annotated[float, Field(ge=0)] = 0.0
    token_ids: bool = Field(
        default=True,
        description="Ask for token ids (vLLM's `return_token_ids`), so that tokens are counted and not "
        "messages.",
    )
    headers: dict[str, str] = Field({})
    body: dict[str, JsonValue] = Field(default={}, description="Further fields of each request.")

    def files(self) -> tuple[Path, ...]:
        """Those that its requests are made from."""
        trace = (Path(self.arrival.file),) if self.arrival.kind == "trace" else ()
        return (*trace, *((self.prompt.by.file(),) if self.prompt.by.kind == "hf" else ()))

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the address begins with http:// or https:// and names a host")
        if not url.isascii() or parts.port == 0:  # a port that is none raises ValueError itself
            raise ValueError("the address has ASCII characters alone, and a port from 1")
        return url.rstrip("/")

    @field_validator("headers")
    @classmethod
    def _lines(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            text = f"{name}{value}"
            if not name or any(ord(one) > 255 or one in "\r\n" for one in text):
                raise ValueError(f"{name}: {value!r} is no header: it is a line of Latin-1 characters")
        return headers

    @model_validator(mode="after")
    def _together(self) -> LoadSpec:
        _check(self)
        return self


def _check(spec: LoadSpec) -> None:
    """What no single field can say."""
    prompt, trace = spec.prompt, spec.arrival.kind == "trace"
    if spec.endpoint == "chat" and prompt.by.kind == "ids":
        raise ValueError("chat takes no token ids; state prompt.by with kind bytes or hf")
    if spec.search is not None:
        _check_search(spec, spec.search)
    if spec.turns is not None and (trace or spec.search is not None or spec.arrival.kind == "rounds"):
        raise ValueError("turns go with closed, constant, poisson and gamma arrivals, without a search")
    if trace and (prompt.by.kind == "hf" or spec.endpoint == "chat" or prompt.shared is not None):
        raise ValueError(
            "a trace has its own shared beginnings; it takes prompts by ids or bytes, of completions"
        )
    if prompt.unique != "prefix" and (prompt.shared is not None or trace):
        raise ValueError(
            "prompts that share a stated beginning are unique behind it: leave prompt.unique out"
        )
    if prompt.system is not None and spec.endpoint != "chat":
        raise ValueError("a system message belongs to endpoint: chat")
    if spec.goals is not None and not spec.goals.model_dump(exclude_none=True):
        raise ValueError("goals has none of ttft, itl, tpot and e2e")


def _check_search(spec: LoadSpec, search: Search) -> None:
    if spec.goals is None:
        raise ValueError("a search needs goals, such as goals: {ttft: 0.5}")
    if spec.arrival.kind not in ("constant", "poisson", "gamma"):
        raise ValueError(f"a search raises a rate, and {spec.arrival.kind} arrivals have none")
    if search.high is not None and search.high <= search.low:
        raise ValueError("search.high is above search.low")


def read_spec(path: Path) -> LoadSpec:
    """Read a file; raises `LabError` that names the key and what is wrong with it."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read: {error}; give the specification of a load") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date that there is not
        raise LabError(f"{path}: is neither YAML nor JSON: {error}") from error
    return parse_spec(data, str(path))


def parse_spec(data: Any, where: str = "the load") -> LoadSpec:
    """From what a file has in it. Raises `LabError`."""
    return validated(LoadSpec, data, where, "the specification")
