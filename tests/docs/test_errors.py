"""Every public error has its catalogue entry, and no entry is without an error."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvik
from kvik import _native
from tests.docs.pages import ROOT, page

ENGINE = "docs/errors.md"  # the first page of the catalogue
CATALOGUE = (ENGINE, "docs/errors/vllm.md", "docs/errors/router.md", "docs/errors/tools.md")
LONGEST = 600  # lines of a page
PARTS = ("Why", "Do", "See it")
# Headings that order the pages.
ORDER = (
    "Error catalogue", "What was asked for", "Tickets", "Grants", "Peers and connections", "Time", "Data",
    "Regions and engines", "The store", "Errors of the vLLM connector", "A server that does not start",
    "A prompt that is recomputed", "A load that failed", "A request that is not kept", "Errors of the router",
    "Wrong requests", "The router's limits and engines", "A router that does not start",
    "Errors of the tools", "Exit statuses of kvik", "What they raise",
)  # fmt: skip


def entries() -> dict[str, str]:
    """Name of each entry and its text."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in CATALOGUE)
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    names = (name.replace("`", "") for name in parts[1::2])
    return {name: body for name, body in zip(names, parts[2::2], strict=True) if name not in ORDER}


def engine_errors() -> dict[str, type[kvik.KvikError]]:
    """The exceptions of the native module, which makes one for each of Rust's codes."""
    named = vars(_native).items()
    return {name: kind for name, kind in named if isinstance(kind, type) and issubclass(kind, kvik.KvikError)}


def python_errors() -> set[str]:
    """Exceptions that Python code of kvik and its lab defines for others to see."""
    found = {}
    packages = (ROOT / "python" / "kvik", ROOT / "lab" / "kvik_lab")
    for file in (file for package in packages for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    roots = {"Exception", "ValueError", "ImportError", "RuntimeError", "OSError", "ClickException"}
    roots |= set(engine_errors())
    errors: set[str] = set()
    while more := {name for name, bases in found.items() if roots & set(bases)} - errors:
        errors |= more
        roots |= more
    return errors


def refusals() -> Iterator[str]:
    """The codes with which the handover refuses an offer."""
    for file in (ROOT / "python" / "kvik" / "handover").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "RefusedError":
                code = node.args[0]
                assert isinstance(code, ast.Constant), f"{file.name}:{node.lineno}: a code is a literal"
                yield str(code.value)


def router_codes() -> set[str]:
    """The codes of the router's own answers, from the files that make them."""
    sources = ROOT / "crates" / "kvik-router" / "src"
    files = [sources / name for name in ("body.rs", "reply.rs", "service.rs")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    direct = re.findall(r'\bcode: "([a-z_]+)"', text)
    failed = re.findall(r'\(StatusCode::\w+, "([a-z_]+)"\)', text)
    refused = re.findall(r'Reply::refused\(\s*StatusCode::\w+,\s*"([a-z_]+)"', text)
    assert all((direct, failed, refused)), "the router's sources say their codes in another way now"
    everywhere = "".join(file.read_text(encoding="utf-8") for file in sources.glob("*.rs"))
    assert everywhere.count("Reply::refused(") == len(refused)
    return {*direct, *failed, *refused}


# `KvikError` is what all of the engine's are, `RefusedError` carries the refusals, which have entries, and
# `PartError` becomes a line of an `InvalidArgument`.
NO_ENTRY = {"KvikError", "PartError", "RefusedError"}


def test_every_public_error_has_its_catalogue_entry() -> None:
    """And no entry is without an error."""
    known = {*engine_errors(), *python_errors(), *refusals(), *router_codes()} - NO_ENTRY
    found = set(entries())
    assert known - found == set(), "errors without an entry in the catalogue"
    assert found - known == set(), "entries of the catalogue without an error"


@pytest.mark.parametrize("name", sorted(entries()))
def test_an_entry_says_why_what_to_do_and_how_to_see_it(name: str) -> None:
    """Each in a line of its own."""
    for part in PARTS:
        assert re.search(rf"^- \*\*{part}:\*\* \S", entries()[name], re.MULTILINE), f"{name}: no {part}"


@pytest.mark.parametrize("name", sorted(set(engine_errors()) - {"KvikError"}))
def test_an_entry_of_the_engine_begins_with_code_and_meaning(name: str) -> None:
    """The same sentence that Rust's `Code::about` and Python's docstring have."""
    error = engine_errors()[name]
    assert entries()[name].strip().startswith(f"`{error.code}`: {error.__doc__}\n")


def test_the_public_list_of_exceptions_is_complete() -> None:
    """`kvik.errors` and `kvik` export what the native module makes."""
    assert set(kvik.errors.__all__) == set(engine_errors())
    assert set(engine_errors()) <= set(kvik.__all__)


def test_headings_of_the_catalogue_are_unique() -> None:
    """Over all its pages: who looks for a name finds one entry."""
    headings = [text for name in CATALOGUE for _, text in page(name).headings]
    assert len(headings) == len(set(headings))


def test_the_catalogue_is_whole() -> None:
    """Each of its pages is one that the tests read and that the first page names, and none is too long."""
    assert {name.name for name in (ROOT / "docs" / "errors").iterdir()} == {
        Path(name).name for name in CATALOGUE if name != ENGINE
    }
    named = {link.target.partition("#")[0] for link in page(ENGINE).links}
    assert {name.removeprefix("docs/") for name in CATALOGUE if name != ENGINE} <= named
    for name in CATALOGUE:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= LONGEST, name
