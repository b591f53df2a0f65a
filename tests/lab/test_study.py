"""The study file: what a sound one comes to. Constraints are checked against Python's own evaluation."""

import importlib
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from kvik.shapes import ModelShape
from kvik_lab import cli
from kvik_lab.design.factor import Scale
from kvik_lab.errors import LabError
from kvik_lab.study import Study, StudyError, expand_layers, load_study, parse_study
from kvik_lab.study.cli import schema_text
from kvik_lab.study.yamlmap import read_yaml
from tests.docs.pages import ROOT

jsonschema = importlib.import_module("jsonschema")  # it has no types
EXAMPLES = ROOT / "lab" / "kvik_lab" / "study" / "examples"

# The ids of the plan behind "EFA vs TCP" (S0), in its order.
ARTICLE = [
    *(f"p14-unified-{k}k" for k in (1, 2, 3, 4, 6, 8, 10, 12)),
    *(f"p14-tcp-{k}k" for k in (1, 2, 4, 8, 12)),
    *(f"p14-efa-{k}k" for k in (1, 2, 4, 8, 12, 20)),
    *(f"p14-{backend}-c{c}-1k" for backend in ("unified", "tcp", "efa") for c in (1, 2, 4, 8, 16)),
    *(f"p14-{backend}-c{c}-4k" for backend in ("tcp", "efa") for c in (4, 8)),
    "p14-efa-c16-12k",
    *(f"p14-efa-gpu{gmu}-4k" for gmu in ("03", "05", "08")),
    *("p14-efa-gpu08-batch2k-4k", "p14-efa-gpu08-batch8k-4k", "p14-efa-gpu08-batch8k-12k"),
    *("p14-tcp-gpu08-4k", "p14-unified-gpu08-4k"),
    *(f"p14-{backend}-gpu08-batch{k}k-4k" for backend in ("tcp", "unified") for k in (2, 8)),
    *(
        f"p14-{backend}-{client}-4k"
        for backend in ("unified", "tcp", "efa")
        for client in ("online", "offline")
    ),
    *("p14-efa-online-12k", "p14-efa-offline-12k"),
]


@pytest.fixture(scope="module")
def article() -> Study:
    return load_study(EXAMPLES / "efa-vs-tcp.yaml")


def test_the_articles_59_patterns_come_out_one_for_one(article: Study) -> None:
    rows = expand_layers(article)
    assert [row.id for row in rows] == ARTICLE
    assert len(ARTICLE) == len(set(ARTICLE)) == 59
    sizes = [sum(row.layer == layer.name for row in rows) for layer in article.design.layers]
    assert sizes == [19, 20, 12, 8]
    assert [layer.minutes for layer in article.design.layers] == [360, 300, 180, 120]


def test_ids_say_what_the_levels_of_their_rows_are(article: Study) -> None:
    for row in expand_layers(article):
        assert set(row.levels) == {factor.name for factor in article.factors}
        _, backend, *parts = row.id.split("-")
        assert row.levels["backend"] == backend
        assert row.levels["tokens"] == int(parts[-1].removesuffix("k")) * 1000
        named = {"concurrency": 1, "gmu": 0.9, "batch": 4096, "client": "online"}
        for part in parts[:-1]:
            if part.startswith("c"):
                named["concurrency"] = int(part[1:])
            elif part.startswith("gpu"):
                named["gmu"] = int(part[3:]) / 10
            elif part.startswith("batch"):
                named["batch"] = int(part[5:-1]) * 1024
            else:
                named["client"] = part
        assert {name: row.levels[name] for name in named} == named


def test_duplicates_of_the_article_are_kept_and_named(article: Study) -> None:
    rows = {row.id: row for row in expand_layers(article)}
    repeated = {row.id: row.duplicate_of for row in rows.values() if row.duplicate_of}
    assert repeated == {
        "p14-unified-c1-1k": "p14-unified-1k",
        "p14-tcp-c1-1k": "p14-tcp-1k",
        "p14-efa-c1-1k": "p14-efa-1k",
        "p14-unified-online-4k": "p14-unified-4k",
        "p14-tcp-online-4k": "p14-tcp-4k",
        "p14-efa-online-4k": "p14-efa-4k",
        "p14-efa-online-12k": "p14-efa-12k",
    }
    distinct = {tuple(row.levels.items()) for row in rows.values()}
    assert len(distinct) == 59 - len(repeated)


