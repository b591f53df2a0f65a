"""The notes on a remote KV-cache: copies, transports, the server, transfer_out, and three tiers."""

from __future__ import annotations

import numpy as np

from kvik_lab.physics.data import Floats, Samples
from kvik_lab.physics.fit import Fit, fit
from kvik_lab.physics.kv import ModelKv
from kvik_lab.physics.models import MODELS
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.figures import Bars, Curve, Line, Lines
from kvik_lab.report.model import Cell, Claim, Report, Section, Table, Verdict
from tests.lab.redrawn.pieces import Source, curve, limits, numbers, open_claim, points, with_interval
from tests.lab.redrawn.printed import number

TOKENS = 8192
SHAPES = {
    "Qwen2.5-32B-Instruct": (64, 8, 128),
    "Qwen2.5-7B-Instruct": (28, 4, 128),
    "Qwen2.5-3B-Instruct": (36, 2, 128),
    "glm-4-9b-chat-1m": (40, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
}
TIERS = {"computed": 0, "GPU cache": 1, "CPU cache": 7, "remote cache": 3}
LENGTHS = (2, 4, 8, 16, 32, 64, 128)


def redraw() -> Report:
    """The report of the article."""
    source = Source("S4")
    sections = (
        copies(source),
        ratios(source, "zmq", ("tcp", "ipc", "inproc")),
        ratios(source, "server", ("set deferred=False", "set deferred=True", "get", "stream_get")),
        copy_counts(source),
        transfers(source),
        tiers(source),
        Section("claims", "Claims and what they rest on", (), (), (), claims(source)),
        limits(
            "The spread of any number: each is one, of two or three digits; a ratio of 0.02 s is known "
            "to 25 %.",
            "The sweep of hit rates: it is an image without numbers.",
            "What a remote tier costs over a network: client and server share a host, as far as is said.",
            "Whether a larger load changes the order of the tiers: ten prompts run one series.",
        ),
    )
    return Report(f"Redrawn: {source.article.title}", sections)


def kv_bytes(model: str) -> int:
    """Bytes of KV of 8,192 tokens in 16 bits."""
    layers, heads, size = SHAPES[model]
    return TOKENS * ModelKv.resolve(f"layers={layers},kv_heads={heads},head_size={size}").bytes_per_token()


def copies(source: Source) -> Section:
    """Copies as rates, from the models' shapes."""
    table = source["memcpy"]
    models = table.column("Model")
    methods = table.header[1:]
    rows: list[tuple[Cell, ...]] = []
    lines = []
    for method in methods:
        seconds = numbers(table, method)
        values = tuple(kv_bytes(m) / float(s) / 1e9 for m, s in zip(models, seconds, strict=True))
        lines.append(Line(method.removesuffix(" (s)"), tuple(Estimate(v) for v in values)))
    for at, model in enumerate(models):
        rows.append((model, kv_bytes(model) / 1e9, *(line.cells[at] for line in lines)))
    columns = ("model", "KV, GB", *(f"{line.name}, GB/s" for line in lines))
    rates = Table(
        "copy-rates",
        "Rates: KV of 8,192 tokens over time",
        columns,
        tuple(rows),
        "Sizes from layers x KV heads x head size in 16 bits, K and V; the shapes are the models' own.",
    )
    bars = Bars("copy-bars", "Rate of each way to copy", "model", "GB/s", models, tuple(lines))
    return source.section("copies-section", "Copies", ("memcpy",), (), (rates,), (bars,))


def bounds(text: str) -> tuple[float, float]:
    """What may have been rounded to a printed text."""
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return number(text) - half, number(text) + half


def over(top: str, bottom: str) -> Estimate:
    """A ratio with the bounds that rounding leaves; no other error is known."""
    low, high = bounds(top)
    least, most = bounds(bottom)
    return Estimate(number(top) / number(bottom), low / most, high / least)


def base(source: Source) -> tuple[str, ...]:
    """The copies that ratios rest on, with three decimals."""
    return source["memcpy"].column("b2b naive (s)")


def ratios(source: Source, name: str, ways: tuple[str, ...]) -> Section:
    """A table's times over the plain copy."""
    table = source[name]
    lines = tuple(
        Line(way, tuple(over(t, b) for t, b in zip(table.column(way), base(source), strict=True)))
        for way in ways
    )
    title, models = f"{table.title}: over the plain copy", table.column("Model")
    bars = Bars(f"{name}-ratios", title, "model", "ratio", models, lines, 1.0)
    text = (
        "Bars show what rounding leaves open, with the copy of the first table; it is no confidence "
        "interval.",
    )
    return source.section(f"{name}-section", table.title, (name,), text, (), (bars,))


def mean_ratio(source: Source, table: str, way: str) -> Estimate:
    """Geometric mean over the models, with Student's 95 % interval of the five logarithms."""
    found = [over(t, b).value for t, b in zip(source[table].column(way), base(source), strict=True)]
    logs = np.log(np.array(found, dtype=np.float64))
    half = 2.776 * float(logs.std(ddof=1)) / np.sqrt(5)
    centre = float(logs.mean())
    return Estimate(float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half)))


