"""V5: no answer came sooner than physics lets it. V6: prompts are as long as stated, and differ."""

from __future__ import annotations

import statistics
from collections import Counter

from kvik_lab.gates.case import Case, invalid, length, not_seen, passed, suspect, unchecked, worst
from kvik_lab.gates.limits import FLOOR_SLACK, LENGTH, MESSAGES
from kvik_lab.records import Finding, Request, RunRecord
from kvik_lab.records.measures import ttft_from_send


def v5(case: Case) -> Finding:
    """Times to first token are above the floor, and handing over is no faster than one engine's prefill."""
    times = [
        value for one in case.answered if one.phase != "warmup" and (value := ttft_from_send(one)) is not None
    ]
    if not times:
        return unchecked("V5", "no measured request has a time to first token")
    floor, unified = case.stated.ttft_floor, case.stated.unified_ttft
    found = []
    if floor is not None:
        found.append(_above(times, floor))
    if unified is not None and case.disaggregated:
        found.append(_slower(times, unified))
    if not found:
        remedy = "state ttft_floor (run.stated): operations over the peak, and bytes over the link"
        return unchecked("V5", "no floor is stated", remedy)
    return worst(found)


def _above(times: list[float], floor: float) -> Finding:
    soonest = min(times)
    seen = f"the soonest first token came after {soonest * 1e3:.3f} ms, and the floor is {floor * 1e3:.3f} ms"
    early = sum(value < floor * (1 - FLOOR_SLACK) for value in times)
    if not early:
        return passed("V5", seen, soonest, floor)
    return invalid(
        "V5",
        f"{early} of {len(times)} first tokens are below the floor: {seen}",
        "look for a cache hit (V1), shorter prompts (V6), or another model than stated",
        soonest,
        floor,
    )


def _slower(times: list[float], unified: float) -> Finding:
    median = statistics.median(times)
    seen = f"the median first token came after {median * 1e3:.3f} ms; one engine takes {unified * 1e3:.3f} ms"
    if median >= unified:
        return passed("V5", seen, median, unified)
    remedy = "prefill and transfer are not faster than prefill: see V1 and V4"
    return suspect("V5", seen, remedy, median, unified)


def v6(case: Case) -> Finding:
    """Prompts have the tokens that were stated, by the server's own count; they differ; arms have the
    same."""
    if not case.answered:
        return unchecked("V6", "no request was answered")
    found = worst([_lengths(case), _output(case), _digests(case), *_messages(case), *_arms(case)])
    return not_seen(case.record, found, "whether prompts differ")


def _lengths(case: Case) -> Finding:
    wrong: list[tuple[int, int]] = []
    for request in case.answered:
        wanted, counted = _wanted(case, request), request.prompt_tokens_counted
        if wanted is not None and counted is not None and abs(counted - wanted) > LENGTH * wanted:
            wrong.append((counted, wanted))
    if wrong:
        counted, wanted = max(wrong, key=lambda pair: abs(pair[0] - pair[1]))
        return invalid(
            "V6",
            f"{len(wrong)} of {len(case.answered)} prompts are not as long as stated: one has {counted} "
            f"tokens and "
            f"is to have {wanted}",
            "make prompts by the model's tokenizer (prompt.by), or send token ids: repeated letters compress",
            counted,
            wanted,
        )
    known = sum(request.prompt_tokens_counted is not None for request in case.answered)
    if known < len(case.answered):
        return suspect(
            "V6",
            f"the server counted the tokens of {known} of {len(case.answered)} prompts",
            "ask for usage (stream_options: {include_usage: true}), as the lab's own driver does",
        )
    return passed("V6", f"all {known} prompts have the tokens that were stated, within {LENGTH:.0%}")


def _wanted(case: Case, request: Request) -> int | None:
    """What is stated of all measured ones, else what was sent."""
    if case.stated.prompt_tokens is not None and request.phase != "warmup":
        return case.stated.prompt_tokens
    return request.prompt_tokens


