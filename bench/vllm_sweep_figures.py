"""The figures of `vllm_store_sweep.py`, from its raw data alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_beside_figures import Estimate, of_mean, ratio

from kvik.demo.engines import BLOCK_TOKENS
from kvik.store.bench.figures import markdown

BLOCKS = 10
PROMPT = BLOCKS * BLOCK_TOKENS + 1
"""Tokens of a prompt of `hits`: whole KV blocks, and one that is always computed."""
PASSES = ("none", "first", "second")
"""Without a store; with what the store has; the same prompts again."""
LONG = 16 * BLOCK_TOKENS + 1
"""Tokens of a prompt of `overhead`."""
ARMS = ("none", "store")
Raw = Mapping[str, Any]


def stored_blocks(share: float) -> int:
    """Blocks of each prompt that the store has."""
    return round(share * BLOCKS)


def mean(values: Sequence[float]) -> Estimate:
    """The mean with its interval."""
    return Estimate(math.fsum(values) / len(values), of_mean(values))


# Hits.


def point_of(cell: Raw, share: float, which: str) -> Raw | None:
    """A pass of a share in one round."""
    for point in cell["points"]:
        if point["share"] == share and point["pass"] == which:
            return dict(point)
    return None


def rate(point: Raw) -> float:
    """Requests a second."""
    return len(point["ttft_s"]) / float(point["seconds"])


def counted_share(point: Raw) -> float:
    """The part of the blocks that came from the store, by the engine's counter."""
    return float(point["remote"]) / (len(point["ttft_s"]) * BLOCKS)


def point_faults(point: Raw, truth: Sequence[Sequence[int]]) -> list[str]:
    """Why a pass is not what it is said to be; `truth` are the tokens without a store."""
    prompts, blocks = len(point["ttft_s"]), stored_blocks(point["share"])
    wanted = {
        "none": (prompts * PROMPT, 0, 0),
        "first": (prompts * (PROMPT - blocks * BLOCK_TOKENS), 0, prompts * blocks),
        "second": (prompts, 0, 0),
    }[point["pass"]]
    found = tuple(point[name] for name in ("computed", "host", "remote"))
    faults = []
    if found != wanted:
        numbers = [", ".join(f"{number:g}" for number in one) for one in (found, wanted)]
        faults.append(f"{numbers[0]} computed tokens, host and remote blocks, not {numbers[1]}")
    wrong = sum(one != other for one, other in zip(point["tokens"], truth, strict=True))
    return [*faults, f"{wrong} answers with other tokens than without a store"] if wrong else faults


def invalid_shares(raw: Raw) -> dict[float, list[str]]:
    """Why a share says nothing, of each that does not."""
    found: dict[float, list[str]] = {}
    for cell in raw["cells"]:
        for share in raw["settings"]["shares"]:
            points = {which: point_of(cell, share, which) for which in PASSES}
            truth = points["none"]
            for which, point in points.items():
                faults = point_faults(point, truth["tokens"]) if point and truth else ["it was not measured"]
                where = (
                    f"round {cell['round']}, {which} pass" if which != "none" else f"round {cell['round']}"
                )
                found.setdefault(share, []).extend(f"{where}: {fault}" for fault in faults)
    return {share: faults for share, faults in found.items() if faults}


def hits_report(raw: Raw) -> str:
    """The table of all shares."""
    bad = invalid_shares(raw)
    columns = ["share stated", "share counted"]
    for unit in ("requests/s", "TTFT ms"):
        columns += [f"{unit}, {which}" for which in ("without a store", "first pass", "second pass")]
    columns.append("first pass to none, requests/s")
    rows = [
        [f"{share:.1f}", *_share_row(raw, share, share in bad)] for share in sorted(raw["settings"]["shares"])
    ]
    lines = [f"INVALID share {share:.1f}: {'; '.join(faults)}" for share, faults in sorted(bad.items())]
    return "\n\n".join([_heads(raw, f"{len(raw['cells'])} rounds"), markdown(columns, rows), *lines])


