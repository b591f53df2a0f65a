"""The spans of one request as horizontal bars in a terminal, each where it lies in time."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvik.demo.timeline import Place, Span
from kvik.demo.words import duration

EIGHTHS = " ▏▎▍▌▋▊▉█"
NAME_WIDTH = 22
TIME_WIDTH = 9
LEAST_BAR = 12
STYLES: dict[Place, str] = {
    "router": "magenta",
    "prefill": "blue",
    "kv": "green",
    "decode": "yellow",
    "rest": "bright_black",
}


class Picture:
    """Renders spans to the width of the console; `alone` is the time of one engine, shown to compare."""

    def __init__(self, title: str, spans: Sequence[Span], alone: float) -> None:
        """Keep what is to be drawn; times in seconds."""
        self.title = title
        self.spans = spans
        self.alone = alone
        self.total = sum(span.seconds for span in spans)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(LEAST_BAR, options.max_width - NAME_WIDTH - TIME_WIDTH - 3)
        scale = width / max(self.total, self.alone, 1e-9)
        plain = options.ascii_only
        yield Text(self.title, style="bold")
        for span in self.spans:
            bar = bar_text(span.start * scale, span.seconds * scale, width, plain)
            yield _line(span.name, span.seconds, bar, STYLES[span.place])
        yield Text()
        yield _line("TTFT, handed over", self.total, bar_text(0, self.total * scale, width, plain), "default")
        yield _line("TTFT, alone", self.alone, bar_text(0, self.alone * scale, width, plain), "dim")


def bar_text(start: float, length: float, width: int, plain: bool) -> str:
    """A bar from cell `start` over `length` cells, at most to `width`: full cells, and eighths at its end.

    Its beginning is rounded to a cell. What is shorter than an eighth of a cell is shown as one eighth: it is
    there.
    """
    first = min(int(start + 0.5), width - 1)
    eighths = min(max(1, round((start + length) * 8) - first * 8), (width - first) * 8)
    if plain:
        return " " * first + "#" * max(1, round(eighths / 8))
    full, part = divmod(eighths, 8)
    return " " * first + "█" * full + (EIGHTHS[part] if part else "")


def _line(name: str, seconds: float, bar: str, style: str) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    line.append(f" {name:<{NAME_WIDTH}}")
    line.append(f"{duration(seconds):>{TIME_WIDTH}} ")
    line.append(bar, style=style)
    return line
