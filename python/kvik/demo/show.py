"""`kvik demo`: prompts of several lengths to one engine alone and through the router, side by side.

The exit status is 0 only when every row is good (see `kvik.demo.measure`), 1 when one is not or the demo
failed, and 130 when it was interrupted (128 and the number of the signal). Whatever way it ends, everything
that it started is gone then.
"""

import contextlib
import http.client
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.live import Live

from kvik.bench.writing import writable
from kvik.config import variables
from kvik.demo import client, emulator_scene, restart, table, telling, vllm_scene, words
from kvik.demo.measure import Row, rows, warm_up
from kvik.demo.scene import Cast, KvFacts, Ranks, Scene, SettingError, Settings, place_for
from kvik.roles.hosts import CannotError, Rate
from kvik.roles.processes import Fleet, ProcessError

ENGINES: dict[str, Cast] = {"emulator": emulator_scene, "vllm": vllm_scene}
LONGEST_SHOW = 90.0  # seconds that all prompts together may take by the rate of their link alone
LONGEST_LOAD = 20.0  # and one of them: a load has a deadline of 30 s


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    default="emulator",
    show_default=True,
    help="Emulated engines (seconds, no model), or real vLLM on CPU (minutes, 13 GiB of memory).",
)
@click.option(
    "--model-shape",
    metavar="SHAPE",
    default="",
    help=f"Whose KV the emulators have: a model's name or its config.json. Default: {emulator_scene.SHAPE}.",
)
@click.option(
    "--tp",
    metavar="N[:M]",
    default="1",
    show_default=True,
    help="Tensor-parallel ranks; 4:2 is four for prefill and two for decode.",
)
@click.option("--lengths", metavar="N,N,...", default="", help="Prompt lengths in tokens.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "tcp", "local"]),
    default="auto",
    show_default=True,
    help="How KV moves; auto takes the best that works here.",
)
@click.option(
    "--link-rate",
    metavar="RATE",
    help="Put the prefill engine on a host of its own (a network namespace), behind a cable of this rate, "
    "such as 10gbit. Takes root and iproute2.",
)
@click.option(
    "--fault", metavar="SPEC", help="Spoil something in the emulated prefill engine, and see it noticed."
)
@click.option(
    "--svg",
    "picture",
    metavar="FILE",
    callback=writable,
    help="Write the picture of where the time went as an SVG file, too.",
)
@click.option(
    "--logs", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False),
    help="Keep the logs here. Default: they are kept only when something went wrong.",
)  # fmt: skip
def demo(
    engine: str, model_shape: str, tp: str, lengths: str, transport: str, link_rate: str | None,
    fault: str | None, picture: str | None, logs: Path | None,
) -> None:  # fmt: skip
    """Hand KV over from a prefill engine to a decode engine on this machine, and show what passes.

    Starts both, a router before them, and one engine alone; asks each prompt twice; compares the answers;
    and stops everything again.
    """
    try:
        rate = None if link_rate is None else Rate.parse(link_rate)
        chosen = _lengths(lengths) or ENGINES[engine].LENGTHS
        settings = Settings(chosen, model_shape, Ranks.parse(tp), transport, fault)
        ENGINES[engine].check(settings)
        if rate is not None:
            _check_link(rate, settings, ENGINES[engine].facts(settings))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(_with_logs(ENGINES[engine], settings, rate, Path(picture) if picture else None, logs))