def test_the_one_pattern_beyond_the_context_is_named_with_its_numbers(article: Study) -> None:
    broken = {row.id: article.violations(row.levels) for row in expand_layers(article)}
    assert [name for name, found in broken.items() if found] == ["p14-efa-20k"]
    (found,) = broken["p14-efa-20k"]
    assert found.constraint == "tokens + max_tokens <= max_model_len"
    assert found.values == {"tokens": 20000, "max_tokens": 10, "max_model_len": 16384}
    assert "20,010 <= 16,384 does not hold" in found.shows


def test_candidates_are_the_product_without_what_the_constraints_exclude(article: Study) -> None:
    """Counted by hand: 8 lengths fit; offline has one concurrency; the cache is off: 3 * 8 * 6 * 4 * 3."""
    candidates, infeasible = article.candidates(), article.infeasible()
    assert article.product() == 3 * 9 * 5 * 4 * 3 * 2 * 2 == 6480
    assert len(candidates) == 3 * 8 * (5 + 1) * 4 * 3 == 1728
    assert len(candidates) + len(infeasible) == article.product()
    assert len(candidates.drop_duplicates()) == len(candidates)
    assert sum(article.excluded().values()) == len(infeasible)
    assert candidates["tokens"].max() == 12000
    assert set(infeasible["constraint"]) == {one.text for one in article.constraints}


def test_factors_are_those_of_the_design_package(article: Study) -> None:
    tokens, backend = article.factor("tokens"), article.factor("backend")
    assert (tokens.scale, tokens.hard, tokens.levels[-1]) == (Scale.LOG2, False, 20000)
    assert (backend.scale, backend.hard, backend.levels) == (
        Scale.CATEGORICAL,
        True,
        ("unified", "tcp", "efa"),
    )
    assert article.factor("gmu").scale is Scale.LINEAR
    assert article.unit.token_bytes() == 57344
    assert article.constants["gpu_mem"] == 24_000_000_000


def test_nested_factors_exist_only_where_their_parent_has_the_level() -> None:
    study = load_study(EXAMPLES / "two-links.yaml")
    frame = study.combinations()
    assert len(frame) == (1 + 2) * 6 * 3
    assert frame[frame["mode"] == "together"]["link"].isna().all()
    assert set(frame[frame["mode"] == "apart"]["link"]) == {"old", "new"}
    assert study.factor("link").price_per_hour == {"new": 1.25}
    shape = ModelShape.preset("llama-3.1-8b")
    assert shape.parameters is not None
    room = 0.9 * 80e9 - 2 * shape.parameters
    fits = [
        (mode, link, tokens, c)
        for mode, link in (("together", None), ("apart", "old"), ("apart", "new"))
        for tokens in (1000, 2000, 4000, 8000, 16000, 32000)
        for c in (1, 4, 16)
        if c * (tokens + 32) * 131072 <= room and tokens + 32 <= 32768
    ]
    rows = study.candidates().astype(object).itertuples(index=False, name=None)
    assert [(m, None if link is None else link, t, c) for m, link, t, c in rows] == fits
    assert 0 < len(fits) < len(frame)


def test_numbers_are_nan_and_the_order_is_the_files_when_a_nested_factor_stands_first() -> None:
    study = parse_study(
        "study: s\nunit: {model: tiny}\nfactors:\n  size: {levels: [1, 2], within: {mode: b, on_top: true}}\n"
        "  mode: {levels: [a, b]}\n  on_top: {levels: [false, true]}\ndesign: {kind: full}\n"
    )
    frame = study.combinations()
    rows = [(None if math.isnan(s) else s, m, t) for s, m, t in frame.itertuples(index=False, name=None)]
    assert rows == [
        (None, "a", False),
        (None, "a", True),
        (None, "b", False),
        (1, "b", True),
        (2, "b", True),
    ]


CONDITIONS = [
    "tokens + 10 * c <= limit",
    "not (mode == 'one' and c > 1)",
    "mode in ['one', 'three'] or tokens ** 2 / 4 >= limit - 1",
    "mode != 'two' or log2(tokens) + ceil(gmu * 10) > max(c, 9, 3)",
    "1 < c <= 4 or fast",
    "(tokens // 3) % 2 == 0 and not fast or gmu not in (0.3, 0.5)",
    "min(tokens, limit) - -c != 5 and abs(c - 4) >= floor(gmu)",
    "fast == (c > 1) or kv_bytes(tokens) < sqrt(limit) * 1000",
    "exists(gmu) and fast",
]


