"""The lab is a distribution of its own: of kvik's version, and on kvik's public Python interface alone."""

import ast
import importlib
import importlib.metadata
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
