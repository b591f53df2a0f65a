"""The plan of the article on EFA and TCP, and what such a plan can tell."""

from __future__ import annotations

import math
from importlib.resources import as_file, files

from kvik_lab.design.from_study import Options, plan_study
from kvik_lab.design.plan import Plan
from kvik_lab.report.cells import Estimate
from kvik_lab.report.figures import Bars, Line
from kvik_lab.report.model import Cell, Section, Table
from kvik_lab.study import Study, expand_layers, load_study
from tests.lab.redrawn.pieces import Source, numbers


def section(source: Source) -> Section:
    """Factors and layers as printed, then the study file of the same plan and its own counts."""
    with as_file(files("kvik_lab.study") / "examples" / "efa-vs-tcp.yaml") as path:
        study = load_study(path)
    plan = plan_study(study, Options())
    tables = (_layers(study), _levels(study), _sizes(source, plan), _excluded(plan), _cannot(plan))
    text = (
        "The study file that comes with the lab states this plan; the tables after the printed ones are "
        "counted "
        "from it. It adds the level 0.9 of gpu_memory_utilization, with which the article's servers start.",
        f"{len(plan.duplicates)} pairs of patterns are the same combination under two names, and "
        f"{len(plan.impossible)} cannot run: {', '.join(plan.impossible)} is longer than the servers allow.",
        f"Of {len(plan.single.coefficients)} coefficients of the model with all interactions of two factors "
        "the "
        f"patterns estimate {len(plan.single.estimable)} by themselves.",
        "Hours: 16 for 59 patterns are 16.3 minutes each, so 14,580 patterns would take 3,954 hours, not "
        "350.",
    )
    figure = Bars(
        "plan-hours",
        "Patterns and hours of the layers",
        "layer",
        "patterns, hours",
        tuple(layer.name for layer in study.design.layers),
        (
            Line(
                "patterns",
                tuple(Estimate(float(_count(study, at))) for at in range(len(study.design.layers))),
            ),
            Line("hours", tuple(Estimate((layer.minutes or 0) / 60) for layer in study.design.layers)),
        ),
    )
    return source.section("plan", "The plan", ("factors", "layers"), text, tables, (figure,))


def _count(study: Study, layer: int) -> int:
    name = study.design.layers[layer].name
    return sum(pattern.layer == name for pattern in expand_layers(study))


def _layers(study: Study) -> Table:
    rows = tuple(
        (
            layer.name,
            layer.priority or "",
            float(_count(study, at)),
            (layer.minutes or 0) / 60,
            ", ".join(p.id for p in expand_layers(study) if p.layer == layer.name),
        )
        for at, layer in enumerate(study.design.layers)
    )
    columns = ("layer", "priority", "patterns", "hours", "ids")
    return Table("plan-layers", "Layers of the study file", columns, rows)


def _levels(study: Study) -> Table:
    patterns = expand_layers(study)
    rows: list[tuple[Cell, ...]] = []
    for factor in study.factors:
        cells = []
        for layer in study.design.layers:
            seen = {p.levels.get(factor.name) for p in patterns if p.layer == layer.name}
            cells.append(", ".join(str(level) for level in factor.levels if level in seen))
        rows.append((factor.name, *cells))
    columns = ("factor", *(layer.name for layer in study.design.layers))
    return Table("plan-levels", "Levels that each layer uses", columns, tuple(rows))


def _sizes(source: Source, plan: Plan) -> Table:
    rows = tuple((name, float(figure.value), figure.formula) for name, figure in plan.sizes.items())
    listed = math.prod(int(count) for count in numbers(source["factors"], "Levels"))
    note = f"The product of the levels as the article lists them is {listed:,}."
    return Table("plan-sizes", "Sizes of the plan", ("what", "value", "how"), rows, note)


def _excluded(plan: Plan) -> Table:
    rows = tuple((text, float(count)) for text, count in plan.excluded.items())
    return Table("plan-excluded", "Combinations that cannot be run", ("constraint", "combinations"), rows)


def _cannot(plan: Plan) -> Table:
    rows = [(one.alias.column, one.why) for one in plan.unreachable]
    rows += [(alias.column, alias.text) for alias in plan.single.aliases]
    columns = ("effect", "why")
    return Table("plan-aliases", "What the plan cannot tell apart", columns, tuple(rows))
