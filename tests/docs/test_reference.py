"""The reference in the site is whole: every public name, every command, every option."""

import ast
import html
import re
from functools import cache

import click
import pytest
from sphinx.util.inventory import InventoryFile

import kvik
from kvik.cli import main
from tests.docs.pages import ROOT, pages
from tests.docs.test_links import SITE, Html

STUB = ROOT / "python" / "kvik" / "_native.pyi"


@cache
def documented() -> set[str]:
    """Every name that the site's inventory has."""
    with (SITE / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, name: base + name)
    return {name for names in inventory.values() for name in names}


@cache
def page(name: str) -> str:
    """The text of a page of the site."""
    return (SITE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(kvik.__all__) - {"__version__"}))
def test_a_public_name_is_in_the_reference(name: str) -> None:
    """And so is everything public that its class has."""
    assert f"kvik.{name}" in documented()
    thing = getattr(kvik, name)
    if isinstance(thing, type) and not issubclass(thing, Exception):
        members = {member for member in vars(thing) if not member.startswith("_")}
        assert {f"kvik.{name}.{member}" for member in members} <= documented()


def test_signatures_are_those_of_the_stub() -> None:
    """Each parameter of each method, by name, where a reader looks for it."""
    text = page("reference/python.html")
    for node in ast.walk(ast.parse(STUB.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == "Engine":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("__e"):
                    names = [one.arg for one in (*method.args.args[1:], *method.args.kwonlyargs)]
                    assert all(
                        f'<span class="n"><span class="pre">{name}</span></span>' in text for name in names
                    )


def commands(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    """All commands that do something, by their full name."""
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command, info_name=path)
    inner = ((name, command.get_command(context, name)) for name in command.list_commands(context))
    return [found for name, one in inner if one for found in commands(one, f"{path} {name}")]


@pytest.mark.parametrize(("name", "command"), commands(main, "kvik"), ids=lambda value: str(value)[:40])
def test_a_command_is_in_the_reference(name: str, command: click.Command) -> None:
    """With a section of its own, and each of its options."""
    text = html.unescape(page("reference/commands.html"))
    parsed = Html()
    parsed.feed(text)
    assert name.replace(" ", "-") in parsed.ids
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.opts[0] in text


def test_a_report_names_every_transport() -> None:
    """Whoever asks for `"nics"` finds what they are called in a report, and which there are to ask for."""
    source = (ROOT / "crates" / "kvik-transport" / "src" / "transport.rs").read_text(encoding="utf-8")
    names = re.findall(r'TransportId::\w+ => "(\w+)"', source)
    assert {"self", "verbs"} <= set(names)
    text = (ROOT / "python" / "kvik" / "_report.py").read_text(encoding="utf-8")
    said = text.split("    transport: str\n", 1)[1].split("    mechanism: str\n", 1)[0]
    assert [name for name in names if f'`"{name}"`' not in said] == []
    engine = (ROOT / "crates" / "kvik-py" / "src" / "engine.rs").read_text(encoding="utf-8")
    offered = engine.split("/// nics: ", 1)[1].split("/// nic_library: ", 1)[0]
    assert [
        kind for kind in ("verbs", "efa", "libfabric:PROVIDER", "plugin") if f'"{kind}"' not in offered
    ] == []


def test_the_rust_reference_is_in_the_site() -> None:
    """The crates that the page names."""
    for crate in ("kvik_core", "kvik_engine", "kvik_observe", "kvik_proto"):
        assert (SITE / "rust" / crate / "index.html").is_file()


def test_series_of_vllm_have_the_names_that_they_are_read_by() -> None:
    """Prometheus puts `_total` behind the name of a counter, and all but one of these are counters."""
    named = {name for one in pages() for name in re.findall(r"vllm:kvik_[a-z_]+", one.path.read_text())}
    assert "vllm:kvik_grants_expired_total" in named
    assert [name for name in named if not name.endswith(("_", "_total", ":kvik_load_seconds"))] == []
