"""The options of ``kvik doctor``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvik.doctor.comparing import compare
from kvik.doctor.cost import Traffic
from kvik.doctor.examining import examine
from kvik.doctor.page import page
from kvik.doctor.ranking import findings
from kvik.doctor.saving import save
from kvik.doctor.show import comparison_lines, finding_lines, machine_lines, to_json, unread_lines
from kvik.doctor.tree import RecordingError, Tree, live, load

FOUND = 1
_KINDS = ("kv", "collectives", "load")
_PATH = click.Path(path_type=Path)


def _load(path: Path) -> Tree:
    try:
        return load(path)
    except RecordingError as error:
        raise click.UsageError(str(error)) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


def _compare(paths: tuple[Path, Path], traffic: Traffic, as_json: bool) -> int:
    machines = [examine(_load(path)) for path in paths]
    comparison = compare(machines[0], machines[1], traffic)
    if as_json:
        click.echo(json.dumps(asdict(comparison), indent=1))
    else:
        for line in comparison_lines(comparison):
            click.echo(line)
    return FOUND if findings(machines[1], traffic) else 0


def _examine(given: dict[str, Any], tree: Tree, title: str, traffic: Traffic) -> int:
    machine = examine(tree)
    found = findings(machine, traffic)
    measured = []
    if given["measure"]:
        from kvik.doctor.measure import measure  # It needs numpy, which nothing else here does.

        measured = measure(machine)
    if given["save"] is not None:
        _write(given["save"], json.dumps(save(tree, given["save"].stem), indent=1) + "\n")
    if given["page"] is not None:
        _write(given["page"], page(machine, found, title))
    if given["as_json"]:
        document = {**to_json(machine, found), "measured": [asdict(one) for one in measured]}
        click.echo(json.dumps(document, indent=1))
        return FOUND if found else 0
    for line in machine_lines(machine):
        click.echo(line)
    for one in measured:
        click.echo(
            f"measured  {one.what}: {'none' if one.gbs is None else f'{one.gbs:.1f} GB/s'} ({one.note})"
        )
    click.echo("")
    for line in unread_lines(machine.unread):
        click.echo(line)
    for line in finding_lines(found):
        click.echo(line)
    if not found:
        click.echo("no findings")
    return FOUND if found else 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the machine and the findings as JSON.")
@click.option(
    "--save",
    type=_PATH,
    metavar="FILE",
    help="Record what was read, without serial numbers, MACs, GUIDs, host names and addresses.",
)
@click.option("--compare", type=_PATH, nargs=2, metavar="BEFORE AFTER", help="Compare two recorded machines.")
@click.option("--tree", type=_PATH, metavar="FILE", help="Look at a recorded machine (a file or a folder).")
@click.option("--measure", is_flag=True, help="Measure this machine's memory and loopback too.")
@click.option("--page", type=_PATH, metavar="FILE", help="Write a page with the PCIe tree drawn.")
@click.option(
    "--traffic",
    type=click.Choice(_KINDS),
    multiple=True,
    help="Only findings that matter to this traffic: KV handovers, collectives, loading models.",
)
@click.option(
    "--tp", type=click.IntRange(1, 1024), default=2, show_default=True, help="Tensor parallel hosts."
)
def doctor(**given: Any) -> None:
    """Look at this machine as a transfer does: PCIe links, NICs, NUMA, limits; what is wrong, and its cost.

    The exit status is 0 where nothing is wrong, 1 where something was found, 2 where the command is wrong.
    """
    kinds = given["traffic"] or _KINDS
    traffic = Traffic("kv" in kinds, "collectives" in kinds, "load" in kinds, tp=given["tp"])
    if given["compare"] is not None:
        if given["tree"] or given["save"] or given["page"] or given["measure"]:
            raise click.UsageError("--compare goes without --tree, --save, --page and --measure")
        sys.exit(_compare(given["compare"], traffic, given["as_json"]))
    if given["tree"] is not None and given["measure"]:
        raise click.UsageError("--measure is for this machine, and --tree is another")
    tree, title = live(), "This machine"
    if given["tree"] is not None:
        tree, title = _load(given["tree"]), given["tree"].stem
    sys.exit(_examine(given, tree, title, traffic))
