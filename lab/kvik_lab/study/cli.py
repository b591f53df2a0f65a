"""``kvik lab check`` and ``kvik lab schema``: whether a study file is sound, and what one may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik_lab.errors import LabError
from kvik_lab.study.evaluate import shown
from kvik_lab.study.load import load_study
from kvik_lab.study.model import Study
from kvik_lab.study.problems import StudyError
from kvik_lab.study.schema import StudyFile

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TABLE_WIDTH = 110  # narrower terminals wrap lines and lose no digit


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(study: Path, as_json: bool) -> None:
    """Check a study file: print every mistake with its line, or what the study comes to.

    Exits 2 when the file has mistakes.
    """
    try:
        loaded = load_study(study)
        summary = summarise(loaded)
    except StudyError as error:
        if not as_json:
            raise click.UsageError(_report(error)) from error
        problems = [vars(problem) for problem in error.problems]
        click.echo(json.dumps({"file": error.file, "problems": problems}, indent=2))
        raise click.exceptions.Exit(2) from error
    except LabError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        _print(loaded, summary)


@click.command()
def schema() -> None:
    """Print the JSON schema of study files, for editors."""
    click.echo(schema_text(), nl=False)


def schema_text() -> str:
    """The JSON schema of study files (draft 2020-12)."""
    content = StudyFile.model_json_schema(by_alias=True)
    return json.dumps({"$schema": SCHEMA_DIALECT, **content}, indent=2) + "\n"


def _report(error: StudyError) -> str:
    count = len(error.problems)
    return f"{count} mistake{'' if count == 1 else 's'}\n{error}"


def summarise(study: Study) -> dict[str, Any]:
    """What a study comes to: each number beside the formula that it is from. Raises `LabError`."""
    sizes = [len(factor.levels) for factor in study.factors]
    combinations = len(study.combinations())
    excluded = study.excluded()
    feasible = combinations - sum(excluded.values())
    patterns = study.design.patterns
    return {
        "study": study.name,
        "digest": study.digest,
        "models": {
            name: {
                "token_bytes": model.shape.kv_bytes_per_token(),
                "formula": _token_formula(model.shape),
                "weights_bytes": model.weights_bytes,
            }
            for name, model in study.unit.models.items()
        },
        "factors": [_factor_row(study, factor.name) for factor in study.factors],
        "product": {"formula": " x ".join(map(str, sizes)), "value": study.product()},
        "combinations": combinations,
        "excluded": excluded,
        "feasible": {
            "formula": " - ".join(f"{value:,}" for value in (combinations, *excluded.values())),
            "value": feasible,
        },
        "patterns": len(patterns),
        "duplicates": {one.id: one.duplicate_of for one in patterns if one.duplicate_of},
        "infeasible_patterns": {
            one.id: [str(found) for found in broken]
            for one in patterns
            if (broken := study.violations(one.levels))
        },
        "layers": [
            {
                "name": layer.name,
                "priority": layer.priority,
                "patterns": sum(one.layer == layer.name for one in patterns),
                "minutes": layer.minutes,
            }
            for layer in study.design.layers
        ],
    }


def _token_formula(shape: Any) -> str:
    heads = "1 latent" if shape.attention == "mla" else f"{shape.kv_heads} KV heads"
    return f"{shape.layers} layers x {heads} x {shape.content} elements x {shape.element_bytes} bytes"


def _factor_row(study: Study, name: str) -> dict[str, Any]:
    factor = study.factor(name)
    return {
        "name": name,
        "levels": list(factor.levels),
        "scale": factor.scale.value,
        "within": dict(factor.within),
        "restart": factor.hard,
        "price_per_hour": {str(level): price for level, price in factor.price_per_hour.items()},
    }


def _print(study: Study, summary: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    grid = Table(title=f"{study.name}: no mistakes", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("factor", "levels", "scale", "restart", "exists within"):
        grid.add_column(heading)
    for row in summary["factors"]:
        within = ", ".join(f"{name} = {shown(level)}" for name, level in row["within"].items())
        levels = ", ".join(shown(level) for level in row["levels"])
        restart = "yes" if row["restart"] else ""
        grid.add_row(escape(row["name"]), escape(levels), row["scale"], restart, escape(within))
    console.print(grid)
    for line in _lines(summary):
        console.print(line, markup=False)


def _lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for name, model in summary["models"].items():
        lines.append(f"{name}: {model['token_bytes']:,} bytes of KV a token = {model['formula']}")
    product, feasible = summary["product"], summary["feasible"]
    lines.append(f"product of levels: {product['value']:,} = {product['formula']}")
    if summary["combinations"] != product["value"]:
        lines.append(f"combinations: {summary['combinations']:,}, as nested factors exist in some only")
    lines.append(f"feasible combinations: {feasible['value']:,} = {feasible['formula']}")
    lines += [f"  {count:,} excluded by {text}" for text, count in summary["excluded"].items()]
    if not feasible["value"]:
        lines.append("nothing can be run: every combination violates a constraint")
    if summary["patterns"]:
        lines += _pattern_lines(summary)
    return lines


def _pattern_lines(summary: dict[str, Any]) -> list[str]:
    layers, total = summary["layers"], summary["patterns"]
    lines = [f"patterns: {total} = {' + '.join(str(layer['patterns']) for layer in layers)}"]
    if all(layer["minutes"] for layer in layers):
        minutes = sum(layer["minutes"] for layer in layers)
        parts = " + ".join(f"{layer['minutes']:g}" for layer in layers)
        lines.append(f"hours as planned: {minutes / 60:g} = ({parts}) / 60")
    product = summary["product"]["value"]
    lines.append(f"of the product: {total / product:.2%} = {total:,} / {product:,}")
    repeated = ", ".join(f"{one} = {first}" for one, first in summary["duplicates"].items())
    distinct = total - len(summary["duplicates"])
    lines.append(
        f"distinct: {distinct} = {total} - {len(summary['duplicates'])}"
        + (f" ({repeated})" if repeated else "")
    )
    for one, broken in summary["infeasible_patterns"].items():
        lines += [f"infeasible: {one}: {text}" for text in broken]
    return lines