def test_conditions_agree_with_python_on_every_row() -> None:
    levels: dict[str, list[Any]] = {
        "mode": ["one", "two", "three"],
        "tokens": [1, 2, 7, 16],
        "c": [1, 2, 4],
        "gmu": [0.3, 0.5, 0.8],
    }
    text = "study: s\nunit: {model: tiny}\nconstants: {limit: 30}\nfactors:\n"
    text += "".join(f"  {name}: {{levels: {json.dumps(many)}}}\n" for name, many in levels.items())
    text += "  fast: {levels: [false, true]}\nconstraints:\n"
    text += "".join(f"  - {json.dumps(one)}\n" for one in CONDITIONS) + "design: {kind: full}\n"
    study = parse_study(text)
    known = {
        "limit": 30, "log2": math.log2, "ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt,
        "kv_bytes": lambda tokens: 4096 * tokens, "exists": lambda _: True,
    }  # fmt: skip
    names = [*levels, "fast"]
    feasible = []
    for row in itertools.product(*levels.values(), [False, True]):
        values = dict(zip(names, row, strict=True))
        broken = [one for one in CONDITIONS if not eval(one, {}, {**known, **values})]  # noqa: S307
        assert [found.constraint for found in study.violations(values)] == broken
        if not broken:
            feasible.append(row)
    assert [tuple(row) for row in study.candidates().itertuples(index=False, name=None)] == feasible
    assert 0 < len(feasible) < 216


def test_a_condition_is_violated_only_where_it_is_false_whatever_an_absent_factor_would_be() -> None:
    """Random conditions over a factor that is absent: violated exactly when both of its levels violate."""
    rng = random.Random(6)
    atoms = ["link == 'x'", "link != 'x'", "link in ['x']", "mode == 'a'", "t > 1", "t == 1", "t <= 2"]

    def condition(depth: int) -> str:
        if depth == 0:
            return rng.choice(atoms)
        kind = rng.choice(["not", "and", "or", "atom"])
        if kind == "atom":
            return rng.choice(atoms)
        if kind == "not":
            return f"not ({condition(depth - 1)})"
        return f"({condition(depth - 1)}) {kind} ({condition(depth - 1)})"

    head = (
        "study: s\nunit: {model: tiny}\nfactors:\n  mode: {levels: [a, b]}\n"
        "  link: {levels: [x, y], within: {mode: b}}\n  t: {levels: [1, 2, 3]}\ndesign: {kind: full}\n"
    )
    seen = {True: 0, False: 0}
    for _ in range(60):
        text = condition(3)
        study = parse_study(head + f"constraints:\n  - {json.dumps(text)}\n")
        for t in (1, 2, 3):
            either = {
                bool(eval(text, {}, {"mode": "a", "t": t, "link": link}))  # noqa: S307
                for link in ("x", "y")
            }
            violated = bool(study.violations({"mode": "a", "t": t}))
            seen[violated] += 1
            if violated:
                assert either == {False}, f"{text} with t = {t}, seed 6"
            elif "link" not in text:
                assert either == {True}, f"{text} with t = {t}, seed 6"
    assert min(seen.values()) > 20


