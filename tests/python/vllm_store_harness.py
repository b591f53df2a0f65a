"""vLLM servers with a store: the connector against vLLM's own base class, over the real kvik engine and
store.

The KV of a block is one byte value that follows from all tokens up to its end, so that KV of another prompt,
or of another place in it, is seen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kvik
from tests.python.handover_harness import Status
from tests.python.vllm_harness import (
    Server,
    StepResult,
    allocated,
    request,
    scheduler_output,
)

BLOCK = 4
PATIENCE_S = 60.0  # more than any deadline here


class RealNative:
    """The module `kvik`, with the clock that the harness sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(kvik, name)


def weights(folder: Path, content: bytes = b"the weights") -> Path:
    """A folder of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text('{"layers": 3}')
    return folder


@dataclass
class Told:
    """What became of one request: tokens that the store was said to have, and that were computed; invalid: KV
    blocks whose load failed; waited: how often vLLM was told to ask again."""

    hit: int = 0
    computed: int = 0
    invalid: set[int] = field(default_factory=set)
    waited: int = 0


class StoreServer:
    """One vLLM server with a store, and what its scheduler does for requests."""

    def __init__(
        self,
        kvik_vllm: ModuleType,
        model: Path,
        store: dict[str, Any] | str,
        role: str = "kv_both",
        **more: Any,
    ) -> None:
        extra = {"store": store, "transport": "tcp", **more.pop("extra", {})}
        self.native = RealNative()
        native: Any = self.native
        self.server = Server(kvik_vllm, native, role, model=str(model), extra=extra, **more)
        self._free = list(range(1, len(self.server.pool.blocks)))

    def named(self) -> StoreServer:
        """Once the weights are known, or known to be not to be had."""
        naming, until = self.server.scheduler._cache._naming, time.monotonic() + PATIENCE_S
        while None in naming._digests._made.values():
            assert time.monotonic() < until, "the weights are not read"
            time.sleep(0.001)
        return self

    def met(self) -> StoreServer:
        """Once all ranks have their tiers: the weights are known, and a store that is served is met."""
        tiers = [worker._cache_rank._tiers for worker in self.server.workers]
        tier = "_host" if tiers[0]._config.address is None else "_remote"
        self.step_until(lambda _: all(getattr(one, tier) is not None for one in tiers))
        return self

    def close(self) -> None:
        """End it, as vLLM does."""
        for worker in self.server.workers:
            worker.shutdown()

    def step_until(self, good: Callable[[StepResult], bool]) -> StepResult:
        """Step as vLLM does, with pauses of 1 ms, until what a step says is good."""
        until = time.monotonic() + PATIENCE_S
        while not good(result := self.server.step()):
            assert time.monotonic() < until, "nothing has come"
            time.sleep(0.001)
        return result

    def ask(self, wanted: Any, local: int = 0) -> tuple[int, int]:
        """How many tokens the store is said to have, and how often vLLM was told to ask again."""
        waited = 0
        self.server.known.add(wanted.request_id)
        while True:
            tokens, is_async = self.server.scheduler.get_num_new_matched_tokens(wanted, local)
            if tokens is not None:
                assert is_async == (tokens > 0)
                return tokens, waited
            waited += 1
            self.server.step()
            time.sleep(0.001)

    def asked(self, tokens: Sequence[int]) -> int:
        """How many tokens the store is said to have of a prompt, whose client leaves then."""
        wanted = make(tokens)
        self.server.arrive(wanted)
        hit, _ = self.ask(wanted)
        wanted.status = Status.FINISHED_ABORTED
        self.server.scheduler.request_finished_all_groups(wanted, ([],))
        return hit

    def serve(
        self,
        tokens: Sequence[int],
        answer: int = 1,
        request_id: str | None = None,
        local: int = 0,
        **more: Any,
    ) -> Told:
        """One request's life: loaded as far as the store has it, the rest computed; its KV is checked, and
        its blocks are free for others when it returns."""
        wanted = make(tokens, request_id, **more)
        self.server.arrive(wanted)
        told = Told()
        told.hit, told.waited = self.ask(wanted, local)
        blocks = self.allocate(-(-(len(tokens) + answer) // BLOCK))
        scheduler, there = self.server.scheduler, local + told.hit
        self.compute(wanted, blocks, range(local))
        scheduler.update_state_after_alloc(wanted, allocated(blocks), told.hit)
        if told.hit:
            result = self.step_until(lambda one: wanted.request_id in one.received)
            told.invalid = result.invalid
            bad = [place for place, block in enumerate(blocks) if block in told.invalid]
            there = min([there, *(place * BLOCK for place in bad)])
            scheduler.update_state_after_alloc(wanted, allocated(blocks), 0)
        self.check(wanted, blocks, range(there))
        told.computed = len(tokens) - there
        self.compute(wanted, blocks, range(there, len(tokens)))
        self.server.step(scheduler_output([(wanted.request_id, blocks, there, told.computed)]))
        self.finish(wanted, blocks, answer)
        return told

    def finish(
        self, wanted: Any, blocks: list[int], answer: int, status: Any = Status.FINISHED_STOPPED
    ) -> None:
        """The request has answered with so many tokens, and ends; vLLM steps for as long as it is asked
        to."""
        wanted.all_token_ids = [*wanted.all_token_ids, *range(5000, 5000 + answer)]
        wanted.num_tokens = len(wanted.all_token_ids)
        wanted.num_computed_tokens = wanted.num_tokens - 1
        wanted.block_hashes = block_hashes(wanted)
        self.compute(wanted, blocks, range(wanted.num_prompt_tokens, wanted.num_computed_tokens))
        wanted.status = status
        self.server.scheduler.request_finished_all_groups(wanted, (blocks,))
        self._free += blocks
        until = time.monotonic() + PATIENCE_S
        self.server.step()
        while self.server.scheduler.has_pending_push_work():
            assert time.monotonic() < until, "a save does not end"
            self.server.step()
            time.sleep(0.001)
        assert not self.server.pool.used()

    def allocate(self, count: int) -> list[int]:
        """KV blocks with what somebody has left there."""
        blocks, self._free = self._free[:count], self._free[count:]
        assert len(blocks) == count
        for block in blocks:
            self.server.fill(block, 0)
        return blocks

    def compute(self, wanted: Any, blocks: list[int], positions: range) -> None:
        """Write the KV of these positions of a request; a block is whole when its last one is."""
        for position in positions:
            self.server.fill(blocks[position // BLOCK], value(wanted.all_token_ids[: position + 1]))

    def check(self, wanted: Any, blocks: list[int], positions: range) -> None:
        """The KV of whole blocks of these positions is that of the request's own tokens."""
        for block in range(positions.stop // BLOCK):
            expected = {value(wanted.all_token_ids[: (block + 1) * BLOCK])}
            assert self.server.values(blocks[block]) == expected, f"block {block} holds other KV"

    def total(self, name: str) -> float:
        """Sum of one count."""
        return self.server.total(name)


_numbers = iter(range(1 << 30))


def make(tokens: Sequence[int], request_id: str | None = None, **more: Any) -> Any:
    """A request as vLLM's scheduler has it."""
    values: dict[str, Any] = {"all_token_ids": list(tokens), "num_preemptions": 0} | more
    made = request(request_id or f"r-{next(_numbers)}", list(tokens), **values)
    made.block_hashes = block_hashes(made)
    return made


def block_hashes(wanted: Any) -> list[bytes]:
    """vLLM's hashes of a request's whole blocks: over tokens, the adapter's name and the salt."""
    about = repr((getattr(wanted.lora_request, "lora_name", None), wanted.cache_salt))
    ends = range(BLOCK, len(wanted.all_token_ids) + 1, BLOCK)
    return [hashlib.sha256(f"{about} {wanted.all_token_ids[:end]}".encode()).digest() for end in ends]


def value(tokens: Sequence[int]) -> int:
    """The byte that stands for the KV of a block, by all tokens up to its end; never 0."""
    return 1 + hashlib.sha256(repr(list(tokens)).encode()).digest()[0] % 255


@contextmanager
def running(*servers: StoreServer) -> Iterator[tuple[StoreServer, ...]]:
    """Servers that are closed at the end."""
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def lora(path: Path, number: int = 1, name: str = "adapter") -> Any:
    """vLLM's LoRARequest."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=False)
