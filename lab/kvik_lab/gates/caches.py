"""V1: nothing came from a cache that was not designed to. V3: decode computed no prompt."""

from __future__ import annotations

from collections.abc import Sequence

from kvik_lab.gates.case import Case, first_total, invalid, passed, suspect, total, unchecked, worst
from kvik_lab.gates.limits import COMPUTED_FAR, DESIGNED_FAR, DESIGNED_NEAR, HIT_SHARE
from kvik_lab.records import Finding, Role

_ENGINES = ("prefill", "decode", "unified")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_EXTERNAL = "vllm:external_prefix_cache_hits_total"
_STORE_BLOCKS = "kvik_emulator_store_blocks_total"
_UNIQUE = (
    "start the servers with --no-enable-prefix-caching (an emulator: --no-prefix-cache), and give each "
    "prompt a "
    "prefix of its own (prompt.unique: prefix, and another seed for each run of a start); or state "
    "prefix_hit_share (run.stated), if hits are what is studied"
)
_STORE = (
    "empty the store or detach it before the run; or state store_hit_share (run.stated), if hits are what "
    "is studied"
)
_REFILLED = "compare the load's repeated_prompt_share; restart the engine to empty its cache"


def v1(case: Case) -> Finding:
    """Prefix-cache and store hits are those that were designed, on every engine."""
    engines = case.record.role(*_ENGINES)
    if not engines:
        return unchecked("V1", "no engine's counters are in the record")
    if not case.prompt_tokens:
        return unchecked("V1", "no request was answered")
    # Engines of a kind share the requests, so their hits are held to all prompts together.
    kinds = {role.kind: [one for one in engines if one.kind == role.kind] for role in engines}
    return worst(
        [finding for roles in kinds.values() for finding in (_prefix(case, roles), _store(case, roles))]
    )


def _prefix(case: Case, roles: Sequence[Role]) -> Finding:
    name, kind = _named(roles), roles[0].kind
    for role in roles:
        if first_total([role], _HITS) is None:
            return suspect(
                "V1",
                f"{role.name} does not count prefix-cache hits, so that there were none is not shown",
                "record the engine's /metrics before and after the run",
            )
    hits = sum(first_total([role], _HITS) or 0.0 for role in roles)
    share, stated = hits / case.prompt_tokens, case.stated.prefix_hit_share
    seen = f"{name}: {hits:.0f} of {case.prompt_tokens} prompt tokens came from its prefix cache"
    if stated == 0:
        return _undesigned(hits, share, seen, _UNIQUE)
    # A decode engine gets its KV handed over; whether its own cache is asked first is its own affair.
    if kind == "decode" and share <= stated + DESIGNED_NEAR:
        return passed("V1", seen, share, stated)
    return _designed(share, stated, seen, _REFILLED)


def _named(roles: Sequence[Role]) -> str:
    return ", ".join(role.name for role in roles)


def _store(case: Case, roles: Sequence[Role]) -> Finding:
    """Hits of a store. What a decode engine loads from others is the handover, but for an emulator's
    store."""
    name, kind = _named(roles), roles[0].kind
    blocks = total(roles, _STORE_BLOCKS, result="hit")
    hits = None if blocks is None else blocks * case.stated.block_tokens
    if kind != "decode" and (external := total(roles, _EXTERNAL)) is not None:
        hits = max(hits or 0.0, external)
    if hits is None:
        return unchecked("V1", f"{name} has no store that is counted")
    share, stated = hits / case.prompt_tokens, case.stated.store_hit_share
    seen = f"{name}: {hits:.0f} of {case.prompt_tokens} prompt tokens came from a store"
    if stated == 0:
        return _undesigned(hits, share, seen, _STORE)
    if kind == "decode" and share <= stated + DESIGNED_NEAR:  # as of its prefix cache
        return passed("V1", seen, share, stated)
    return _designed(share, stated, seen, "see that the store has what the design says, and no more")


def _undesigned(hits: float, share: float, seen: str, remedy: str) -> Finding:
    if hits <= 0:
        return passed("V1", seen, share, 0.0)
    kind = invalid if share > HIT_SHARE else suspect
    return kind("V1", f"{seen} ({share:.1%}), and none was designed", remedy, share, 0.0)


def _designed(share: float, stated: float, seen: str, remedy: str) -> Finding:
    off = abs(share - stated)
    if off <= DESIGNED_NEAR:
        return passed("V1", seen, share, stated)
    kind = invalid if off > DESIGNED_FAR else suspect
    return kind("V1", f"{seen}: {share:.1%}, and {stated:.1%} was designed", remedy, share, stated)


def v3(case: Case) -> Finding:
    """Decode engines took the prompts' KV over, and did not compute it again."""
    decode = case.record.role("decode")
    if not case.disaggregated:
        return unchecked("V3", f"a run of mode {case.stated.mode} hands nothing over")
    if not decode:
        return unchecked("V3", "no decode engine's counters are in the record")
    if not case.prompt_tokens:
        return unchecked("V3", "no request was answered")
    computed = _computed(decode)
    if computed is None:
        return suspect(
            "V3",
            "decode does not count what it computes, so that it computed no prompt is not shown",
            "record the decode engine's /metrics before and after the run",
        )
    # A last token is computed always, and of a block that is not whole perhaps all.
    free = len(case.answered) * case.stated.block_tokens
    share = computed / case.prompt_tokens
    seen = f"decode computed {computed:.0f} of {case.prompt_tokens} prompt tokens"
    if computed <= free:
        return passed("V3", seen, share, 0.0)
    remedy = (
        "see vllm:kvik_requests_recomputed_total, vllm:kvik_loads_failed_total and decode's log for why the "
        "KV was "
        "not taken; and that decode was given the router's requests, not a client's"
    )
    kind = invalid if computed - free > COMPUTED_FAR * case.prompt_tokens else suspect
    return kind("V3", f"{seen} ({share:.1%}), which prefill had computed", remedy, share, 0.0)


def _computed(decode: tuple[Role, ...]) -> float | None:
    """By source where the engine says so, else what neither a cache nor another server gave."""
    by_source = total(decode, "vllm:prompt_tokens_by_source_total", source="local_compute")
    if by_source is not None:
        return by_source
    prompts, given = total(decode, "vllm:prompt_tokens_total"), total(decode, _EXTERNAL)
    if prompts is None or given is None:
        return None
    return max(0.0, prompts - given - (first_total(decode, _HITS) or 0.0))
