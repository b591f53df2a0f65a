"""The demo: prompts of several lengths to one engine alone and through the router, side by side.

A row is good when both answers have the same tokens and the decode engine's connector reports that the KV of
the prompt's KV blocks came over. The exit status is 0 only when every row is good.
"""

import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, KV_BYTES_PER_TOKEN, ensure_checkpoint
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec, start_router
from kvik.demo.processes import Fleet, HttpServer, ProcessError, free_ports
from kvik.demo.reports import Load, ReportReader

DEFAULT_LENGTHS = "1,100,128,129,500,1000,2000,3000"
TOKENS = 24
START_LIMIT = 300.0
NEEDED_GIB = 13  # three engines of about 4 GiB, and some room
COLUMNS = (
    "prompt\ntokens",
    "KV\nmoved",
    "TTFT\nalone",
    "TTFT\nhanded over",
    "KV\ntransfer",
    "\nGB/s",
    "\ntransport",
    "output\ntokens",
)
CAPTION = (
    "TTFT: time to the first token. KV transfer: from asking the prefill engine to the last byte in place; "
    "GB/s: while bytes moved. Three engines share this machine, so times say little; equality says all."
)


@dataclass(frozen=True)
class Scene:
    """Everything that runs."""

    alone: HttpServer
    router: HttpServer
    reports: ReportReader


@dataclass(frozen=True)
class Row:
    """One prompt, answered twice."""

    length: int
    alone: client.Completion
    handed: client.Completion
    load: Load | None

    @property
    def expected_bytes(self) -> int:
        """The bytes of the prompt's KV blocks. Of one token nothing has to move: decode computes the last
        one."""
        return 0 if self.length == 1 else -(-self.length // BLOCK_TOKENS) * BLOCK_TOKENS * KV_BYTES_PER_TOKEN

    @property
    def equal(self) -> bool:
        """Whether both answers have the same tokens, all of them."""
        return self.alone.tokens == self.handed.tokens and len(self.handed.tokens) == TOKENS

    @property
    def moved(self) -> bool:
        """Whether the prompt's KV really came from the prefill engine."""
        if self.load is None:
            return self.expected_bytes == 0
        expected = self.expected_bytes or BLOCK_TOKENS * KV_BYTES_PER_TOKEN
        return self.load.outcome == "loaded" and self.load.bytes == expected

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        load = self.load
        verdict = "equal" if self.equal else "[red]DIFFERENT[/red]"
        if not self.moved:
            verdict += (
                f", [red]KV not moved ({load.outcome}: {load.reason})[/red]"
                if load
                else ", [red]no KV moved[/red]"
            )
        measured = ("-", "-", "-", "-")
        if load is not None and load.total_s is not None:
            rate = f"{load.bytes / load.wire_s / 1e9:.2f}" if load.wire_s else "-"
            measured = (
                f"{load.bytes / (1 << 20):.1f} MiB",
                f"{load.total_s * 1e3:.1f} ms",
                rate,
                load.transport or "-",
            )
        size, duration, rate, transport = measured
        first = (f"{self.alone.ttft * 1e3:.0f} ms", f"{self.handed.ttft * 1e3:.0f} ms")
        return (f"{self.length:,}", size, *first, duration, rate, transport, verdict)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lengths", default=DEFAULT_LENGTHS, show_default=True, help="Prompt lengths in tokens.")
@click.option("--transport", default="auto", show_default=True, help="auto, tcp or local.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Folder for the logs; default: a new one under /tmp."
)
def demo(lengths: str, transport: str, logs: Path | None) -> None:
    """Start a prefill engine, a decode engine, an engine alone and a router; show what passes between
    them."""
    console = Console()
    try:
        sizes = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise click.BadParameter(f"{lengths!r} is not a list of numbers", param_hint="--lengths") from None
    _check_machine()
    folder = logs or Path(tempfile.mkdtemp(prefix="kvik-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Fleet() as fleet:
            scene = _start(fleet, transport, folder, console)
            rows = _show(scene, sizes, console)
    except (ProcessError, client.RequestError, OSError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        console.print(f"logs are in {folder}")
        sys.exit(1)
    ways = sorted({f"{row.load.transport} by {row.load.way}" for row in rows if row.load and row.load.way})
    console.print(f"\nKV moved over: {', '.join(ways) or 'nothing'}")
    good = sum(row.equal and row.moved for row in rows)
    console.print(f"{good} of {len(rows)} prompts: the same tokens, and the KV came from the prefill engine.")
    if good < len(rows):
        console.print(f"logs are in {folder}")
    sys.exit(0 if good == len(rows) else 1)


def _check_machine() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException(
            "the demo runs real vLLM servers, and vLLM is not installed here; try `make demo`"
        )
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and int(value.split()[0]) < NEEDED_GIB << 20:
            have = int(value.split()[0]) / (1 << 20)
            raise click.ClickException(
                f"three engines need {NEEDED_GIB} GiB of memory; {have:.1f} GiB are available"
            )


def _start(fleet: Fleet, transport: str, logs: Path, console: Console) -> Scene:
    model = ensure_checkpoint()
    report = logs / "loads.jsonl"
    extra = {"transport": transport}
    specs = [
        EngineSpec("prefill", Connector("kv_producer", extra=extra)),
        EngineSpec("decode", Connector("kv_consumer", report, extra=extra)),
        EngineSpec("alone"),
    ]
    start = time.monotonic()
    with console.status("starting three serving engines (about a minute) ..."):
        *ports, router_port = free_ports(len(specs) + 1)
        engines = [fleet.add(spec.start(model, port, logs)) for spec, port in zip(specs, ports, strict=True)]
        for engine in engines:
            engine.wait_ready(start + START_LIMIT)
        prefill, decode, alone = engines
        router = fleet.add(start_router([prefill.url], [decode.url], router_port, logs))
        router.wait_ready(time.monotonic() + 30)
    console.print(f"prefill {prefill.url}, decode {decode.url}, alone {alone.url}, router {router.url}")
    console.print(f"all up after {time.monotonic() - start:.0f} s; logs in {logs}")
    return Scene(alone, router, ReportReader(report))


def _show(scene: Scene, lengths: list[int], console: Console) -> list[Row]:
    table = Table(
        *COLUMNS, title="KV handed over from the prefill engine to the decode engine", caption=CAPTION
    )
    for column in table.columns[:-2]:
        column.justify = "right"
    rows = []
    with Live(table, console=console, refresh_per_second=4):
        for row in _rows(scene, lengths):
            rows.append(row)
            table.add_row(*row.cells())
    return rows


def _rows(scene: Scene, lengths: list[int]) -> Iterator[Row]:
    rng = random.Random(2024)  # noqa: S311 - prompts, not secrets
    for warm_up in (True, False):
        # The first request of each kind pays for first connections and first-time initialisation: not shown.
        for length in [300] if warm_up else lengths:
            prompt = [rng.randrange(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256) for _ in range(length)]
            alone = client.complete(scene.alone.url, prompt, TOKENS)
            handed = client.complete(scene.router.url, prompt, TOKENS)
            loads = scene.reports.wait(1, timeout=2.0 if length > 1 else 0.5)
            if not warm_up:
                yield Row(length, alone, handed, loads[-1] if loads else None)
