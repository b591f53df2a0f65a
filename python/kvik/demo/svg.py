"""The spans of one request as an SVG file: the picture of the terminal, to be kept or sent.

One file without anything outside it; the colours follow the reader's light or dark setting, and every bar has
its name and its time in text, so that nothing hangs on telling colours apart.
"""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvik.demo.timeline import Place, Span
from kvik.demo.words import duration

WIDTH = 760
PAD = 20
TOP = 72  # of the first bar
STEP = 26  # from bar to bar
BAR = 16
LEFT = 190  # where time begins
ROOM = 76  # for the text after the longest bar
LEAST = 2.0  # of a bar: it is there
GAP = 10  # between the spans and their sum
TICKS = 6
# Light and dark; the colours of the spans have a contrast of 3:1 or more to the background.
LIGHT: dict[str, str] = {
    "back": "#ffffff", "frame": "#d0d7de", "text": "#1f2328", "soft": "#57606a", "grid": "#d8dee4",
    "router": "#8250df", "prefill": "#0969da", "kv": "#1a7f37", "decode": "#bc4c00", "rest": "#818b98",
    "total": "#424a53", "alone": "#afb8c1",
}  # fmt: skip
DARK: dict[str, str] = {
    "back": "#0d1117", "frame": "#3d444d", "text": "#f0f6fc", "soft": "#9da7b3", "grid": "#2a313c",
    "router": "#ab7df8", "prefill": "#4493f8", "kv": "#3fb950", "decode": "#f0883e", "rest": "#7d8590",
    "total": "#c9d1d9", "alone": "#545d68",
}  # fmt: skip
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def drawing(title: str, subtitle: str, spans: Sequence[Span], alone: float) -> str:
    """The text of an SVG document; `alone` is the time of one engine, in seconds, shown to compare."""
    total = sum(span.seconds for span in spans)
    longest = max(total, alone, 1e-9)
    scale = (WIDTH - LEFT - PAD - ROOM) / longest
    sums = TOP + STEP * len(spans) + GAP
    bottom = sums + STEP * 2 + 4
    height = bottom + 42
    described = "; ".join(f"{span.name}: {duration(span.seconds)}" for span in spans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title what">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="what">{escape(f"{described}; in all {duration(total)}; alone {duration(alone)}")}</desc>',
        f"<style>{_style()}</style>",
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="{PAD}" y="32">{escape(title)}</text>',
        f'<text class="soft" x="{PAD}" y="52">{escape(subtitle)}</text>',
    ]
    parts += _axis(longest, scale, bottom)
    for row, span in enumerate(spans):
        parts += _bar(TOP + row * STEP, span.name, span.place, span.start * scale, span.seconds, scale)
    parts += _bar(sums, "TTFT, handed over", "total", 0.0, total, scale)
    parts += _bar(sums + STEP, "TTFT, alone", "alone", 0.0, alone, scale)
    return "\n".join([*parts, "</svg>", ""])


def _bar(y: int, name: str, kind: str, start: float, seconds: float, scale: float) -> list[str]:
    x = LEFT + start
    length = max(LEAST, seconds * scale)
    text = y + BAR - 4
    return [
        f'<text class="name" x="{PAD}" y="{text}">{escape(name)}</text>',
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>',
        f'<text class="time" x="{x + length + 6:.1f}" y="{text}">{duration(seconds)}</text>',
    ]


def _axis(longest: float, scale: float, bottom: float) -> list[str]:
    step = _round_step(longest / TICKS)
    parts = []
    for count in range(int(longest / step + 1e-9) + 1):
        x = LEFT + count * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>')
        label = f"{count * step * 1e3:g}" + (" ms" if count == 0 else "")
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}">{label}</text>')
    return parts


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _style() -> str:
    rules = [
        f"text{{font-family:{FONT};font-size:13px}}",
        ".title{font-size:16px;font-weight:600}",
        ".tick{font-size:11px;text-anchor:middle}",
        _colours(LIGHT),
        f"@media (prefers-color-scheme:dark){{{_colours(DARK)}}}",
    ]
    return "".join(rules)


def _colours(theme: dict[str, str]) -> str:
    places: tuple[Place, ...] = ("router", "prefill", "kv", "decode", "rest")
    bars = "".join(f".{kind}{{fill:{theme[kind]}}}" for kind in (*places, "total", "alone"))
    return (
        f".back{{fill:{theme['back']};stroke:{theme['frame']}}}"
        f".title,.name{{fill:{theme['text']}}}.soft,.time,.tick{{fill:{theme['soft']}}}"
        f".grid{{stroke:{theme['grid']}}}{bars}"
    )
