"""The `kvik` command. Each subcommand lives in its own module and is imported only when it is called."""

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass

import click


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
    "emulator": Entry(
        "kvik.emulator.cli", "emulator", "Serve a model's KV without a model, to try and to test."
    ),
    "lab": Entry("kvik.lab.cli", "lab", "Design experiments, audit tables, draw conclusions that hold."),
    "router": Entry(
        "kvik.router", "router", "Send each request to a prefill engine, then to a decode engine."
    ),
    "selftest": Entry("kvik.selftest.cli", "selftest", "Test kvik on this host's NICs, and write a report."),
    "shapes": Entry("kvik.shapes.cli", "shapes", "Show how many bytes of KV models have."),
    "stat": Entry("kvik.stat.cli", "stat", "Show what the engines on this host are doing."),
    "store": Entry("kvik.store.cli", "store", "Serve a KV-cache that outlives the engines."),
    "trace": Entry("kvik.trace.cli", "trace", "Record which pages an engine moves, and move them again."),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted({*SUBCOMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        entry = SUBCOMMANDS.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        return load(entry)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands from what is known here."""
        write_commands(formatter, SUBCOMMANDS)


def load(entry: Entry) -> click.Command:
    """Import a subcommand."""
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.module}.{entry.attribute} is not a click command")
    return command


def write_commands(formatter: click.HelpFormatter, entries: Mapping[str, Entry]) -> None:
    """List subcommands without importing them."""
    with formatter.section("Commands"):
        formatter.write_dl([(name, entries[name].help) for name in sorted(entries)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("kvik"), prog_name="kvik")
def main() -> None:
    """Move KV-cache between the engines of distributed LLM inference."""


if __name__ == "__main__":
    main()
