"""The study file's form. `load.py` reads into it and checks what a form cannot say."""

from __future__ import annotations

import keyword
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvik_lab.records.schema import Gate, Section, Text
from kvik_lab.study.expressions import FUNCTIONS, LARGEST_NUMBER

GATES: tuple[Gate, ...] = get_args(Gate)
_LEVEL_TYPES = ["string", "number", "boolean"]


def mistake(text: str, remedy: str) -> PydanticCustomError:
    """A refusal that carries its own remedy to `load.py`."""
    return PydanticCustomError("study", "{text}", {"text": text, "remedy": remedy})


def _level(value: Any) -> Any:
    if isinstance(value, int | float) and not abs(value) <= LARGEST_NUMBER:
        raise mistake(f"the number {value:.3g}", "numbers go up to 2**53, so that each is exact")
    if isinstance(value, bool | str | int | float):
        return value
    kind = "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "empty"
    raise mistake(f"a level that is {kind}", "a level is a text, a number, true or false")


def _name(value: str) -> str:
    if not value.isidentifier() or not value.isascii() or keyword.iskeyword(value):
        fixed = "".join(one if one.isascii() and (one.isalnum() or one == "_") else "_" for one in value)
        fixed = f"n_{fixed}" if not fixed or fixed[0].isdigit() or keyword.iskeyword(fixed) else fixed
        remedy = f"use letters, digits and _, such as {fixed}"
        raise mistake(f"{value!r} cannot be a name in expressions", remedy)
    if value in FUNCTIONS:
        raise mistake(f"{value!r} is the name of a function", f"choose another, such as {value}_level")
    return value


def _choice(value: Any) -> Any:
    """What a sweep or a loop runs over: a factor's name, or factors with a level or a list of levels each."""
    if isinstance(value, str):
        return {value: None}
    if not isinstance(value, dict) or not value:
        raise mistake("neither a factor nor levels of factors", "write tokens, or {tokens: [1000, 2000]}")
    chosen: dict[str, Any] = {}
    for name, levels in value.items():
        many = levels if isinstance(levels, list) else None if levels == "all" else [levels]
        if many == []:
            raise mistake(f"no level of {name!r}", f"list some, or write {name}: all")
        chosen[str(name)] = None if many is None else [_level(one) for one in many]
    return chosen


LevelIn = Annotated[Any, PlainValidator(_level), WithJsonSchema({"type": _LEVEL_TYPES})]
NameIn = Annotated[str, AfterValidator(_name)]
ChoiceIn = Annotated[
    dict[str, list[Any] | None],
    PlainValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "minProperties": 1,
                    "additionalProperties": {
                        "anyOf": [
                            {"type": _LEVEL_TYPES},
                            {"type": "array", "minItems": 1, "items": {"type": _LEVEL_TYPES}},
                        ]
                    },
                },
            ]
        }
    ),
]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class KvSpec(Section):
    """How the KV lies, for a model that is no preset and has no config.json here."""

    layers: Count
    kv_heads: Count
    head_size: Count = Field(description="Elements of K a token and head; for mla the width of the latent.")
    value_size: Annotated[int, Field(ge=0)] | None = None
    attention: Literal["gqa", "mla"] = "gqa"
    dtype: Text = Field("bfloat16", description="Element type of the KV.")
    parameters: Count | None = Field(None, description="Of the whole model, for weights_bytes.")


class UnitSpec(Section):
    """The model."""

    model: Text | None = Field(
        None, description="A preset (`kvik shapes` lists them), or a path to a config.json or its folder."
    )
    kv: KvSpec | None = Field(None, description="The KV's shape, instead of reading it by the model's name.")
    kv_dtype: Text | None = Field(None, description="Element type of the KV instead of the weights' type.")
    weights_dtype: Text | None = Field(
        None, description="Element type of the weights instead of the model's own."
    )


class CostSpec(Section):
    """What runs cost."""

    minutes_per_run: Positive | None = None
    minutes_per_restart: NotNegative | None = None
    price_per_hour: NotNegative | None = Field(
        None, description="Of everything that is rented, in `currency`."
    )
    currency: Text = "USD"