@pytest.mark.parametrize(
    ("condition", "column", "text", "remedy"),
    [
        ("tokens <= limitt", 10, "'limitt' is no factor and no constant", "did you mean 'limit'?"),
        ("tokens.bit_length() > 3", 0, "names have no parts", "by its name"),
        ("__import__('os').system('x') == 0", 0, "names have no parts", "by its name"),
        ("open('x') == 1", 0, "no function 'open'", "functions: "),
        ("loq2(tokens) > 1", 0, "no function 'loq2'", "did you mean 'log2'?"),
        ("tokens > 1 if mode == 'one' else False", 0, "no `if`", "or (not A and C)"),
        ("[t for t in tokens]", 0, "not part of the language", "comparisons"),
        ("lambda: True", 0, "not part of the language", "comparisons"),
        ("tokens[0] > 1", 0, "nothing is indexed", "constant"),
        ("mode + 1 > 2", 0, "'mode' is a text, in arithmetic", "a number belongs there"),
        ("mode > 'one'", 0, "'mode' is a text and has no order", "use == or in"),
        ("mode == 1", 8, "'mode' is a text and '1' is a number", "compare with a text"),
        ("mode == 'ones'", 8, "'mode' has no level 'ones'", "did you mean 'one'?"),
        ("tokens in [1, 5]", 14, "'tokens' has no level 5", "its levels: 1, 2, 4"),
        ("tokens in mode", 10, "`in` 'mode'", "write a list"),
        ("tokens + 1", 0, "is a number, not a condition", "compare it"),
        ("not tokens", 4, "'tokens' is a number, behind `not`", "a condition belongs there"),
        ("tokens = 4", 7, "is no expression", "write == to compare"),
        ("tokens > 1 && tokens < 4", 12, "is no expression", "write and, or, not"),
        ("(tokens > 1) & (tokens < 4)", 0, "an operator on bits", "write and, or, not"),
        ("tokens is None", 0, "`is` compares objects", "write =="),
        ("tokens == None", 10, "no value of a factor", "True and False"),
        ("max(tokens) > 1", 0, "max with 1 argument", "max(a, b, ...)"),
        ("log2(tokens, 2) > 1", 0, "log2 with 2 arguments", "log2(x)"),
        ("kv_bytes(tokens, model=1) > 1", 0, "kv_bytes with a named argument", "kv_bytes(tokens, model)"),
        ("weights_bytes('tiny') > 1", 14, "weights_bytes of \"'tiny'\"", "the name `model`"),
        ("exists(limit)", 7, "'limit' is no factor", "factors: "),
        ("log2 > 1", 0, "'log2' is a function", "call it"),
        ("mode == 'é' or tokenz > 1", 8, "'mode' has no level 'é'", "its levels"),
        ("'é' != mode and tokenz > 1", 0, "'mode' has no level 'é'", "its levels"),
        ("'1' == '1é' or tokenz > 1", 15, "'tokenz' is no factor", "did you mean 'tokens'?"),
        ("(" * 60 + "tokens" + ")" * 60 + " > 1", 0, "", ""),
        ("-" * 60 + "tokens > 1", None, "nested too deeply", "split it"),
        ("tokens < 10000000000000000000", 9, "a number beyond 2**53", "exact"),
        ("tokens < 1e999", 9, "a number beyond 2**53", "exact"),
        ("", 0, "an empty", ""),
    ],
)
def test_what_is_no_condition_is_refused_at_its_column(
    condition: str, column: int | None, text: str, remedy: str
) -> None:
    head = (
        "study: s\nunit: {model: tiny}\nconstants: {limit: 3}\nfactors:\n  mode: {levels: [one, two]}\n"
        "  tokens: {levels: [1, 2, 4]}\ndesign: {kind: full}\nconstraints:\n"
    )
    if condition.startswith("(((("):  # brackets alone are no depth
        assert parse_study(f'{head}  - "{condition}"\n').constraints
        return
    with pytest.raises(StudyError) as caught:
        parse_study(f'{head}  - "{condition}"\n')
    (found,) = caught.value.problems
    assert found.line == 9
    assert column is None or found.column == 6 + column
    assert text in found.text
    assert remedy in found.remedy


def test_a_part_without_a_value_names_its_row() -> None:
    study = parse_study(
        "study: s\nunit: {model: tiny}\nfactors:\n  t: {levels: [0, 1]}\nconstraints: [1 / t > 0]\n"
        "design: {kind: full}\n"
    )
    with pytest.raises(LabError, match=r"1 / t has no finite value with t = 0"):
        study.candidates()


def test_a_model_as_a_factor_has_its_own_bytes_in_each_row() -> None:
    study = parse_study(
        "study: s\nunit: {kv_dtype: fp8}\nfactors:\n  model: {levels: [llama-3.1-8b, qwen2.5-7b]}\n"
        "  tokens: {levels: [1000, 100000]}\nconstraints:\n  - kv_bytes(tokens, model) < 5.0e+9\n"
        "  - weights_bytes(model) < 16.0e+9\ndesign: {kind: full}\n"
    )
    assert study.candidates().values.tolist() == [["qwen2.5-7b", 1000], ["qwen2.5-7b", 100000]]
    assert study.unit.token_bytes("llama-3.1-8b") == 65536
    assert study.excluded() == {"kv_bytes(tokens, model) < 5.0e+9": 1, "weights_bytes(model) < 16.0e+9": 1}


def test_model_is_a_name_in_constraints_where_nothing_else_is_called_so() -> None:
    study = parse_study(
        "study: s\nunit: {model: qwen2.5-7b}\nconstants: {gpu_mem: 24 GiB}\nfactors:\n"
        "  gmu: {levels: [0.3, 0.5, 0.9]}\n  tp: {levels: [1, 2]}\ndesign: {kind: full}\nconstraints:\n"
        "  - weights_bytes(model) / tp <= gmu * gpu_mem * 0.92\n"
    )
    parameters = ModelShape.preset("qwen2.5-7b").parameters
    assert parameters is not None
    fits = [[g, t] for g in (0.3, 0.5, 0.9) for t in (1, 2) if 2 * parameters / t <= g * 24 * 2**30 * 0.92]
    assert study.candidates().values.tolist() == fits
    assert 0 < len(fits) < 6