class _Signalled(BaseException):
    """SIGINT or SIGTERM came."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def _hearing_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise within the block, once: what they end is being stopped, which is bounded."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _Signalled(number)

    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _lengths(text: str) -> tuple[int, ...]:
    """Prompt lengths; empty for an empty text. `SettingError` for what is not a list of them."""
    if not text:
        return ()
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise SettingError(f"--lengths: {text!r} is not a list of numbers from 1, such as 100,1000")
    return lengths


def _check_link(rate: Rate, settings: Settings, kv: KvFacts) -> None:
    """`SettingError` for what a link of this rate cannot show in bearable time."""
    if settings.transport == "local":
        raise SettingError("--transport local stays on one host, and --link-rate makes two")
    sizes = [kv.bytes_of(length) for length in settings.lengths]
    each, total = rate.seconds(max(sizes)), rate.seconds(sum(sizes) + max(sizes))  # one goes before, unseen
    if each > LONGEST_LOAD or total > LONGEST_SHOW:
        raise SettingError(
            f"at {rate} the KV of these prompts takes {words.duration(total)}, the longest alone "
            f"{words.duration(each)}; choose shorter --lengths, a smaller --model-shape or a higher rate"
        )


def _with_logs(
    cast: Cast, settings: Settings, rate: Rate | None, picture: Path | None, logs: Path | None
) -> int:
    """Run with a folder for logs, which stays only where it is wanted; returns the exit status."""
    console = Console(highlight=False)
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.UsageError(f"--logs {logs}: {error.strerror}") from error
    folder = logs or Path(tempfile.mkdtemp(prefix="kvik-demo-"))
    status, failed = 0, False
    try:
        with _hearing_signals(), variables.left_out():
            failed = not _run(cast, settings, rate, picture, folder, console)
        status = 1 if failed else 0
    except CannotError as error:
        raise click.ClickException(f"--link-rate cannot be had here: {error}") from error
    except _Signalled as signalled:
        # The signal may have come within a print: that console can believe for ever that it is in the midst
        # of one, and keep what it is given. A new one does not. A live table has hidden the cursor.
        console = Console(highlight=False)
        console.show_cursor()
        console.print("\nInterrupted; everything that was started is stopped.")
        status = 128 + signalled.number  # as a shell says it of a command that a signal ended
    finally:
        if logs is None and not failed:
            shutil.rmtree(folder, ignore_errors=True)
    if logs is not None or failed:
        console.print(f"Logs are in {folder}", markup=False, soft_wrap=True)
    return status


def _run(
    cast: Cast, settings: Settings, rate: Rate | None, picture: Path | None, folder: Path, console: Console
) -> bool:  # fmt: skip
    """Start, show, stop; whether all was good. Raises `CannotError`."""
    try:
        with place_for(rate) as place, Fleet() as fleet:
            start = time.monotonic()
            with console.status(f"{cast.STARTING} ..."):
                scene = cast.start(settings, place, fleet, folder)
                if settings.fault is None:  # which shall be counted in prompts that are seen
                    with place.near():
                        warm_up(scene, max(settings.lengths))
            telling.introduce(scene, time.monotonic() - start, console)
            with place.near():
                found = _show(scene, settings.lengths, rate, console)
            telling.conclude(scene, found, rate, console)
            telling.draw(scene, found, console, picture)
            restarted = _second_act(cast, scene, settings, fleet, folder, console)
    except (ProcessError, client.RequestError, OSError, http.client.HTTPException) as error:
        console.print(f"The demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return False
    telling.hints(_options_used(), console)
    return restarted and all(row.good for row in found)


def _second_act(
    cast: Cast, scene: Scene, settings: Settings, fleet: Fleet, folder: Path, console: Console
) -> bool:
    """An engine is started again, and its prefix comes from a store; whether that was good."""
    with scene.place.near(), console.status("starting a store, and an engine twice ..."):
        act = cast.store_act(scene, settings, fleet, folder)
        if act is None:
            return True
        found = restart.run(act, scene.kv, scene.model)
    restart.tell(found, act.where, console)
    return found.good


def _options_used() -> list[str]:
    """The options of the command line, as they are called there."""
    context = click.get_current_context()
    given = click.core.ParameterSource.COMMANDLINE
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is given
    ]


def _show(scene: Scene, lengths: tuple[int, ...], rate: Rate | None, console: Console) -> list[Row]:
    """The table, row by row where somebody watches, and as a whole where the output goes to a file."""
    shown = table.empty(rate)
    found = []
    live = Live(shown, console=console, refresh_per_second=4) if console.is_terminal else None
    try:
        with live or contextlib.nullcontext():
            for row in rows(scene, lengths):
                found.append(row)
                shown.add_row(*table.cells(row, rate))
    finally:
        if live is None:
            console.print(shown)
    return found
