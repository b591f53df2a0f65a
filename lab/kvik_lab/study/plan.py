"""The checks of the design and the warm-up."""

from __future__ import annotations

from typing import Any

from kvik_lab.design.factor import Level
from kvik_lab.infer.arrays import LONGEST, SHORTEST
from kvik_lab.records.measures import PER_REQUEST
from kvik_lab.study.draft import Draft
from kvik_lab.study.layers import Layer, Pattern, Rule, check_template, make_id, rows_of
from kvik_lab.study.model import Anchors, Design, Warmup
from kvik_lab.study.problems import MistakeError, Path, did_you_mean
from kvik_lab.study.schema import DesignSpec, LayerSpec, PatternSpec, WarmupSpec
from kvik_lab.study.translate import check_form

_RUNS_NEEDED = ("d-optimal", "i-optimal")


def check_design(raw: Any, draft: Draft) -> Design | None:
    """Read `design`, with the rows of its layers. None where it is wrong, which is then noted."""
    path: Path = ("design",)
    spec: DesignSpec | None = draft.form(DesignSpec, raw, path)
    if spec is None:
        _check_what_is_sound(raw, draft)
        return None
    _check_kind(spec, draft)
    draft.check_levels(spec.defaults, (*path, "defaults"))
    anchors = None
    if spec.anchors is not None:
        draft.check_levels(spec.anchors.at, (*path, "anchors", "at"))
        anchors = Anchors(dict(spec.anchors.at), spec.anchors.every)
    layers = tuple(_layer(one) for one in spec.layers or ())
    return Design(
        kind=spec.kind,
        runs=spec.runs,
        starts=spec.starts,
        blocks=spec.blocks,
        order=spec.order,
        seed=spec.seed,
        ratio=spec.ratio,
        focus=tuple(spec.focus),
        anchors=anchors,
        layers=layers,
        patterns=tuple(_Expansion(spec, draft).patterns()),
    )


def _check_kind(spec: DesignSpec, draft: Draft) -> None:
    """What a kind of design needs, and what it has no use for."""
    path: Path = ("design",)
    if (spec.kind == "layered") != (spec.layers is not None):
        if spec.layers is None:
            draft.wrong(path, "a layered design has no layers", "add `layers:` with their patterns", key=True)
        else:
            remedy = "write kind: layered, or take the layers away"
            draft.wrong((*path, "layers"), f"layers in a design of kind {spec.kind}", remedy, key=True)
    if spec.kind in _RUNS_NEEDED and spec.runs is None:
        draft.wrong(path, f"a {spec.kind} design does not say how many runs", "add `runs: 40`", key=True)
    if spec.kind in ("layered", "full", "screening") and spec.runs is not None:
        text = f"`runs` in a {spec.kind} design, which has as many as it has rows"
        draft.wrong((*path, "runs"), text, "take it away", key=True)
    if spec.kind != "d-optimal" and spec.focus:
        text = f"`focus` in a design of kind {spec.kind}, which weighs no terms"
        draft.wrong((*path, "focus"), text, "write kind: d-optimal, or take it away", key=True)
    known = len(draft.factors) == len(draft.declared)
    if spec.kind == "split-plot" and known and not any(factor.hard for factor in draft.factors.values()):
        text = "a split-plot design, and no factor that takes a restart"
        draft.wrong((*path, "kind"), text, "write `restart: true` at the factors that take one")
    names = [layer.name for layer in spec.layers or ()]
    for at, name in enumerate(names):
        if name in names[:at]:
            draft.wrong((*path, "layers", at, "name"), f"a second layer {name!r}", "give it another name")


def _layer(spec: LayerSpec) -> Layer:
    return Layer(spec.name, spec.priority, spec.minutes, spec.about or "")


def _check_what_is_sound(raw: Any, draft: Draft) -> None:
    """A design with a mistake in its form still has its other names and levels checked."""
    layers = raw.get("layers") if isinstance(raw, dict) else None
    for number, layer in enumerate(layers if isinstance(layers, list) else ()):
        patterns = layer.get("patterns") if isinstance(layer, dict) else None
        for at, pattern in enumerate(patterns if isinstance(patterns, list) else ()):
            path: Path = ("design", "layers", number, "patterns", at)
            spec, _ = check_form(PatternSpec, pattern, path, draft.mapped)
            if spec is not None:
                read_rule(spec, path, draft)


