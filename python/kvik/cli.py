"""The `kvik` command. Each subcommand lives in its own module and is imported only when it is called.

Other distributions bring further subcommands by entry points of the group `kvik.commands`, each a click
command; so does kvik's own lab.
"""

import errno
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

import click

GROUP = "kvik.commands"


@dataclass(frozen=True)
class Entry:
    """Where a subcommand lives, and the line that `kvik --help` shows for it without importing it."""

    module: str
    attribute: str
    help: str


SUBCOMMANDS = {
    "bench": Entry("kvik.bench.cli", "bench", "Measure transfers between two engines."),
    "config": Entry("kvik.config.cli", "config", "Show each option, its value, and where it comes from."),
    "demo": Entry("kvik.demo.show", "demo", "Hand KV over between engines on this machine, and show it."),
    "doctor": Entry(
        "kvik.doctor.cli", "doctor", "Look at this machine as a transfer does, and say what is wrong."
    ),
    "emulator": Entry(
        "kvik.emulator.cli", "emulator", "Serve a model's KV without a model, to try and to test."
    ),
    "router": Entry(
        "kvik.router", "router", "Send each request to a prefill engine, then to a decode engine."
    ),
    "selftest": Entry("kvik.selftest.cli", "selftest", "Test kvik on this host's NICs, and write a report."),
    "shapes": Entry("kvik.shapes.cli", "shapes", "Show how many bytes of KV models have."),
    "stat": Entry("kvik.stat.cli", "stat", "Show what the engines on this host are doing."),
    "store": Entry("kvik.store.cli", "store", "Serve a KV-cache that outlives the engines."),
    "trace": Entry("kvik.trace.cli", "trace", "Record which pages an engine moves, and move them again."),
}

# Subcommands that kvik's own distributions of these names bring, and the extra that asks for each.
EXTRAS = {"lab": ("kvik-lab", "lab")}


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports one when it is called."""

    def __init__(self, *args: Any, entries: Mapping[str, Entry], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.entries = entries

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted(self.entries)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        entry = self.entries.get(cmd_name)
        return None if entry is None else load(entry)

    def lines(self) -> dict[str, str]:
        """What is said of each subcommand."""
        return {name: entry.help for name, entry in self.entries.items()}

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands from what is known of them without an import."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self.lines().items()))


INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell: 128 and the signal's number."""


class PluggedGroup(LazyGroup):
    """Has the subcommands of other distributions too; its own come first."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. What does not end by itself at Ctrl-C ends with the status of that."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            say_nothing_more()  # where it is standard output that is full
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted({*super().list_commands(ctx), *EXTRAS, *entry_points(group=GROUP).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; one that an extra would bring says how to install that."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for plugged in entry_points(group=GROUP, name=cmd_name):
            return load_plugged(plugged)
        return missing(cmd_name) if cmd_name in EXTRAS else None

    def lines(self) -> dict[str, str]:
        """Of another distribution's subcommand, what that says of itself."""
        said = {name: f"(Not installed: {_remedy(name)})" for name in EXTRAS}
        for plugged in entry_points(group=GROUP):
            about = plugged.dist.metadata.get_all("Summary") if plugged.dist else None
            said[plugged.name] = about[0] if about else plugged.value
        return said | super().lines()


def say_nothing_more() -> None:
    """Standard output takes nothing any more: its reader has left, or its disk is full. What is still to come
    goes nowhere, as Python's documentation of SIGPIPE has it; else the flush at the end would fail again.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def load(entry: Entry) -> click.Command:
    """Import a subcommand."""
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.module}.{entry.attribute} is not a click command")
    return command


def load_plugged(plugged: EntryPoint) -> click.Command:
    """Import a subcommand of another distribution."""
    known = f"`kvik {plugged.name}` of {plugged.dist.name} {plugged.dist.version}" if plugged.dist else ""
    if plugged.name in EXTRAS and plugged.dist and plugged.dist.version != version("kvik"):
        raise click.ClickException(
            f"{known} belongs to kvik {plugged.dist.version}, and this is {version('kvik')}: "
            f"{_remedy(plugged.name)}"
        )
    try:
        command = plugged.load()
    except (ImportError, AttributeError) as error:
        raise click.ClickException(f"{known or plugged.value} cannot be imported: {error}") from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{plugged.value} is not a click command")
    return command


def missing(name: str) -> click.Command:
    """A subcommand that is not installed: whatever its arguments are, it says how to install it."""

    def say() -> None:
        raise click.ClickException(
            f"`kvik {name}` is a distribution of its own, {EXTRAS[name][0]}, which is not installed: "
            f"{_remedy(name)}"
        )

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=say, context_settings=anything, add_help_option=False)


def _remedy(name: str) -> str:
    return f"pip install 'kvik[{EXTRAS[name][1]}]=={version('kvik')}'"


@click.group(cls=PluggedGroup, entries=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvik", prog_name="kvik")
def main() -> None:
    """Move KV-cache between the engines of distributed LLM inference."""


if __name__ == "__main__":
    main()
