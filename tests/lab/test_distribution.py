"""The lab is a distribution of its own: of kvik's version, and on kvik's public Python interface alone."""

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "lab" / "kvik_lab"


def project(*parts: str) -> dict[str, Any]:
    """The table `project` of a pyproject.toml."""
    return dict(tomllib.loads(ROOT.joinpath(*parts).read_text(encoding="utf-8"))["project"])


def imported() -> Iterator[tuple[str, str, str]]:
    """File, module and name of what the lab imports of kvik."""
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvik":
                yield from ((file.name, str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "kvik"]
                yield from ((file.name, name, "") for name in names)


def modules() -> dict[str, ast.Module]:
    """The modules of the lab by name; a package is its `__init__`."""
    found = {}
    for file in SOURCES.rglob("*.py"):
        parts = file.relative_to(SOURCES.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """What a tree imports: modules, and names of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def named(tree: ast.AST) -> Iterator[str]:
    """What a tree imports, and the modules that it names as texts, as the list of subcommands does."""
    yield from imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def documented() -> Iterator[str]:
    """What the lab's pages import in their examples, which are run."""
    for page in sorted((ROOT / "docs" / "lab").glob("*.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            yield from named(ast.parse(block))


def test_every_module_is_reached_by_the_command_or_a_documented_example() -> None:
    """What neither needs is dead, however well it is tested."""
    trees = modules()
    reached: set[str] = set()
    ahead = ["kvik_lab.cli", *documented()]
    while ahead:
        name = ahead.pop()
        if name in trees and name not in reached:
            reached.add(name)
            ahead += [*named(trees[name]), name.rpartition(".")[0]]
    assert sorted(set(trees) - reached) == []


PACKAGES = {"yaml": "pyyaml", "pydantic_core": "pydantic", "prometheus_client": "prometheus-client"}
# Asked for by name where they are missing: `load` needs one for prompts of a model's own words, and the extra
# `mlflow` brings the other.
OPTIONAL = {"mlflow", "tokenizers"}


def test_it_asks_for_what_it_imports_and_for_nothing_else() -> None:
    """By the names of packages; pydantic's core comes with it."""
    found = {name.partition(".")[0] for tree in modules().values() for name in imports(tree)}
    own = {*sys.stdlib_module_names, SOURCES.name, *OPTIONAL}
    packages = {PACKAGES.get(name, name) for name in found - own}
    asked = project("lab", "pyproject.toml")["dependencies"]
    assert packages == {re.split("[>=]", text)[0] for text in asked}


def test_versions_are_equal() -> None:
    crates = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    version = crates["workspace"]["package"]["version"]
    lab, kvik = project("lab", "pyproject.toml"), project("pyproject.toml")
    assert lab["version"] == version
    assert f"kvik=={version}" in lab["dependencies"]
    assert kvik["optional-dependencies"]["lab"] == [f"kvik-lab=={version}"]
    assert importlib.metadata.version("kvik-lab") == importlib.metadata.version("kvik")


def test_only_what_is_public_is_imported() -> None:
    """No module or name with an underscore, and of a package with an `__all__` only what that has."""
    found = list(imported())
    assert {module for _file, module, _name in found} >= {"kvik", "kvik.cli", "kvik.shapes"}
    private = []
    for file, module, name in found:
        offered = getattr(importlib.import_module(module), "__all__", [name])
        hidden = any(part.startswith("_") for part in (*module.split("."), name))
        if hidden or (name and name not in offered):
            private.append(f"{file}: {module}.{name}")
    assert private == []


def test_kvik_knows_its_lab_by_its_entry_point_alone() -> None:
    package = ROOT / "python" / "kvik"
    knowing = [file for file in package.rglob("*.py") if "kvik_lab" in file.read_text(encoding="utf-8")]
    assert knowing == []