def test_a_config_json_is_found_beside_the_study(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512,
        "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "s.yaml").write_text(
        "study: s\nunit: {model: mine}\nfactors: {t: {levels: [1, 2]}}\ndesign: {kind: full}\n",
        encoding="utf-8",
    )
    assert load_study(tmp_path / "s.yaml").unit.token_bytes() == 3 * 2 * 32 * 2


def test_too_many_combinations_are_refused_before_they_are_made() -> None:
    factors = "".join(f"  f{n}: {{levels: [1, 2, 3, 4, 5, 6, 7, 8]}}\n" for n in range(8))
    study = parse_study(f"study: s\nunit: {{model: tiny}}\nfactors:\n{factors}design: {{kind: full}}\n")
    with pytest.raises(LabError, match="combinations of levels"):
        study.candidates()


def test_yaml_that_both_versions_read_alike_is_read_as_pyyaml_reads_it() -> None:
    text = "a: [1, -2, 0x1F, 1.5, .5, 2.0e+3, true, False, text, 'on', 0.15.1, v1, 3-4]\nb: {c: d e}\n"
    mapped = read_yaml(text)
    assert mapped.problems == []
    assert mapped.data == yaml.safe_load(text)


def test_the_places_of_values_are_those_in_the_text() -> None:
    text = 'a:\n  b: [x, "y"]\n  c:\n    - d: 1\n'
    places = read_yaml(text).places
    assert (places["a", "b", 1].line, places["a", "b", 1].column) == (2, 10)
    assert (places["a", "c", 0, "d"].line, places["a", "c", 0, "d"].column) == (4, 10)
    assert (places["a", "c", 0, "d"].key_line, places["a", "c", 0, "d"].key_column) == (4, 7)


def test_a_study_cannot_be_changed() -> None:
    study = load_study(EXAMPLES / "two-links.yaml")
    with pytest.raises(AttributeError):
        study.name = "other"  # type: ignore[misc]


def test_the_published_schema_is_current_and_agrees_with_the_examples() -> None:
    published = (ROOT / "lab" / "kvik_lab" / "study" / "study.schema.json").read_text(encoding="utf-8")
    assert published == schema_text(), (
        "write it again: kvik lab schema > lab/kvik_lab/study/study.schema.json"
    )
    assert CliRunner().invoke(cli.lab, ["schema"]).output == published
    schema = json.loads(published)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in sorted(EXAMPLES.glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert list(validator.iter_errors(data)) == []
        for wrong in ({**data, "studi": 1}, {**data, "factors": {}}, {**data, "gates": ["V0"]}):
            assert list(validator.iter_errors(wrong))


def test_check_says_what_a_study_comes_to_each_number_beside_its_formula() -> None:
    path = str(EXAMPLES / "efa-vs-tcp.yaml")
    shown = CliRunner().invoke(cli.lab, ["check", path]).output
    for line in (
        "57,344 bytes of KV a token = 28 layers x 4 KV heads x 256 elements x 2 bytes",
        "product of levels: 6,480 = 3 x 9 x 5 x 4 x 3 x 2 x 2",
        "feasible combinations: 1,728 = 6,480 - 720 - 2,880 - 1,152",
        "patterns: 59 = 19 + 20 + 12 + 8",
        "hours as planned: 16 = (360 + 300 + 180 + 120) / 60",
        "distinct: 52 = 59 - 7",
        "infeasible: p14-efa-20k: tokens + max_tokens <= max_model_len: 20,010 <= 16,384",
    ):
        assert line in shown
    summary = json.loads(CliRunner().invoke(cli.lab, ["check", "--json", path]).output)
    assert summary["feasible"]["value"] == 1728
    assert np.prod([len(one["levels"]) for one in summary["factors"]]) == summary["product"]["value"]


def test_ready_studies_are_listed_and_written_once(tmp_path: Path) -> None:
    """Each is sound where it lies; what is there already stays as it is."""
    listed = CliRunner().invoke(cli.lab, ["ready"]).output.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    out = ["ready", "hardware-move", "--out", str(tmp_path / "new")]
    written = CliRunner().invoke(cli.lab, out)
    assert written.exit_code == 0, written.output
    names = ["hardware-move-after.json", "hardware-move-before.json", "hardware-move.yaml"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert load_study(tmp_path / "new" / "hardware-move.yaml").name == "hardware-move"
    again = CliRunner().invoke(cli.lab, out)
    assert (again.exit_code, "is there already" in again.output) == (2, True), again.output
    wrong = CliRunner().invoke(cli.lab, ["ready", "hardware"])
    assert (wrong.exit_code, "no ready study 'hardware'; there are: " in wrong.output) == (2, True)