def _answered(record: RunRecord, request: Request) -> int:
    """The tokens of an answer, as they came; of another driver, which knows of messages, as counted."""
    counted, client = request.output_tokens_counted, record.client
    if counted is None or client is None or client.driver == "builtin":
        return len(request.tokens)
    return counted


def _output(case: Case) -> Finding:
    lengths = {one.id: _answered(case.record, one) for one in case.answered}
    other = [one for one in case.answered if one.output_tokens and lengths[one.id] != one.output_tokens]
    if not other:
        return passed("V6", "answers are as long as asked")
    one = other[0]
    return suspect(
        "V6",
        f"{len(other)} of {len(case.answered)} answers have not the tokens that were asked for: one has "
        f"{lengths[one.id]} of {one.output_tokens}",
        "ask the server to go on after an end token (ignore_eos), and for token ids (return_token_ids)",
        lengths[one.id],
        one.output_tokens,
    )


def _messages(case: Case) -> list[Finding]:
    """Another driver stamps messages: where these are not tokens, its times a token are none."""
    client = case.record.client
    if client is None or client.driver == "builtin":
        return []
    pairs = [(len(one.tokens), one.output_tokens_counted) for one in case.answered]
    other = [(came, has) for came, has in pairs if has is not None and abs(came - has) > MESSAGES * has]
    if not other:
        return []
    came, has = max(other, key=lambda pair: abs(pair[0] - pair[1]))
    what = (
        f"{len(other)} of {len(case.answered)} answers came in other messages than one a token: one has "
        f"{has} tokens in {came}, so tpot, decode_step, output_rate and output_throughput are not of tokens"
    )
    remedy = (
        "have the server send each token by itself (no stream_interval, no speculative decoding, less load), "
        "or let the lab's own driver send the load (tool: builtin)"
    )
    return [suspect("V6", what, remedy, came, has)]


def _digests(case: Case) -> Finding:
    digests = [one.prompt_digest for one in case.answered if one.prompt_digest is not None]
    if not digests:
        return unchecked("V6", "no digests of prompts are recorded")
    digest, times = Counter(digests).most_common(1)[0]
    if times > 1 and not (case.stated.prefix_hit_share or case.stated.store_hit_share):
        return suspect(
            "V6",
            f"the prompt {digest[:12]}... was sent {times} times, and no cache hit is designed",
            "give each prompt a prefix of its own (prompt.unique: prefix)",
            times,
            1,
        )
    return passed("V6", f"{len(set(digests))} different prompts, digests recorded")


def _arms(case: Case) -> list[Finding]:
    """Runs of the same load have prompts of the same length."""
    mine = _mean_length(case.record)
    if mine is None:
        return []
    for other in case.beside:
        theirs = _mean_length(other)
        if theirs is None or not _same_load(case.record, other):
            continue
        if abs(mine - theirs) > LENGTH * max(mine, theirs):
            what = f"prompts have {mine:.0f} tokens here and {theirs:.0f} in run {other.id} of the same load"
            remedy = "compare runs with prompts of one length; see the tokenizers of both arms"
            return [invalid("V6", what, remedy, mine, theirs)]
    return []


def _same_load(one: RunRecord, two: RunRecord) -> bool:
    """Whether two runs were to have equal prompts: by what is stated, else by the load's own words."""
    if one.stated.prompt_tokens is not None or two.stated.prompt_tokens is not None:
        return one.stated.prompt_tokens == two.stated.prompt_tokens
    if one.client is None or two.client is None or one.client.driver != two.client.driver:
        return False
    keys = ("prompt", "arrival", "turns")
    return bool(one.client.load) and all(one.client.load.get(key) == two.client.load.get(key) for key in keys)


def _mean_length(record: RunRecord) -> float | None:
    found = [value for one in record.measured() if one.ok and (value := length(one)) is not None]
    return statistics.fmean(found) if found else None