def read_rule(spec: PatternSpec, path: Path, draft: Draft) -> Rule | None:
    """A pattern with its names and levels checked; None where one is wrong."""
    sound = draft.check_levels(spec.at, (*path, "at"))
    loops: dict[str, tuple[Level, ...]] = {}
    for key, choice in (("for", spec.for_), ("sweep", spec.sweep)):
        for name, levels in (choice or {}).items():
            where: Path = (*path, key, name)
            if name in loops or name in spec.at:
                text = f"{name!r} is said twice in one pattern"
                draft.wrong(where, text, "keep it in one of for, sweep and at", key=True)
                sound = False
            elif levels is None:
                factor = draft.factors.get(name)
                if factor is not None:
                    loops[name] = factor.levels
                else:
                    sound = False
                    if name not in draft.declared:
                        remedy = did_you_mean(name, draft.declared, what="factors")
                        draft.wrong(where, f"{name!r} is no factor", remedy)
            elif name not in draft.declared:
                sound = draft.check_level(name, levels[0], where) and sound
            else:
                checked = [draft.check_level(name, one, (*where, at)) for at, one in enumerate(levels)]
                sound = all(checked) and sound
                loops[name] = tuple(levels)
    return Rule(spec.id, tuple(loops.items()), dict(spec.at)) if sound else None


class _Expansion:
    """The rows of all layers, as far as they have no mistake."""

    def __init__(self, spec: DesignSpec, draft: Draft) -> None:
        self.spec, self.draft = spec, draft
        self.rows: list[Pattern] = []
        self.first: dict[tuple[tuple[str, Level], ...], str] = {}
        self.ids: set[str] = set()

    def patterns(self) -> list[Pattern]:
        if self.spec.id is not None:
            try:
                check_template(self.spec.id, self.draft.declared)
            except MistakeError as error:
                self.draft.wrong_inside(("design", "id"), error)
                return []
        for number, layer in enumerate(self.spec.layers or ()):
            before = len(self.rows)
            for at, pattern in enumerate(layer.patterns):
                path: Path = ("design", "layers", number, "patterns", at)
                rule = read_rule(pattern, path, self.draft)
                if rule is not None:
                    self.add(rule, layer.name, f"L{number + 1}-{{n}}", path, before)
        return self.rows

    def add(self, rule: Rule, layer: str, fallback: str, path: Path, before: int) -> None:
        template = rule.id or self.spec.id or fallback
        if len(self.draft.factors) < len(self.draft.declared):
            return  # rows would lack what a faulty factor has
        try:
            check_template(template, self.draft.declared)
            rows = rows_of(rule, list(self.draft.factors.values()), self.spec.defaults)
            ids = [make_id(template, row, len(self.rows) - before + at + 1) for at, row in enumerate(rows)]
        except MistakeError as error:
            self.draft.wrong_inside((*path, "id") if rule.id and " id " in error.text else path, error)
            return
        for name, row in zip(ids, rows, strict=True):
            if name in self.ids:
                text = f"the id {name!r} is given to two rows"
                remedy = (
                    "put another factor of the pattern into its id, or `{n}`, the row's number in its layer"
                )
                self.draft.wrong(path, text, remedy)
                return
            self.ids.add(name)
            same = self.first.setdefault(tuple(row.items()), name)
            self.rows.append(Pattern(name, layer, row, None if same == name else same))


def check_warmup(spec: WarmupSpec, draft: Draft, measured: str | None, *, runs: bool) -> Warmup:
    """The warm-up. measured: what the model is of. runs: whether the file says what is run."""
    steady = spec.until == "changepoint"
    # By count the bound ends nothing: one that nobody wrote is no mistake.
    if spec.max < spec.min and (steady or "max" in spec.model_fields_set):
        text = f"at most {spec.max} and at least {spec.min} warm-up requests"
        draft.wrong(("warmup", "max"), text, f"write max: {spec.min} or more")
    if steady and spec.min < SHORTEST:
        text = f"a level of {spec.min} warm-up requests, in which no change can be seen"
        draft.wrong(("warmup", "min"), text, f"write min: {SHORTEST} or more, or until: count")
    if steady and spec.max > LONGEST:
        text = f"changes are looked for in {LONGEST} warm-up requests at most, and max is {spec.max}"
        draft.wrong(("warmup", "max"), text, f"write max: {LONGEST} or less")
    if runs and spec.shape == "short":
        text = "warm-up requests that are run have the shape of the measured ones"
        draft.wrong(("warmup", "shape"), text, "write shape: same")
    metric = measured if measured is not None and measured in PER_REQUEST else "ttft"
    return Warmup(steady, spec.min, spec.max, metric)
