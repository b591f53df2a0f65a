"""The figures of `vllm_beside.py`, from its raw data alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GOAL = 0.85  # of what NIXL adds
RIVALS = ("nixl", "nixl-pinned")
SIDES = ("prefill", "decode")
LEVEL = 0.95
Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval, which is None where there are too few starts."""

    value: float
    interval: tuple[float, float] | None

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """For the table."""
        shown = f"{self.value * scale:.{digits}f}"
        if self.interval is None:
            return shown
        low, high = (f"{end * scale:.{digits}f}" for end in self.interval)
        return f"{shown} ({low} to {high})"


def t_tail(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t with so many degrees of freedom (Abramowitz and Stegun 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2 == 1
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t between whose negative and itself so much of the distribution lies."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) < level:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) < level else (low, middle)
    return high


def of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean by Student's t."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def over_starts(values: Sequence[float]) -> Estimate:
    """The median over starts, and the interval of their mean."""
    return Estimate(statistics.median(values), of_mean(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """The geometric mean of the ratios of each round, with its interval; None where one of them is not above
    0."""
    if not ours or min(*ours, *theirs) <= 0:
        return None
    logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    interval = of_mean(logs)
    low_high = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
    return Estimate(math.exp(statistics.fmean(logs)), low_high)


def medians(cell: Raw, name: str = "added") -> dict[int, float]:
    """The median of each length in one start: of what is added, or of a time that was taken."""
    values: dict[int, list[float]] = {}
    for request in cell["requests"]:
        value = request["ttft_s"] - request["cached_s"] if name == "added" else request[name]
        values.setdefault(request["length"], []).append(value)
    return {length: statistics.median(found) for length, found in sorted(values.items())}


def cells_of(raw: Raw, arm: str) -> dict[int, Raw]:
    """The starts of an arm, by their number."""
    return {cell["start"]: cell for cell in raw["cells"] if cell["arm"] == arm}


def invalid(raw: Raw) -> dict[str, list[str]]:
    """Why an arm says nothing, of each that does not."""
    found: dict[str, list[str]] = {}
    truth = cells_of(raw, "none")
    for cell in raw["cells"]:
        faults = list(cell["faults"])
        right = truth.get(cell["start"])
        if right is not None:
            pairs = zip(cell["requests"], right["requests"], strict=True)
            wrong = sum(one["tokens"] != other["tokens"] for one, other in pairs)
            faults += [f"{wrong} answers with other tokens than without a handover"] if wrong else []
        if faults:
            found.setdefault(cell["arm"], []).extend(f"start {cell['start']}: {fault}" for fault in faults)
    for broken in raw.get("broken", ()):
        found.setdefault(broken["arm"], []).append(f"start {broken['start']} broke off: {broken['why']}")
    return found


def added_cpu(cell: Raw, length: int, side: str) -> float:
    """CPU seconds of one side that the first answer took more than that from the cache, in the mean."""
    took = [
        request["ttft_cpu_s"][side] - request["cached_cpu_s"][side]
        for request in cell["requests"]
        if request["length"] == length
    ]
    return statistics.fmean(took)


def report(raw: Raw) -> str:
    """The tables of all that there is."""
    settings = raw["settings"]
    arms = [arm for arm in settings["arms"] if cells_of(raw, arm)]
    bad = invalid(raw)
    parts = ["no start has ended"]
    if arms:
        tables = _by_length(raw, arms), _by_arm(raw, arms), _ratios(raw, arms, bad)
        parts = [_heads(raw), *map("\n".join, tables)]
    parts += [f"INVALID {arm}: {'; '.join(reasons)}" for arm, reasons in bad.items()]
    unsure = [str(cell["start"]) for cell in raw["cells"] if cell["start"] not in cells_of(raw, "none")]
    if unsure:
        parts.append(
            f"tokens not compared, since `none` has not run: starts {', '.join(sorted(set(unsure)))}"
        )
    return "\n\n".join(parts)


def _heads(raw: Raw) -> str:
    settings, facts = raw["settings"], raw["facts"]
    others = max(cell["busy_cores"]["others"] for cell in raw["cells"])
    threads = settings["nixl_threads"]
    return (
        f"seed {settings['seed']}, transport {settings['transport']}, cores {settings['cores']}, "
        f"{settings['prompts']} prompts of each length a start\n"
        f"vLLM {facts['vllm']}, kvik {facts['kvik']}, "
        f"NIXL {facts['nixl']} with {'its' if threads is None else threads} threads, "
        f"{facts['cpu_model']}, {facts['cores_usable']} cores; other programs used up to {others:.2f} of them"
    )


def _by_length(raw: Raw, arms: Sequence[str]) -> list[str]:
    lines = _table(
        "tokens", "arm", "starts", "added ms", "to first token ms", "from own cache ms",
        "CPU ms more, prefill", "CPU ms more, decode",
    )  # fmt: skip
    for length in raw["settings"]["lengths"]:
        for arm in arms:
            cells = list(cells_of(raw, arm).values())
            times = [
                over_starts([medians(cell, name)[length] for cell in cells]).text(1e3)
                for name in ("added", "ttft_s", "cached_s")
            ]
            cpu = [
                over_starts([added_cpu(cell, length, side) for cell in cells]).text(1e3)
                if side in cells[0]["idle_cores"]
                else "-"
                for side in SIDES
            ]
            lines.append(_row(str(length), arm, str(len(cells)), *times, *cpu))
    return lines


def _by_arm(raw: Raw, arms: Sequence[str]) -> list[str]:
    lines = _table(
        "arm", "idle cores, prefill", "idle cores, decode", "busy cores, prefill", "busy cores, decode",
        "first handover ms", "prefill's answer ms, longest prompts", "threads elsewhere",
    )  # fmt: skip
    longest = max(raw["settings"]["lengths"])
    for arm in arms:
        cells = list(cells_of(raw, arm).values())
        cores = [
            over_starts([cell[when][side] for cell in cells]).text(digits=3)
            if side in cells[0][when]
            else "-"
            for when in ("idle_cores", "busy_cores")
            for side in SIDES
        ]
        first = over_starts([cell["first_s"] for cell in cells]).text(1e3, 1)
        has = "prefill_s" in cells[0]["requests"][0]
        prefill = (
            over_starts([medians(cell, "prefill_s")[longest] for cell in cells]).text(1e3) if has else "-"
        )
        elsewhere = max(sum(cell["elsewhere"].values()) for cell in cells)
        lines.append(_row(arm, *cores, first, prefill, str(elsewhere)))
    return lines


def _ratios(raw: Raw, arms: Sequence[str], bad: Mapping[str, Sequence[str]]) -> list[str]:
    lines = _table("tokens", "kvik to", "rounds", "added", f"goal: at most {GOAL}", "to first token")
    for length in raw["settings"]["lengths"]:
        for rival in RIVALS:
            if "kvik" not in arms or rival not in arms:
                continue
            both = cells_of(raw, "kvik"), cells_of(raw, rival)
            rounds = sorted(both[0].keys() & both[1].keys())
            added, first = (
                ratio(*([medians(cells[number], name)[length] for number in rounds] for cells in both))
                for name in ("added", "ttft_s")
            )
            sound = not {"kvik", rival} & bad.keys()
            shown = [one.text() if one is not None and sound else "none" for one in (added, first)]
            said = judged(added) if added is not None and sound else "not judged"
            lines.append(_row(str(length), rival, str(len(rounds)), shown[0], said, shown[1]))
    return lines


def judged(found: Estimate) -> str:
    """What may be said of the goal."""
    if found.interval is None:
        return "open: too few rounds"
    low, high = found.interval
    return "met" if high <= GOAL else "missed" if low > GOAL else "open: the interval spans it"


def _table(*names: str) -> list[str]:
    return [_row(*names), _row(*["---"] * len(names))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