def _share_row(raw: Raw, share: float, invalid: bool) -> list[str]:
    of_passes = [
        [point for cell in raw["cells"] if (point := point_of(cell, share, which))] for which in PASSES
    ]
    counted = sorted({counted_share(point) for point in of_passes[1]})
    shown = " to ".join(f"{one:.2f}" for one in (counted[:1] + counted[-1:] if counted[1:] else counted))
    if invalid or not all(of_passes):
        return [shown or "-", *["invalid"] * 7]
    rates = [[rate(point) for point in points] for points in of_passes]
    times = [[math.fsum(point["ttft_s"]) / len(point["ttft_s"]) for point in points] for points in of_passes]
    first = ratio(rates[1], rates[0])
    return [
        shown,
        *(mean(values).text() for values in rates),
        *(mean(values).text(1e3, 1) for values in times),
        first.text() if first else "-",
    ]


# Overhead.


def turns_of(cell: Raw, arm: str) -> list[Raw]:
    """The turns of an arm, one a pair."""
    return sorted((turn for turn in cell["turns"] if turn["arm"] == arm), key=lambda turn: turn["pair"])


def cell_faults(cell: Raw) -> list[str]:
    """Why a pair of servers says nothing."""
    found = []
    none, store = (turns_of(cell, arm) for arm in ARMS)
    prompts = sum(len(turn["tokens"]) for turn in store)
    for arm in ARMS:
        counted = tuple(cell["counted"][arm][name] for name in ("computed", "host", "remote"))
        if counted != (prompts * LONG, 0, 0):
            numbers = ", ".join(f"{number:g}" for number in counted)
            found.append(
                f"{arm}: {numbers} computed tokens, host and remote blocks, not {prompts * LONG}, 0, 0"
            )
    if any(turn["stored_s"] is None for turn in store):
        found.append("blocks did not come into the store")
    pairs = zip(none, store, strict=True)
    wrong = sum(one["tokens"] != other["tokens"] for one, other in pairs)
    return [*found, f"{wrong} batches with other tokens than without a store"] if wrong else found


def overhead_report(raw: Raw) -> str:
    """A row for each size of steps and setting of the engine's own cache.

    Pairs of turns have their two servers in common, so of several starts each is one sample. Of one start
    alone there are its pairs, whose interval says nothing of another start.
    """
    settings = raw["settings"]
    columns = ["tokens a step", "engine's cache", "without a store, s"]
    columns += ["saves asynchronous, to without", "saves synchronous, to without", "samples"]
    rows = [
        [str(steps), cache, *_cells(raw, steps, cache)]
        for cache in settings["caches"]
        for steps in settings["steps"]
    ]
    heads = _heads(raw, f"{settings['pairs']} pairs a start")
    lines = [f"INVALID {_name(cell)}: {'; '.join(faults)}" for cell, faults in invalid_cells(raw)]
    return "\n\n".join([heads, markdown(columns, rows), *lines])


def invalid_cells(raw: Raw) -> Iterator[tuple[Raw, list[str]]]:
    """Pairs of servers that say nothing, and why."""
    for cell in raw["cells"]:
        if faults := cell_faults(cell):
            yield cell, faults


def _cells(raw: Raw, steps: int, cache: str) -> list[str]:
    cells = [one for one in raw["cells"] if (one["steps"], one["cache"]) == (steps, cache)]
    if not cells:
        return ["-"] * 4
    if any(map(cell_faults, cells)):
        return ["invalid"] * 4

    def all_of(arm: str, value: Callable[[Raw], float]) -> list[float]:
        starts = [[value(turn) for turn in turns_of(cell, arm)] for cell in cells]
        return starts[0] if not starts[1:] else [statistics.geometric_mean(pairs) for pairs in starts]

    none = all_of("none", lambda turn: float(turn["seconds"]))
    answered = all_of("store", lambda turn: float(turn["seconds"]))
    stored = all_of("store", lambda turn: max(float(turn["stored_s"]), float(turn["seconds"])))
    ratios = [ratio(values, none) for values in (answered, stored)]
    samples = f"{len(none)} {'starts' if cells[1:] else 'pairs'}"
    return [mean(none).text(), *(one.text(digits=3) if one else "-" for one in ratios), samples]


def _name(cell: Raw) -> str:
    return f"{cell['steps']} tokens a step, cache {cell['cache']}"


def _heads(raw: Raw, what: str) -> str:
    found = raw.get("facts", {})
    return (
        f"seed {raw['settings']['seed']}, {what}, vLLM {found.get('vllm')}, kvik {found.get('kvik')}, "
        f"{found.get('cpu_model')}, {found.get('cores_usable')} cores, load {found.get('load_1min')} at first"
    )
