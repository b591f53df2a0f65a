"""Where the time went: spans that add up, and their pictures."""

import io
import random
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from kvik.demo import svg, words
from kvik.demo.picture import Picture, bar_text
from kvik.demo.timeline import Compute, Evidence, Moving, Span, server_timing, spans

SVG = "{http://www.w3.org/2000/svg}"
NOTHING = Compute(None, None)
WHOLE = Evidence(
    0.100, {"route": 0.001, "prefill": 0.060, "first_token": 0.035, "kv_wait": 0.025},
    Compute(0.002, 0.050), Compute(0.001, 0.006), Moving(0.003, 0.020),
)  # fmt: skip


def by_name(found: list[Span]) -> dict[str, float]:
    """Milliseconds by name."""
    return {span.name: round(span.seconds * 1e3, 6) for span in found}


def test_every_piece_is_in_its_interval() -> None:
    """Each piece once, those that nobody measured as what is left of the interval around them."""
    assert by_name(spans(WHOLE)) == {
        "router: takes it in": 1, "prefill: queue": 2, "prefill: compute": 50, "prefill: answer": 8,
        "decode: schedules it": 2, "KV: grant, first byte": 3, "KV: on the wire": 20,
        "decode: first token": 6, "rest: HTTP, turns": 8,
    }  # fmt: skip


def test_spans_follow_each_other() -> None:
    """One ends where the next begins."""
    found = spans(WHOLE)
    assert found[0].start == 0
    assert [span.end for span in found[:-1]] == [span.start for span in found[1:]]


def test_what_nobody_measured_is_the_rest() -> None:
    """Without a router's timing, counters and a report there is one honest span."""
    assert by_name(spans(Evidence(0.05, {}, NOTHING, NOTHING, None))) == {"rest: HTTP, turns": 50}


def test_without_the_wait_of_decode_the_transfer_is_shown() -> None:
    """An engine that does not say how long it waited; what it did around the transfer is in the rest."""
    phases = {"route": 0.001, "prefill": 0.060, "first_token": 0.035}
    found = by_name(spans(Evidence(0.100, phases, NOTHING, NOTHING, Moving(0.003, 0.020))))
    assert found["KV: on the wire"] == 20
    assert "decode: schedules it" not in found
    assert found["rest: HTTP, turns"] == 16


