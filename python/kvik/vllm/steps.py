"""What one step of vLLM computes, as its scheduler says it to the connector."""

from __future__ import annotations

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
