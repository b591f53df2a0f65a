"""The lab's ready studies that run on one machine: the commands of each."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvikbuild.paths import ROOT

Python = Callable[[Sequence[object], Path], None]
"""Runs Python with arguments, in a folder."""

IN_A_GUEST = ("loading",)
_LAB = ("-m", "kvik.cli", "lab")
_EXAMPLES = ROOT / "lab" / "kvik_lab" / "study" / "examples"


def _links(python: Python, out: Path) -> None:
    """Two links between emulated engines: planned, run, judged and reported."""
    file = _EXAMPLES / "two-links-here.yaml"
    report = ["--arm", "link", "--size", "tokens", "--unit", "s", "--title", "Two links", "--out", out]
    for words in (
        ["plan", file],
        ["run", file, "--out", out],
        ["table", out / "runs.jsonl", "--metric", "ttft", "--out", out / "ttft.csv"],
        ["report", out / "ttft.csv", *report],
    ):
        python([*_LAB, *words], ROOT)


def _loading(python: Python, out: Path) -> None:
    """A model's file over NFS, by TCP and by soft-RoCE, in a guest."""
    python(["-m", "tests.rdma.storage", "--out", out], ROOT)


def _move(python: Python, out: Path) -> None:
    """A move of hardware, on emulated engines, beside the doctor's prediction."""
    out.mkdir(parents=True)
    table = ["--metric", "output_rate", "--out", "rate.csv"]
    recordings = ["--before", "hardware-move-before.json", "--after", "hardware-move-after.json"]
    report = ["--arm", "move", "--base", "before", "--unit", "tokens/s", "--larger-is-better", "--out", "."]
    for words in (
        ["ready", "hardware-move"],
        ["run", "hardware-move.yaml"],
        ["table", "hardware-move.runs/runs.jsonl", *table],
        ["predicted", "rate.csv", *recordings, "--batch", "8"],
        ["report", "rate.csv", *report, "--title", "A move of hardware"],
    ):
        python([*_LAB, *words], out)


STUDIES: dict[str, Callable[[Python, Path], None]] = {"links": _links, "loading": _loading, "move": _move}
