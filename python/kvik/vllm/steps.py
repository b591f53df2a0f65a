"""What steps of vLLM compute, and upon what, as its scheduler says it to the connector."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Any

from kvik.handover.sending import Scheduled


def scheduled(output: Any, wanted: Container[str]) -> list[Scheduled]:
    """The wanted ones of the requests that a step computes. `output`: vLLM's SchedulerOutput, of 0.28 to
    0.33 (where a request that was preempted comes back as a new one or as one that is resumed), of a model
    with one KV cache group."""
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    found = [
        Scheduled(new.req_id, new.block_ids[0], True, new.num_computed_tokens, counts.get(new.req_id, 0))
        for new in output.scheduled_new_reqs
        if new.req_id in wanted
    ]
    for request_id, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if request_id in wanted:
            starts, new = request_id in cached.resumed_req_ids, blocks[0] if blocks else ()
            found.append(Scheduled(request_id, new, starts, computed, counts.get(request_id, 0)))
    return found


class Flight:
    """The steps whose output vLLM has not looked at, of which there are several with asynchronous scheduling
    and pipelines."""

    def __init__(self) -> None:
        self._loading: deque[bool] = deque()

    def began(self, output: Any) -> None:
        """A step begins. output: vLLM's SchedulerOutput."""
        self._loading.append(_loads(output))

    def ended(self) -> None:
        """vLLM has looked at the output of the oldest step."""
        if self._loading:
            self._loading.popleft()

    @property
    def loading(self) -> bool:
        """Whether a connector loads KV during one of them, which the step computes upon: requests that begin
        meanwhile may be given it by the prefix cache, before it is said what has not come."""
        return any(self._loading)


def _loads(output: Any) -> bool:
    """vLLM before 0.30 does not say it: there each request that begins with KV may have it from a load."""
    said = getattr(output, "has_sync_kv_loads", None)
    if said is None:
        begun = any(new.num_computed_tokens for new in output.scheduled_new_reqs)
        return begun or bool(output.scheduled_cached_reqs.resumed_req_ids)
    return bool(said)
