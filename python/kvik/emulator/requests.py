"""One request on its way through the engine."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvik.emulator.content import Words, chain_of, root_of
from kvik.emulator.pool import Page


class Status(enum.Enum):
    """The names of the ends are vLLM's, which `kvik.handover` looks at."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.value >= Status.FINISHED_LENGTH_CAPPED.value


@dataclass(frozen=True)
class Sampling:
    """How long an answer may become, and what ends it."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Event:
    """What the HTTP side is told: a token, or the end (with `finish_reason`, or `error`), or both."""

    token: int | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    params: dict[str, Any] | None = None


@dataclass
class Times:
    """When things happened, in seconds of `time.monotonic`."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    computing: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    load_began: float | None = None
    kv_wait: float | None = None


class Request:
    """A prompt, its answer so far, its pages, and how much KV is in them.

    num_computed_tokens: tokens that steps need not compute (vLLM's name and meaning). present: tokens whose
    KV lies in the pages; one more than computed where a handover brought the last prompt token's KV too,
    which is read as it came and never written over. stored_blocks: how many of its first blocks the store
    has or was given, as far as is known here.
    """

    # What `kvik.handover` asks of a request and an emulator never has.
    lora_request = None
    prompt_embeds = None
    mm_features: tuple[Any, ...] = ()

    def __init__(
        self,
        request_id: str,
        prompt: npt.NDArray[np.uint32],
        sampling: Sampling,
        shape_name: str,
        cache_salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.kv_transfer_params = kv_transfer_params
        self.status = Status.WAITING
        self.outputs: list[int] = []
        self.events: asyncio.Queue[Event] = asyncio.Queue()  # at most max_tokens + 1 entries
        self.times = Times()
        self.deaths = 0
        self._root = root_of(shape_name, cache_salt)
        self._chain: Words = np.empty(prompt.size + sampling.max_tokens, dtype=np.uint64)
        self._chain[: prompt.size], self._running = chain_of(self._root, prompt, 0, 0)
        self.restart()

    def restart(self) -> None:
        """Forget pages and KV, as before its admission, for another replica. The answer so far stays."""
        self.status = Status.WAITING
        self.pages: list[Page] = []
        self.keys: list[bytes] = []
        self.cached_pages = 0
        self.num_computed_tokens = 0
        self.present = 0
        self.local_tokens = 0
        self.external_tokens = 0
        self.asked_store = False
        self.stored_blocks = 0
        self.counted = False
        self.digests: list[int] = []
        self.digested = 0
        self.steps_since_whole = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.prompt_token_ids.size)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt_tokens + len(self.outputs)

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV is ever computed: the last one of the longest answer's is not."""
        return self.num_prompt_tokens + self.sampling.max_tokens - 1

    def chain(self, first: int, last: int) -> Words:
        """Chain values of the tokens `first` to `last` (exclusive)."""
        return self._chain[first:last]

    def add(self, token: int) -> None:
        """Append a token to the answer."""
        at = self.num_tokens
        values, self._running = chain_of(self._root, np.array([token], dtype=np.uint32), at, self._running)
        self._chain[at] = values[0]
        self.outputs.append(token)

    def all_tokens(self) -> npt.NDArray[np.uint32]:
        """Prompt and answer."""
        return np.concatenate([self.prompt_token_ids, np.asarray(self.outputs, dtype=np.uint32)])

    def page_numbers(self, first: int, last: int, page_tokens: int) -> npt.NDArray[np.uint32]:
        """The pages that hold the tokens `first` to `last` (exclusive)."""
        chosen = self.pages[first // page_tokens : -(-last // page_tokens)]
        return np.fromiter((page.number for page in chosen), dtype=np.uint32, count=len(chosen))
