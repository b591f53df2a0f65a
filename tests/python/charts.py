"""The Helm chart, as far as tests look at it: its values, and what helm makes of them."""

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.python.manifests import FOLDER

CHART = FOLDER.parent / "helm" / "kvik"
FILES = {file.name.removesuffix("-values.yaml"): file for file in sorted((CHART / "ci").iterdir())}
"""Files of values by name, each for another use."""
SECONDS = 60.0


def need_helm() -> None:
    """Skip the test where there is no helm."""
    if shutil.which("helm") is None:
        pytest.skip("no helm on the path")


def helm(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run helm, which asks no cluster for any of this."""
    argv = ["helm", *(str(argument) for argument in arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)


@functools.cache
def rendered(name: str = "", *sets: str, release: str = "kvik", tests: bool = False) -> list[dict[str, Any]]:
    """All objects with one of the files of values, or the defaults alone, and `--set` for each of `sets`.

    tests: with what `helm test` would start.
    """
    argv: list[object] = ["template", release, CHART, *(["--values", FILES[name]] if name else [])]
    argv += [word for text in sets for word in ("--set", text)] + ([] if tests else ["--skip-tests"])
    done = helm(*argv)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def refused(*sets: str) -> str:
    """What helm says of values that cannot be."""
    done = helm("template", "kvik", CHART, *(word for text in sets for word in ("--set", text)))
    assert done.returncode != 0, f"{sets} are taken"
    assert not done.stdout
    return done.stderr


def notes(folder: Path, *arguments: object) -> str:
    """What is printed after an installation. helm has a cluster for that; here a copy has it as an object."""
    copy = folder / "kvik"
    shutil.copytree(CHART, copy, dirs_exist_ok=True)
    text = (copy / "templates" / "NOTES.txt").read_text()
    (copy / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + text + "{{ end }}")
    (copy / "templates" / "notes.yaml").write_text('notes: {{ include "notes" . | quote }}\n')
    done = helm("template", "kvik", copy, "--show-only", "templates/notes.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["notes"])


def values() -> dict[str, Any]:
    """The defaults."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def leaves(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its full name. An empty table is a value; so is any list."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def schema_of(path: Sequence[str]) -> dict[str, Any]:
    """What the schema says of a value."""
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    found = schema
    for name in path:
        assert found["additionalProperties"] is False, f"{path}: names that are unknown would be taken"
        found = found["properties"][name]
    return found
