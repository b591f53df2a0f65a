"""`kvik lab advise`, `kvik lab fit` and `kvik lab crossover`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.physics import show
from kvik_lab.physics.advise import Advice, Setting, advise
from kvik_lab.physics.crossover import crossover
from kvik_lab.physics.data import Samples, Summary, read_measured
from kvik_lab.physics.fit import fit, rank
from kvik_lab.physics.floors import decode_floor, prefill_floor, transfer_floor
from kvik_lab.physics.hardware import ACCELERATORS, accelerator
from kvik_lab.physics.knee import Knee, find_knee
from kvik_lab.physics.kv import ModelKv
from kvik_lab.physics.links import Link, parse_links
from kvik_lab.physics.models import MODELS, Inputs, Model, batched_queue
from kvik_lab.physics.predict import predict
from kvik_lab.physics.sentences import crossover_sentences
from kvik_lab.physics.units import Rate, format_seconds, parse_bytes, parse_seconds
from kvik_lab.physics.workload import parse_prompts, read_trace

_LEVEL = click.option(
    "--level", type=float, default=0.95, show_default=True, help="Of intervals, from 0.5 to below 1."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def _usage() -> Iterator[None]:
    try:
        yield
    except LabError as error:
        raise click.UsageError(str(error)) from error


def _level(value: float) -> float:
    if not 0.5 <= value < 1:
        raise LabError(f"--level is {value:g}; it is a number from 0.5 to below 1, for example 0.95")
    return value


@click.command("crossover")
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@click.option(
    "--method", type=click.Choice(["auto", "line", "interpolate"]), default="auto", show_default=True
)
@click.option(
    "--range", "within", metavar="LO,HI", help="Sizes of interest, as 1MB,2GB; else what was measured."
)
@_LEVEL
@_JSON
def crossover_command(
    first: str, second: str, method: Any, within: str | None, level: float, as_json: bool
) -> None:
    """Find the size at which two transports take the same time, and how well it is known.

    FIRST and SECOND are CSV files: bytes,seconds[,start] with a line a measurement, or means
    (bytes,mean_seconds[,sd,n]).
    """
    with _usage():
        ends = None
        if within is not None:
            lo, comma, hi = within.partition(",")
            if not comma:
                raise LabError(f"--range is {within!r}; write two sizes, as 1MB,2GB")
            ends = (parse_bytes(lo), parse_bytes(hi))
        names = (Path(first).stem, Path(second).stem)
        if names[0] == names[1]:
            names = (first, second)
        data = (read_measured(first, names[0]), read_measured(second, names[1]))
        found = crossover(*data, method=method, level=_level(level), within=ends)
    sentences = crossover_sentences(found)
    if as_json:
        click.echo(json.dumps({**show.as_json(found), "sentences": list(sentences)}, indent=2))
        return
    out = show.console()
    show.print_lines(out, (*sentences, *(f"Note: {note}." for note in found.notes)))


@click.command("fit")
@click.argument("data", type=click.Path())
@click.option("--model", type=click.Choice([*MODELS, "batched-queue"]), help="Fit only this one.")
@click.option("--queue", type=float, metavar="N", help="Also a penalty beyond a send queue of N blocks.")
@click.option(
    "--predict",
    "wanted",
    metavar="SIZE[/BLOCKS],...",
    help="What-if: times of other sizes, as 2GB or 2GB/512.",
)
@_LEVEL
@_JSON
def fit_command(
    data: str, model: str | None, queue: float | None, wanted: str | None, level: float, as_json: bool
) -> None:
    """Fit models of transfer time to DATA, a CSV file of bytes,seconds[,blocks][,start][,concurrency]."""
    with _usage():
        _level(level)
        samples = read_measured(data)
        chosen = _chosen(model, queue)
        fits = (fit(samples, chosen, level=level),) if chosen else rank(samples, queue)
        if not chosen and level != 0.95:
            fits = tuple(fit(samples, item.model, level=level) for item in fits)
        knees = _knees(samples, level)
        labels, at = _wanted(wanted, samples)
        predictions = predict(samples, fits[0], at, level=level) if at is not None else ()
    if as_json:
        answer = {
            "data": samples.name,
            "measurements": samples.seconds.size,
            "fits": show.as_json(list(fits)),
        }
        answer["knees"] = {label: show.as_json(knee) for label, _unit, knee in knees}
        answer["predictions"] = {
            label: show.as_json(item) | {"extrapolated": item.extrapolated}
            for label, item in zip(labels, predictions, strict=True)
        }
        click.echo(json.dumps(answer, indent=2))
        return
    out = show.console()
    show.fits_table(out, samples.name, fits, level)
    for label, unit, knee in knees:
        show.print_lines(out, show.knee_lines(label, knee, unit))
    show.print_lines(out, show.prediction_lines(labels, predictions))


def _chosen(model: str | None, queue: float | None) -> Model | None:
    if model is None:
        return None
    if model != "batched-queue":
        return MODELS[model]
    if queue is None:
        raise LabError("--model batched-queue needs the depth of the send queue, --queue N")
    return batched_queue(queue)


def _knees(data: Samples | Summary, level: float) -> list[tuple[str, str, Knee]]:
    """One for each block size with three levels or more; else one over sizes."""
    if isinstance(data, Samples) and data.blocks is not None:
        block = np.round(data.size / data.blocks)
        found = []
        for size in np.unique(block):
            here = block == size
            if np.unique(data.blocks[here]).size >= 3:
                knee = find_knee(data.blocks[here], data.seconds[here], level=level)
                found.append((f"Blocks of {size:,.0f} bytes", "blocks", knee))
        return found
    if np.unique(data.size).size < 3:
        return []
    return [(data.name, data.unit, find_knee(data.size, data.seconds, level=level))]


def _wanted(text: str | None, data: Samples | Summary) -> tuple[tuple[str, ...], Inputs | None]:
    if text is None:
        return (), None
    labels = tuple(piece.strip() for piece in text.split(",") if piece.strip())
    if not labels:
        raise LabError("--predict names sizes, as 2GB or 2GB/512")
    has_blocks = isinstance(data, Samples) and data.blocks is not None
    sizes, blocks = [], []
    for label in labels:
        size, slash, count = label.partition("/")
        if has_blocks and not slash:
            raise LabError(f"--predict {label}: these data have blocks; say how many, as {label}/512")
        sizes.append(parse_bytes(size))
        blocks.append(parse_bytes(count) if slash else parse_bytes(size) if data.unit == "tokens" else 1.0)
    return labels, Inputs(np.array(sizes), np.array(blocks), np.ones(len(labels)))


@click.command("advise")
@click.argument("model")
@click.option(
    "--links",
    "links",
    metavar="A,B",
    multiple=True,
    required=True,
    help="CSV files or name=rate@latency, each followed by price=P (an hour) and line=RATE if known.",
)
@click.option(
    "--prompts", metavar="N[:SHARE],...", help="Prompt lengths in tokens, with shares of the requests."
)
@click.option("--trace", type=click.Path(), help="A trace instead of --prompts.")
@click.option(
    "--output", "output_tokens", type=click.FloatRange(min=0), default=0.0, help="Output tokens a request."
)
@click.option("--rps", type=float, help="Requests a second.")
@click.option("--dtype", metavar="TYPE", help="Element type of the KV, instead of the model's own.")
@click.option("--block-tokens", type=click.IntRange(1, 65536), default=16, show_default=True)
@click.option("--tp", type=click.IntRange(1, 1024), default=1, help="Ranks, each with a link of its own.")
@click.option("--pp", type=click.IntRange(1, 1024), default=1, help="Stages, each with a link of its own.")
@click.option("--margin", default="1ms", show_default=True, help="A difference that does not matter.")
@click.option(
    "--gpu", type=click.Choice(list(ACCELERATORS)), help="Also show the floors of prefill and decode."
)
@click.option("--gpu-flops", type=float, help="Own operations a second, instead of the data sheet's.")
@click.option("--gpu-memory-rate", metavar="RATE", help="Own memory rate, instead of the data sheet's.")
@click.option("--gpus", type=click.IntRange(1, 4096), default=1, show_default=True, help="Side by side.")
@_LEVEL
@_JSON
def advise_command(
    model: str,
    links: tuple[str, ...],
    prompts: str | None,
    trace: str | None,
    output_tokens: float,
    rps: float | None,
    dtype: str | None,
    block_tokens: int,
    tp: int,
    pp: int,
    margin: str,
    level: float,
    as_json: bool,
    **gpu: Any,
) -> None:
    """Say which transport to use for MODEL, from which prompt length, how sure that is, at what price.

    MODEL is a preset's name, the path of a config.json or of its folder, or layers=N,kv_heads=N,head_size=N.
    """
    with _usage():
        kv = ModelKv.resolve(model, dtype=dtype)
        if (prompts is None) == (trace is None):
            raise LabError("give --prompts or --trace, one of the two")
        workload = read_trace(trace, rps) if trace else parse_prompts(prompts or "", output_tokens, rps)
        parsed = parse_links(links)
        advice = advise(
            kv,
            parsed,
            workload,
            Setting(block_tokens, tp, pp),
            level=_level(level),
            margin=parse_seconds(margin),
        )
        floors = _floors(kv, advice, parsed, **gpu)
    if as_json:
        click.echo(json.dumps({**show.as_json(advice), "floors": floors}, indent=2))
        return
    out = show.console()
    show.advice_tables(out, advice)
    if floors:
        _print_floors(out, floors)
    show.print_lines(out, (*advice.sentences, *(f"Note: {note}." for note in advice.notes)))


def _floors(
    kv: ModelKv,
    advice: Advice,
    links: tuple[Link, ...],
    gpu: str | None,
    gpu_flops: float | None,
    gpu_memory_rate: str | None,
    gpus: int,
) -> list[dict[str, Any]]:
    """Least times by prompt length: of each link with a known line rate, of prefill, of a decode step."""
    sheet = accelerator(gpu) if gpu else None
    flops = gpu_flops if gpu_flops is not None else sheet.dense_flops if sheet else None
    memory = Rate.parse(gpu_memory_rate) if gpu_memory_rate else sheet.memory if sheet else None
    out = []
    for row in advice.rows:
        found: dict[str, float] = {
            f"transfer by {link.name}": transfer_floor(row.bytes, link.line).seconds
            for link in links
            if link.line is not None
        }
        if flops is not None:
            found["prefill"] = prefill_floor(kv, row.tokens, flops, gpus).seconds
        if memory is not None:
            found["decode step"] = decode_floor(kv, row.tokens, memory, accelerators=gpus).seconds
        if found:
            out.append({"tokens": row.tokens, "seconds": found})
    return out


def _print_floors(out: Any, floors: list[dict[str, Any]]) -> None:
    names = list(floors[0]["seconds"])
    table = show.grid("Floors: no measured time is below", "tokens", *names)
    for row in floors:
        table.add_row(f"{row['tokens']:,}", *(format_seconds(row["seconds"][name]) for name in names))
    out.print(table)