def test_sums_hold_whatever_the_clocks_say() -> None:
    """Pieces that contradict each other are cut, and never make the sum another than the TTFT."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def some() -> float | None:
        return rng.choice([None, 0.0, rng.uniform(-0.001, 0.2)])

    for _ in range(2000):
        names = ("route", "prefill", "first_token", "kv_wait", "another")
        phases = {name: value for name in names if (value := some()) is not None}
        moving = Moving(some() or 0.0, some() or 0.0) if rng.random() < 0.7 else None
        evidence = Evidence(
            rng.uniform(0, 0.3), phases, Compute(some(), some()), Compute(some(), some()), moving
        )
        found = spans(evidence)
        assert sum(span.seconds for span in found) == pytest.approx(evidence.ttft, abs=1e-12), evidence
        assert all(span.seconds >= 0 for span in found), evidence


def test_server_timing() -> None:
    """Milliseconds become seconds; descriptions and entries without a duration do not disturb."""
    said = 'route;dur=1.5, kv_wait;desc="a wait";dur=250,cache;desc=hit'
    assert server_timing(said) == {"route": 0.0015, "kv_wait": 0.25}
    assert server_timing("") == {}


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_terminal_picture_fits(width: int, encoding: str) -> None:
    """A line each, none wider than the console, and in letters that the console knows."""
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width)
    console.print(Picture("Where the time went", spans(WHOLE), 0.050))
    lines = raw.getvalue().decode(encoding).splitlines()
    assert len(lines) == 1 + 9 + 1 + 2
    assert max(len(line) for line in lines) <= width
    assert len(lines[-2]) == width - 1  # the longest bar uses what there is
    compute, total, alone = (next(line for line in lines if name in line) for name in
                             ("prefill: compute", "TTFT, handed over", "TTFT, alone"))  # fmt: skip
    bar = "#" if encoding == "ascii" else "█"
    assert compute.count(bar) == pytest.approx(total.count(bar) / 2, abs=1)
    assert alone.count(bar) == pytest.approx(total.count(bar) / 2, abs=1)


def test_a_bar_is_never_nothing_and_never_too_long() -> None:
    """What took no time is still there, at its place."""
    assert bar_text(0, 0, 10, plain=False) == "▏"
    assert bar_text(3, 2.5, 10, plain=False) == "   ██▌"
    assert bar_text(3, 2.5, 10, plain=True) == "   ##"
    for start, length in ((9.9, 5), (10, 0), (0, 99)):
        assert len(bar_text(start, length, 10, plain=False)) == 10
        assert len(bar_text(start, length, 10, plain=True)) == 10


def test_the_svg_says_the_same() -> None:
    """Well-formed; a bar for each span where it lies, its name and its time as text, nothing outside."""
    found = spans(WHOLE)
    root = ElementTree.fromstring(svg.drawing("Time <&> more", "of one", found, 0.050))  # noqa: S314 - ours
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "Time <&> more" in texts
    for span in found:
        assert span.name in texts
        assert words.duration(span.seconds) in texts
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") != "back"]
    assert len(bars) == len(found) + 2
    numbers = [(float(bar.get("x", "")), float(bar.get("width", ""))) for bar in bars]
    (left, whole), (_, alone) = numbers[-2:]
    assert alone == pytest.approx(whole / 2, rel=0.01)
    for (x, width), span in zip(numbers, found, strict=False):
        assert x == pytest.approx(left + whole * span.start / 0.1, abs=0.1)
        assert width == pytest.approx(max(svg.LEAST, whole * span.seconds / 0.1), abs=0.1)
    assert max(x + width for x, width in numbers) + svg.ROOM <= svg.WIDTH
    style = next(root.iter(f"{SVG}style")).text or ""
    assert "prefers-color-scheme:dark" in style
    assert "http" not in style


@pytest.mark.parametrize("total", [1e-6, 0.00042, 0.0123, 1.0, 99.0])
def test_the_axis_has_few_round_ticks(total: float) -> None:
    """Whatever the scale, and no tick beyond the bars."""
    root = ElementTree.fromstring(svg.drawing("", "", [Span("a", "kv", 0.0, total)], 0.0))  # noqa: S314
    ticks = [text for text in root.iter(f"{SVG}text") if text.get("class") == "tick"]
    assert 3 <= len(ticks) <= svg.TICKS + 1
    assert max(float(tick.get("x", "")) for tick in ticks) <= svg.WIDTH - svg.PAD - svg.ROOM + 0.1
    labels = [str(tick.text) for tick in ticks]
    assert len(set(labels)) == len(labels)


def test_numbers_have_three_digits() -> None:
    """Also where a unit ends."""
    cases = [0.0, 0.000424, 0.0123, 0.85, 0.9994, 0.9996, 1.25, 12.5, 123]
    assert [words.duration(seconds) for seconds in cases] == [
        "0.00 ms", "0.42 ms", "12.3 ms", "850 ms", "999 ms", "1.00 s", "1.25 s", "12.5 s", "123 s",
    ]  # fmt: skip
    sizes = [0, 512, 512 << 10, 12_582_912 + (1 << 19), 1000 << 20, 5 << 30]
    assert [words.size(nbytes) for nbytes in sizes] == [
        "0 B", "512 B", "512 KiB", "12.5 MiB", "0.98 GiB", "5.00 GiB",
    ]  # fmt: skip
    assert words.gigabytes(10**9, 0.5) == "2.00"
    assert words.gigabytes(10**9, 0.0) == "-"