class FactorSpec(Section):
    """One thing that the study varies."""

    levels: Annotated[list[LevelIn], Field(min_length=2)]
    scale: Literal["categorical", "linear", "log2"] | None = Field(
        None, description="How levels enter a model; by default linear for numbers, else categorical."
    )
    within: Annotated[dict[str, LevelIn], Field(min_length=1)] | None = Field(
        None, description="Levels of other factors where this one exists at all."
    )
    restart: bool = Field(False, description="Whether a change takes a restart of the servers.")
    price_per_hour: dict[LevelIn, NotNegative] | None = Field(
        None, description="What a level costs beside the others, in the study's currency."
    )
    sets: dict[LevelIn, Annotated[dict[Text, LevelIn], Field(min_length=1)]] | None = Field(
        None, description="What a level puts into `run`, by path: {fast: {link.rate: 10gbit}}."
    )
    about: Text | None = None


class AnchorSpec(Section):
    """One combination that is measured again and again, to see drift."""

    at: Annotated[dict[str, LevelIn], Field(min_length=1)]
    every: Annotated[int, Field(ge=2)] = Field(description="Runs from one anchor to the next.")


class PatternSpec(Section):
    """Rows of a layer: every combination of `for` (outer) and `sweep` (inner), with `at` held."""

    id: Text | None = Field(None, description="Template of the rows' ids, such as p14-{backend}-{tokens|k}k.")
    for_: ChoiceIn | None = Field(None, alias="for")
    sweep: ChoiceIn | None = None
    at: dict[str, LevelIn] = Field({})


class LayerSpec(Section):
    """Patterns with one purpose."""

    name: Text
    priority: Text | None = None
    minutes: Positive | None = Field(None, description="What the layer takes, all its patterns together.")
    about: Text | None = None
    patterns: Annotated[list[PatternSpec], Field(min_length=1)]


class DesignSpec(Section):
    """Which combinations are run, how often, and in which order."""

    kind: Literal["full", "layered", "fractional", "screening", "d-optimal", "i-optimal", "split-plot"]
    runs: Count | None = Field(None, description="Runs of one start of everything, without anchors.")
    starts: Count = Field(1, description="Server starts of each whole-plot combination.")
    blocks: Count = 1
    order: Literal["randomised", "as-written", "williams"] = Field(
        "randomised", description="Of the starts of a block; williams balances two to four of them."
    )
    seed: Annotated[int, Field(ge=0)] = 0
    ratio: NotNegative = Field(
        1.0, description="Variance between starts over a run's: a split-plot's rows go by it, and power."
    )
    focus: list[Text] = Field([], description="Terms of the model that matter more to a d-optimal design.")
    anchors: AnchorSpec | None = None
    id: Text | None = Field(None, description="Template of ids for patterns that have none of their own.")
    defaults: dict[str, LevelIn] = Field({}, description="Levels where a pattern says none.")
    layers: Annotated[list[LayerSpec], Field(min_length=1)] | None = None


class WarmupSpec(Section):
    """Requests before those that count."""

    shape: Literal["same", "short"] = Field(
        "same", description="Of the requests, beside the measured ones; what is run sends the same."
    )
    until: Literal["changepoint", "count"] = Field(
        "count", description="As many as min; or until the last of them, min at least, keep a level."
    )
    min: Annotated[int, Field(ge=0)] = 10
    max: Annotated[int, Field(ge=0)] = Field(60, description="Of changepoint: where it ends without a level.")


class StudyFile(Section):
    """A study of KV transfers: what varies, what is possible, what is run, and when it is enough."""

    study: Text
    about: Text | None = None
    unit: UnitSpec
    constants: dict[NameIn, LevelIn] = Field({})
    cost: CostSpec = Field(default_factory=lambda: CostSpec.model_validate({}))
    factors: Annotated[dict[NameIn, FactorSpec], Field(min_length=1)]
    constraints: list[Text] = Field([])
    model: Text | None = None
    design: DesignSpec
    warmup: WarmupSpec = Field(default_factory=lambda: WarmupSpec.model_validate({}))
    gates: list[Gate] = Field(list(GATES))
    run: dict[Text, Any] | None = Field(None, description="What is started, and what load it gets.")