def copy_counts(source: Source) -> Section:
    """How many plain copies each way takes."""
    ways = [("zmq", w) for w in ("tcp", "ipc", "inproc")]
    ways += [("server", w) for w in ("set deferred=False", "set deferred=True", "get", "stream_get")]
    rows = tuple((w, mean_ratio(source, t, w)) for t, w in ways)
    note = "Geometric mean of five models; the interval is of models like these, and covers no error of one."
    table = Table("copies", "Times over the plain copy", ("way", "ratio"), rows, note)
    return Section("copies-counted", "How many copies that makes", (), (table,))


def transfers(source: Source) -> Section:
    """transfer_out beside swap_out."""
    summary: list[tuple[Cell, ...]] = []
    figures: list[Curve] = []
    gains: list[Curve] = []
    for name, cache in (("out-on", "cache on"), ("out-off", "cache off")):
        table = source[name]
        tokens = numbers(table, "num_batched_tokens")
        for mode in ("sync", "async-2"):
            ratio = numbers(table, f"transfer_out-{mode}") / numbers(table, f"swap_out-{mode}")
            summary.append((cache, mode, float(ratio.min()), float(ratio.mean()), float(ratio.max())))
            figures.append(curve(f"{cache}, {mode}", tokens, ratio))
        gain = 100 * (numbers(table, "transfer_out-async-2") / numbers(table, "transfer_out-sync") - 1)
        gains.append(curve(cache, tokens, gain))
    columns = ("gpu_cache", "mode", "least", "mean", "largest")
    table_of = Table(
        "out-summary",
        "transfer_out over swap_out",
        columns,
        tuple(summary),
        "Requests a second; below 1 is slower.",
    )
    figures_of = (
        Lines(
            "out-ratios", "transfer_out over swap_out", "batched tokens", "ratio", tuple(figures), (), True
        ),
        Lines(
            "async-gain",
            "Gain of async-2 over sync, transfer_out",
            "batched tokens",
            "%",
            tuple(gains),
            (),
            True,
        ),
    )
    text = (
        "Whether transfer_out has hardly any overhead is a question of equivalence: how far below 1 "
        "still counts as "
        "equal, and does the interval lie inside. Neither a margin nor repeats are printed. The cells of one "
        "column differ in their batch, so they are no repeats of each other.",
    )
    return source.section(
        "out", "transfer_out beside swap_out", ("out-on", "out-off"), text, (table_of,), figures_of
    )


def rates(source: Source, row: int) -> Floats:
    """Requests a second of a stage, by output length."""
    return np.array([number(text) for text in source["prefill"].rows[row][1:]])


def tier(source: Source, name: str) -> Fit:
    """t = T0 + N s of a tier."""
    seconds = 1 / rates(source, TIERS[name])
    return fit(
        Samples(name, "tokens", np.array(LENGTHS, dtype=np.float64), seconds), MODELS["linear"], score=False
    )


def startup(source: Source, name: str) -> Estimate:
    """Milliseconds before the first output token, with the interval of the fit."""
    one = tier(source, name).parameters[0]
    high = None if one.hi is None else 1e3 * one.hi
    return Estimate(1e3 * one.value, None if one.lo is None else 1e3 * one.lo, high)


