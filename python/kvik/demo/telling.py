"""What the demo says before and after its table."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvik.demo import svg, table, words
from kvik.demo.measure import Row
from kvik.demo.picture import Picture
from kvik.demo.scene import Scene
from kvik.roles.hosts import Rate


@dataclass(frozen=True)
class Hint:
    """A command worth trying next, and what it shows."""

    command: str
    shows: str
    root: bool = False

    @property
    def option(self) -> str:
        """The option that it is about; empty for another command than the demo."""
        return self.command.split()[1] if self.command.startswith("demo ") else ""


HINTS = (
    Hint("demo --link-rate 1gbit", "between two hosts, beside what the link allows", root=True),
    Hint("demo --tp 4:2", "four prefill ranks to two decode ranks"),
    Hint("demo --fault wrong-page:after=3", "spoils KV, and sees it noticed"),
    Hint("demo --svg demo.svg", "the picture above as a file"),
    Hint("bench transfer", "how fast pages move, beside the limits"),
)
SHOWN_HINTS = 3


def introduce(scene: Scene, seconds: float, console: Console) -> None:
    """Who is there, and what is about to be seen."""
    console.print("KV handed over from a prefill engine to a decode engine", style="bold")
    console.print(f"Here: {scene.what}.", markup=False)
    servers = (scene.router, scene.prefill, scene.decode, scene.alone)
    said = ", ".join(f"{server.name} {server.host}:{server.port}" for server in servers)
    console.print(f"Up and warm after {words.duration(seconds)}: {said}.", style="dim", markup=False)
    console.print(
        "\nEach prompt is answered twice: by one engine alone, and handed over by the pair. The outputs must "
        f"be equal, token by token: {scene.proof}.",
        markup=False,
    )


def conclude(scene: Scene, found: Sequence[Row], rate: Rate | None, console: Console) -> None:
    """The legend of the table, and the verdict over all rows."""
    console.print(table.legend(rate), style="dim", markup=False)
    good = sum(row.good for row in found)
    mechanisms = sorted({row.load.mechanism for row in found if row.load})
    over = f" (over {', '.join(mechanisms)})" if mechanisms else ""
    verdict = f"{good} of {len(found)} prompts: the same tokens, and KV from the prefill engine{over}."
    console.print(f"\n{verdict}", style="bold green" if good == len(found) else "bold red", markup=False)
    for row in found:
        if row.complaint:
            console.print(f"  {row.complaint}", style="red", markup=False)
    link = scene.place.link
    if link is not None:
        sent = words.size(link.prefill.sent())
        console.print(f"The cable of {link.rate} carried {sent} from the prefill engine's host.")


def draw(scene: Scene, found: Sequence[Row], console: Console, file: Path | None) -> None:
    """Where the time of the longest prompt went: in the terminal, and as a file if one is wanted."""
    row = max(found, key=lambda row: row.length)
    load = row.load
    moved = f"{words.size(load.bytes)} of KV over {load.over}" if load else "no KV moved"
    what = f"{row.length:,} prompt tokens, {moved}"
    spans = row.spans()
    console.print()
    console.print(Picture(f"Where the time went: {what}", spans, row.alone.ttft))
    if scene.note:
        console.print(scene.note, style="dim", markup=False)
    if file is not None:
        subtitle = f"{what}; first token after {words.duration(row.handed.ttft)}"
        file.write_text(svg.drawing("Where the time of one request went", subtitle, spans, row.alone.ttft))
        console.print(f"\nWritten as a picture: {file}", markup=False, soft_wrap=True)


def hints(used: Sequence[str], console: Console) -> None:
    """What to try next: three commands, about options that were not used just now."""
    able = [hint for hint in HINTS if hint.option not in used and (not hint.root or os.geteuid() == 0)]
    chosen = list(dict.fromkeys([*able[: SHOWN_HINTS - 1], able[-1]]))
    commands = [f"{command_name()} {hint.command}" for hint in chosen]
    width = max(map(len, commands)) + 2
    beside = width + max(len(hint.shows) for hint in chosen) + 2 <= console.width
    console.print("\nTry next:", style="bold")
    for command, hint in zip(commands, chosen, strict=True):
        line = f"  {command:<{width}}{hint.shows}" if beside else f"  {command}\n      {hint.shows}"
        console.print(line, markup=False, soft_wrap=True)


def command_name() -> str:
    """How to call this `kvik` from where we are: by its name if that finds it, else by its path, and as a
    module of this Python where it was installed without commands."""
    own = Path(sys.executable).parent / "kvik"
    found = shutil.which("kvik")
    if found is not None and Path(found).resolve() == own.resolve():
        return "kvik"
    if not own.exists():
        return f"{sys.executable} -m kvik"
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)
