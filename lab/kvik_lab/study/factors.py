"""The checks of factors, constants and the unit: what their form cannot say."""

from __future__ import annotations

import re
from typing import Any

from kvik.shapes import PRESETS, ShapeError
from kvik_lab.design.factor import Factor, Level, Scale
from kvik_lab.study.draft import Draft, has_level
from kvik_lab.study.expressions import kind_of
from kvik_lab.study.problems import Path, did_you_mean
from kvik_lab.study.schema import FactorSpec, LevelIn, NameIn, UnitSpec
from kvik_lab.study.unit import Model, Unit, describe_model

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?i?B)")
_HINT = re.compile(r" \((did you mean [^)]*)\)")
_UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def check_constants(raw: Any, draft: Draft) -> None:
    """Read `constants` into the draft. A text such as `24 GiB` is so many bytes."""
    if not isinstance(raw, dict):
        draft.form(dict[NameIn, LevelIn], raw, ("constants",))
        return
    draft.declared_constants = [str(name) for name in raw]
    for name, value in raw.items():
        path: Path = ("constants", name)
        sound = draft.form(dict[NameIn, LevelIn], {name: value}, ("constants",))
        if sound is None:
            continue
        if name in draft.declared:
            draft.wrong(path, f"{name!r} is a factor and a constant", "rename one of the two", key=True)
            continue
        size = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if size is not None and size[2] in _UNITS:
            bytes_ = float(size[1]) * _UNITS[size[2]]
            draft.constants[name] = int(bytes_) if bytes_.is_integer() else bytes_
        else:
            draft.constants[name] = value


def check_factors(raw: Any, draft: Draft) -> None:
    """Read `factors` into the draft: each by itself, then the nesting of those that are sound."""
    if not isinstance(raw, dict) or not raw:
        draft.form(dict[NameIn, FactorSpec], raw, ("factors",))
        if raw == {}:
            draft.wrong(("factors",), "'factors' is empty", "give at least one factor", key=True)
        return
    draft.declared = [str(name) for name in raw]
    specs: dict[str, FactorSpec] = {}
    for name, value in raw.items():
        sound = draft.form(dict[NameIn, FactorSpec], {name: value}, ("factors",))
        if sound is not None:
            specs[name] = sound[name]
    for name, spec in specs.items():
        factor = _factor(name, spec, draft)
        if factor is not None:
            draft.factors[name] = factor
    for name, spec in specs.items():
        _check_nesting(name, spec, draft)


def _factor(name: str, spec: FactorSpec, draft: Draft) -> Factor | None:
    path: Path = ("factors", name, "levels")
    if not _check_levels_alike(spec.levels, path, draft):
        return None
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in spec.levels)
    scale = Scale(spec.scale) if spec.scale else Scale.LINEAR if numbers else Scale.CATEGORICAL
    if scale is not Scale.CATEGORICAL and not numbers:
        remedy = "write scale: categorical, or leave it out"
        draft.wrong(("factors", name, "scale"), f"{name!r} has levels that are no numbers", remedy)
        return None
    if scale is Scale.LOG2:
        for at, level in enumerate(spec.levels):
            if level <= 0:
                remedy = "take the level away, or write scale: linear"
                draft.wrong((*path, at), f"{level} has no logarithm", remedy)
                return None
    factor = Factor(name, tuple(spec.levels), scale, dict(spec.within or {}), spec.restart)
    prices: dict[Level, float] = {}
    for level, price in (spec.price_per_hour or {}).items():
        if has_level(factor, level):
            prices[level] = price
        else:
            remedy = did_you_mean(str(level), [str(one) for one in factor.levels], what="its levels")
            where: Path = ("factors", name, "price_per_hour", level)
            draft.wrong(where, f"{name!r} has no level {level!r}", remedy, key=True)
    return Factor(name, factor.levels, scale, factor.within, factor.hard, prices)


def _check_levels_alike(levels: list[Level], path: Path, draft: Draft) -> bool:
    first = kind_of(levels[0])
    seen: set[Level] = set()
    for at, level in enumerate(levels):
        if kind_of(level) is not first:
            text = f"{level!r} among levels of which the first is {first.value}"
            draft.wrong(
                (*path, at), text, "make all levels numbers, all texts (in quotes), or all true and false"
            )
            return False
        if level in seen:
            draft.wrong((*path, at), f"level {level!r} is there twice", "take one of the two away")
            return False
        seen.add(level)
    return True


def _check_nesting(name: str, spec: FactorSpec, draft: Draft) -> None:
    within = spec.within or {}
    path: Path = ("factors", name, "within")
    sound = draft.check_levels(within, path)
    above, seen = list(within), {name}
    while above:
        parent = above.pop()
        if parent == name:
            draft.wrong(path, f"{name!r} is nested in itself", "take `within` away from one of the factors")
            sound = False
            break
        if parent not in seen and parent in draft.factors:
            seen.add(parent)
            above.extend(draft.factors[parent].within)
    if not sound:
        draft.factors.pop(name, None)


def check_unit(spec: UnitSpec, draft: Draft) -> Unit | None:
    """The unit's models, described; None where that cannot be done, which is then noted."""
    chosen = draft.factors.get("model")
    wanted: list[tuple[str, Path]]
    if spec.kv is not None:
        if chosen is not None:
            text = "unit.kv describes one model, and `model` is a factor"
            draft.wrong(("unit", "kv"), text, "leave unit.kv out, or take the factor away", key=True)
            return None
        return _described(spec, draft)
    if chosen is not None:
        if spec.model is not None:
            text = "`model` is a factor and in unit"
            draft.wrong(("unit", "model"), text, "leave unit.model out", key=True)
            return None
        wanted = [(str(level), ("factors", "model", "levels", at)) for at, level in enumerate(chosen.levels)]
    elif spec.model is not None:
        wanted = [(spec.model, ("unit", "model"))]
    else:
        draft.wrong(
            ("unit",), "'unit' names no model", "write model: qwen2.5-7b, or kv: {layers: ...}", key=True
        )
        return None
    models: dict[str, Model] = {}
    for text, path in wanted:
        try:
            near = draft.folder / text
            place = str(near) if near.exists() and text not in PRESETS else text
            models[text] = describe_model(text, place, spec.kv_dtype, spec.weights_dtype)
        except ShapeError as error:
            draft.wrong(path, *_parted(str(error)))
    if len(models) < len(wanted):
        return None
    return Unit(None if chosen else spec.model, models)


def _described(spec: UnitSpec, draft: Draft) -> Unit | None:
    if spec.kv is None:
        return None
    fields = spec.kv.model_dump(exclude_none=True)
    text = ",".join(f"{key}={value}" for key, value in fields.items())
    name = spec.model or "described"
    try:
        return Unit(name, {name: describe_model(name, text, spec.kv_dtype, spec.weights_dtype)})
    except ShapeError as error:
        draft.wrong(("unit", "kv"), *_parted(str(error)))
        return None


def _parted(text: str) -> tuple[str, str]:
    """What is wrong, and what a shape's error says to do about it."""
    hint = _HINT.search(text)
    if hint:
        return text[: hint.start()].split(". ")[0], hint[1]
    for mark in ("; ", ". "):
        what, found, remedy = text.partition(mark)
        if found:
            return what, remedy
    return text, "see `kvik shapes --help`"