def tiers(source: Source) -> Section:
    """Fits of the four tiers, and the gain over computing by output length."""
    fits: list[tuple[Cell, ...]] = []
    curves: list[Curve] = []
    gains: list[Curve] = []
    computed = rates(source, 0)
    dense = np.geomspace(LENGTHS[0], LENGTHS[-1], 30)
    for name, row in TIERS.items():
        found = tier(source, name)
        slope = found.parameters[1]
        ends = (None if v is None else 1e3 * v for v in (slope.lo, slope.hi))
        per_token = Estimate(1e3 * slope.value, *ends)
        fits.append((name, startup(source, name), per_token, 100 * found.scatter))
        curves.append(Curve(name, points(LENGTHS, [Estimate(float(q)) for q in rates(source, row)])))
        start, step = found.values
        curves.append(curve(f"{name}, fit", dense, 1 / (start + step * dense), True))
        if row:
            gains.append(curve(name, LENGTHS, rates(source, row) / computed))
    columns = ("tier", "before the first token, ms", "a token, ms", "scatter, %")
    table = Table(
        "prefill-fits",
        "Time of a request = T0 + N s",
        columns,
        tuple(fits),
        "95 % intervals of the profile likelihood; seven lengths.",
    )
    figures = (
        Lines(
            "prefill-lines",
            "Requests a second by output length, with fits",
            "output tokens",
            "requests/s",
            tuple(curves),
            (),
            True,
            True,
        ),
        Lines("speed-up", "Gain over computing", "output tokens", "times", tuple(gains), (), True, True),
    )
    text = (
        "Stages 1 and 7 compute, 2, 3, 5 and 6 hit the GPU's cache, 8, 9, 11 and 12 the CPU's; before 4 "
        "and 10 the "
        "engine restarts, so they fetch from the remote cache. Drawn are stages 1, 2, 8 and 4.",
        "The longer the output, the more decoding hides the tier: at 128 tokens all three gain less than "
        "twofold.",
    )
    return source.section("tiers", "Three tiers by output length", ("prefill",), text, (table,), figures)


def claims_of_copies(source: Source) -> tuple[Claim, ...]:
    """Claims of how many copies each way costs."""
    few = "five models, each timed once"
    return (
        with_interval(
            "C1",
            "tcp costs about four copies.",
            mean_ratio(source, "zmq", "tcp"),
            "copies",
            ("zmq-ratios", "copies"),
            Verdict.INSUFFICIENT,
            few,
        ),
        with_interval(
            "C2",
            "inproc costs about one copy.",
            mean_ratio(source, "zmq", "inproc"),
            "copies",
            ("zmq-ratios", "copies"),
            Verdict.INSUFFICIENT,
            few,
        ),
        with_interval(
            "C3",
            "stream_get costs two to three copies.",
            mean_ratio(source, "server", "stream_get"),
            "copies",
            ("server-ratios", "copies"),
            Verdict.INSUFFICIENT,
            few,
        ),
        with_interval(
            "C4",
            "get costs 2.2 to 3.2 copies, as its column says.",
            mean_ratio(source, "server", "get"),
            "copies",
            ("server", "server-ratios"),
            Verdict.NOT_SUPPORTED,
            "the column repeats that of set deferred=True",
        ),
    )


def claims_of_overhead() -> tuple[Claim, ...]:
    """Claims of transfer_out and of asynchronous scheduling."""
    return (
        open_claim(
            "O1",
            "transfer_out has hardly any overhead.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("out-summary", "out-ratios"),
            "one run of each cell, and no margin is named",
        ),
        open_claim(
            "O2",
            "Asynchronous scheduling raises throughput.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("async-gain",),
            "each cell is one run",
        ),
    )


def claims_of_tiers(source: Source) -> tuple[Claim, ...]:
    """Claims of the tiers."""
    start = {name: startup(source, name) for name in TIERS}
    apart = (start["GPU cache"].high or np.inf) < (start["CPU cache"].low or 0) and (
        start["CPU cache"].high or np.inf
    ) < (start["remote cache"].low or 0)
    ranked = Verdict.SUPPORTED if apart else Verdict.INSUFFICIENT
    gain = rates(source, 3) / rates(source, 0)
    return (
        with_interval(
            "U1",
            "The GPU's cache is faster than the CPU's, and that than the remote one.",
            start["remote cache"],
            "ms before the first token, remote",
            ("prefill-fits", "prefill-lines"),
            ranked,
            "the intervals of T0 do not meet; of one series" if apart else "the intervals of T0 meet",
        ),
        open_claim(
            "U2",
            "The remote cache is worth having.",
            float(gain[0]),
            "times computing, at 2 tokens",
            ("speed-up",),
            f"{gain[-1]:.2f} times at 128 tokens; one series",
        ),
    )


def claims(source: Source) -> tuple[Claim, ...]:
    """What somebody may act on."""
    return (
        *claims_of_copies(source),
        *claims_of_overhead(),
        *claims_of_tiers(source),
    )
