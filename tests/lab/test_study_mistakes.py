"""A study file with mistakes: all of them are named together, each with its place and a remedy."""

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvik_lab import cli
from kvik_lab.errors import LabError
from kvik_lab.study import Problem, StudyError, parse_study
from kvik_lab.study.cli import summarise

FIFTEEN = """\
study: fifteen-mistakes
unit:
  model: qwen2.5-7B
constants:
  max_tokens: 1_0
  max_model_len: 16384
cost:
  minutes_per_run: -3
factors:
  backend: {levels: [tcp, efa], restart: on}
  tokens: {levels: [1000, 2000, 4000], scale: log}
  tokens_out: {levels: [1, 16, 16]}
  link: {levels: [old, new], within: {backend: ofa}}
  batch: {lvels: [1, 2], levels: [1, 2]}
constraints:
  - tokens + max_token <= max_model_len
  - backend == 'eaf' or tokens < 4000
  - backend.upper() == 'TCP'
model: ttft ~ backend * tokenz
design:
  kind: d-optimal
  runs: many
warmup: {shape: same, min: 10, max: 5}
gates: [V1, V12]
"""

# line, column, path, a part of the text, a part of the remedy
EXPECTED = [
    (3, 10, "unit.model", "'qwen2.5-7B' is no preset", "did you mean 'qwen2.5-7b'?"),
    (
        5,
        15,
        "constants.max_tokens",
        "`1_0` means the number 10 in YAML 1.1 and a text in YAML 1.2",
        "write 10",
    ),
    (8, 20, "cost.minutes_per_run", "'minutes_per_run' is the number -3", "write a number above 0"),
    (10, 42, "factors.backend.restart", "`on` means true in YAML 1.1", 'write true, or "on"'),
    (11, 47, "factors.tokens.scale", "'scale' is the text 'log'", "did you mean 'log2'?"),
    (12, 32, "factors.tokens_out.levels[2]", "level 16 is there twice", "take one"),
    (13, 48, "factors.link.within.backend", "'backend' has no level 'ofa'", "did you mean 'efa'?"),
    (14, 11, "factors.batch.lvels", "unknown key 'lvels'", "did you mean 'levels'?"),
    (16, 14, "constraints[0]", "'max_token' is no factor and no constant", "did you mean 'max_tokens'?"),
    (17, 16, "constraints[1]", "'backend' has no level 'eaf'", "did you mean 'efa'?"),
    (18, 5, "constraints[2]", "'backend.upper': names have no parts", "use a factor"),
    (19, 25, "model", "'tokenz' is no factor", "did you mean 'tokens'?"),
    (22, 9, "design.runs", "'runs' is the text 'many', not a whole number", "write a whole number"),
    (23, 37, "warmup.max", "at most 5 and at least 10", "write max: 10 or more"),
    (24, 13, "gates[1]", "'gates' is the text 'V12'", "did you mean 'V2'?"),
]


def problems_of(text: str) -> tuple[Problem, ...]:
    """What is wrong with a study."""
    with pytest.raises(StudyError) as caught:
        parse_study(text)
    return caught.value.problems


def test_fifteen_mistakes_are_named_together_each_with_its_line_and_a_remedy() -> None:
    found = problems_of(FIFTEEN)
    assert len(EXPECTED) == 15
    assert [(one.line, one.column, one.path) for one in found] == [wanted[:3] for wanted in EXPECTED], (
        "\n".join(one.at("study") for one in found)
    )
    for problem, (_, _, _, text, remedy) in zip(found, EXPECTED, strict=True):
        assert text in problem.text
        assert remedy in problem.remedy


def test_mending_the_mistakes_one_after_the_other_leaves_the_others_as_they_were() -> None:
    """No mistake hides another, and none is reported because of another."""
    mended = {
        3: "  model: qwen2.5-7b",
        5: "  max_tokens: 10",
        8: "  minutes_per_run: 3",
        10: "  backend: {levels: [tcp, efa], restart: true}",
        11: "  tokens: {levels: [1000, 2000, 4000], scale: log2}",
        12: "  tokens_out: {levels: [1, 16, 32]}",
        13: "  link: {levels: [old, new], within: {backend: efa}}",
        14: "  batch: {levels: [1, 2]}",
        16: "  - tokens + max_tokens <= max_model_len",
        17: "  - backend == 'efa' or tokens < 4000",
        18: "  - backend == 'tcp'",
        19: "model: ttft ~ backend * tokens",
        22: "  runs: 40",
        23: "warmup: {shape: same, min: 10, max: 15}",
        24: "gates: [V1, V2]",
    }
    lines = FIFTEEN.splitlines()
    left = [wanted[0] for wanted in EXPECTED]
    for number, text in mended.items():
        lines[number - 1] = text
        left.remove(number)
        if left:
            assert [one.line for one in problems_of("\n".join(lines))] == left
    assert parse_study("\n".join(lines)).name == "fifteen-mistakes"


def test_the_command_prints_every_mistake_with_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(FIFTEEN, encoding="utf-8")
    result = CliRunner().invoke(cli.lab, ["check", str(path)])
    assert result.exit_code == 2
    for line, column, _, text, remedy in EXPECTED:
        row = next(row for row in result.output.splitlines() if row.startswith(f"{path}:{line}:{column}: "))
        assert text in row
        assert remedy in row
    as_json = CliRunner().invoke(cli.lab, ["check", "--json", str(path)])
    assert as_json.exit_code == 2
    assert [(one["line"], one["column"]) for one in json.loads(as_json.output)["problems"]] == [
        wanted[:2] for wanted in EXPECTED
    ]


def test_a_long_warm_up_by_count_needs_no_bound() -> None:
    """The bound is of a warm-up that ends at a level; what nobody wrote is no mistake."""
    assert parse_study(f"{SOUND}warmup: {{min: 100}}\n").warmup.least == 100
    (found,) = problems_of(f"{SOUND}warmup: {{until: changepoint, min: 100}}\n")
    assert found.remedy == "write max: 100 or more"


@pytest.mark.parametrize(
    ("warmup", "path", "text", "remedy"),
    [
        ("until: changepoint, min: 4", "warmup.min", "a level of 4 warm-up requests", "write min: 8 or more"),
        ("until: changepoint, max: 5000", "warmup.max", "2000 warm-up requests at most", "max: 2000 or less"),
        ("shape: short", "warmup.shape", "that are run have the shape of", "write shape: same"),
    ],
)
def test_a_warm_up_that_is_not_followed_is_refused(warmup: str, path: str, text: str, remedy: str) -> None:
    """Where a study says what is run, short requests are; they may stand in a plan for another runner."""
    runs = f"{SOUND}warmup: {{{warmup}}}\nrun: {{driver: emulator}}\n"
    (found,) = problems_of(runs)
    assert found.path == path
    assert text in found.text
    assert remedy in found.remedy
    if path == "warmup.shape":
        assert parse_study(runs.replace("run: {driver: emulator}\n", ""))


SOUND = """\
study: sound
unit: {model: tiny}
factors:
  mode: {levels: [one, two]}
  tokens: {levels: [1, 2]}
design: {kind: full}
"""


@pytest.mark.parametrize(
    ("before", "after", "line", "text", "remedy"),
    [
        ("study: sound\n", "", 1, "the study has no 'study'", "add `study: ...`"),
        ("study: sound", "studi: sound", 1, "unknown key 'studi'", "did you mean 'study'?"),
        ("study: sound", "study:", 1, "'study' is empty", "give it a value"),
        ("study: sound", 'study: "\\ud83d"', 1, "half a character", "write the whole character"),
        ("study: sound", "study: 5", 1, "'study' is the number 5, not text", "write a text"),
        ("study: sound", "study: sound\nstudy: b", 2, "'study' is given twice, first in line 1", "keep one"),
        ("study: sound", "study: a: b", 1, "not YAML", "quote a text that has `: `"),
        ("{model: tiny}", "{}", 2, "'unit' names no model", "write model:"),
        ("{model: tiny}", "{model: ./none}", 2, "'./none' is no preset", "Presets"),
        ("{model: tiny}", "{kv: {layers: 0, kv_heads: 1, head_size: 1}}", 2, "is the number 0", "from 1"),
        ("{model: tiny}", "{kv: {layers: 1, kv_heads: 1}}", 2, "'kv' has no 'head_size'", "add `head_size"),
        ("{model: tiny}", "{model: tiny, kv_dtype: bf17}", 2, "'bf17' is not one of", "did you mean"),
        ("mode:", "no:", 4, "`no` means false in YAML 1.1", 'write false, or "no"'),
        ("mode:", "my-mode:", 4, "'my-mode' cannot be a name", "such as my_mode"),
        ("mode:", "min:", 4, "'min' is the name of a function", "choose another"),
        ("[one, two]", "[one]", 4, "'levels' has 1 of at least 2 entries", "give at least 2"),
        ("[one, two]", "[one, 2]", 4, "2 among levels of which the first is a text", "make all levels"),
        ("[one, two]", "[one, [two]]", 4, "a level that is a list", "a level is a text"),
        ("[one, two]", "one", 4, "'levels' is the text 'one', not a list", "write [a, b]"),
        ("[one, two]", "[one, two], scale: log2", 4, "'mode' has levels that are no numbers", "categorical"),
        ("[1, 2]}", "[0, 2], scale: log2}", 5, "0 has no logarithm", "scale: linear"),
        ("[1, 2]}", "[0x10, 017]}", 5, "`017` means the number 15 in YAML 1.1", "write 17 or 15"),
        ("[1, 2]}", "[1:30, 2]}", 5, "`1:30` means the number 90 in YAML 1.1", '"1:30"'),
        ("[1, 2]}", "[1e3, 2]}", 5, "`1e3` means a text in YAML 1.1", "write 1000"),
        ("[1, 2]}", "[.inf, 2]}", 5, ".inf is no finite number", "finite"),
        ("[1, 2]}", "[1, 2], price_per_hour: {3: 1.0}}", 5, "'tokens' has no level 3", "its levels: 1, 2"),
        ("[1, 2]}", "[1, 2], within: {mod: one}}", 5, "'mod' is no factor", "did you mean 'mode'?"),
        ("[1, 2]}", "[1, 2], within: {tokens: 1}}", 5, "'tokens' is nested in itself", "take `within` away"),
        ("[1, 2]}", "&a [1, 2]}\n  c: {levels: *a}", 6, "an alias (`*name`)", "write the value out"),
        ("{kind: full}", "{kind: d-optimal}", 6, "does not say how many runs", "add `runs"),
        ("{kind: full}", "{kind: dopt}", 6, "'kind' is the text 'dopt'", "did you mean 'd-optimal'?"),
        ("{kind: full}", "{kind: layered}", 6, "a layered design has no layers", "add `layers:`"),
        ("{kind: full}", "{kind: full, runs: 4}", 6, "`runs` in a full design", "take it away"),
        ("{kind: full}", "{kind: screening, runs: 4}", 6, "`runs` in a screening design", "take it away"),
        ("{kind: full}", "{kind: full, focus: [tokens]}", 6, "`focus` in a design of kind full", "d-optimal"),
        ("{kind: full}", "{kind: full, starts: 2.5}", 6, "'starts' is the number 2.5", "whole number"),
        ("{kind: full}", "{kind: full, anchors: {at: {tokens: 3}, every: 4}}", 6, "no level 3", "1, 2"),
        ("design:", "constants: {mode: 1}\ndesign:", 6, "'mode' is a factor and a constant", "rename"),
        ("design:", "constraints: tokens\ndesign:", 6, "is the text 'tokens', not a list", "- "),
        ("design:", "model: tokens\ndesign:", 6, "a formula without `~`", "ttft ~ tokens"),
        ("design:", "model: y ~ log(tokens)\ndesign:", 6, "a function among the terms", "scale: log2"),
        ("[1, 2]}", "[1, 99999999999999999999]}", 5, "the number 1e+20", "up to 2**53"),
        ("[1, 2]}", f"[1, {'9' * 5000}]}}", 5, "is no finite number", "finite"),
        ("{kind: full}", "{kind: split-plot}", 6, "no factor that takes a restart", "`restart: true`"),
        ("design:", "gates: [V1, V1]\ndesign:", 6, "'V1' is there twice", "take one"),
    ],
)  # fmt: skip
def test_one_mistake_is_named_at_its_line(before: str, after: str, line: int, text: str, remedy: str) -> None:
    assert parse_study(SOUND).name == "sound"
    assert before in SOUND
    found = problems_of(SOUND.replace(before, after, 1))
    named = [one for one in found if one.line == line and text in one.text and remedy in one.remedy]
    assert named, "\n".join(one.at("study") for one in found)
    assert len(found) == 1 or before.startswith("study: sound"), [one.at("study") for one in found]


LAYERED = """\
study: layered
unit: {model: tiny}
factors:
  mode: {levels: [one, two]}
  link: {levels: [old, new], within: {mode: two}}
  tokens: {levels: [1000, 2000]}
design:
  kind: layered
  id: "{mode}-{tokens|k}"
  layers:
    - name: first
      patterns:
        - {at: {mode: one}, sweep: tokens}
"""


@pytest.mark.parametrize(
    ("pattern", "text", "remedy"),
    [
        ("{at: {mode: one}}", "no level of 'tokens' in a row", "design.defaults"),
        ("{at: {mode: three}, sweep: tokens}", "'mode' has no level 'three'", "its levels"),
        ("{at: {mode: one}, sweep: token}", "'token' is no factor", "did you mean 'tokens'?"),
        (
            "{at: {mode: one}, sweep: {tokens: [1000, 3000]}}",
            "'tokens' has no level 3000",
            "its levels: 1000, 2000",
        ),
        ("{at: {mode: one, link: old}, sweep: tokens}", "where it does not exist", "within mode = two only"),
        (
            "{at: {mode: one, tokens: 1000}, sweep: tokens}",
            "'tokens' is said twice",
            "one of for, sweep and at",
        ),
        ("{at: {mode: two}, for: link, sweep: tokens}", "the id 'two-1' is given to two rows", "into its id"),
        ('{id: "{mod}", at: {mode: one}, sweep: tokens}', "'mod' in the id", "did you mean 'mode'?"),
        ('{id: "{tokens|kk}", at: {mode: one}, sweep: tokens}', "no filter 'kk'", "did you mean 'k'?"),
        ('{id: "{link}", at: {mode: one}, sweep: tokens}', "needs 'link'", "give it another id"),
        ("{at: {mode: one}, sweep: {tokens: []}}", "no level of 'tokens'", "tokens: all"),
        ("{at: {mode: one}, sweeps: tokens}", "unknown key 'sweeps'", "did you mean 'sweep'?"),
    ],
)
def test_a_mistake_in_a_pattern_is_named_at_its_line(pattern: str, text: str, remedy: str) -> None:
    good = "{at: {mode: one}, sweep: tokens}"
    assert [one.id for one in parse_study(LAYERED).design.patterns] == ["one-1", "one-2"]
    found = problems_of(LAYERED.replace(good, pattern))
    assert [one.line for one in found] == [13], [one.at("study") for one in found]
    assert text in found[0].text
    assert remedy in found[0].remedy


def test_a_file_of_another_encoding_and_one_that_is_missing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_bytes(b"study: \xff\n")
    for name, text in ((path, "not UTF-8"), (tmp_path / "none.yaml", "cannot be read")):
        result = CliRunner().invoke(cli.lab, ["check", str(name)])
        assert result.exit_code == 2
        assert text in result.output
        assert "Traceback" not in result.output


BITS = (
    "on", "[", "]", "{", "}", ":", "\n", "  ", "- ", "~", "null", "1_0", "0", "-1", "'", '"', "x", "&a ",
    "*a", "!!x ", "|", "> ", "#", "é", "(", ")", "==", " and ", "not ", "{{", "[]", "{}", "true", "<<",
    "? ", "%", "@", "\t", "9" * 30,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_a_file_that_was_damaged_at_random_is_refused_or_read_and_never_breaks_the_reader(seed: int) -> None:
    rng = random.Random(seed)
    text = rng.choice([FIFTEEN, LAYERED, SOUND])
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text))
        end = start + rng.choice([0, 0, 1, 5, 12])
        text = text[:start] + rng.choice([*BITS, ""]) + text[end:]
    problems: tuple[Problem, ...] = ()
    try:
        summarise(parse_study(text))
        return
    except StudyError as error:
        problems = error.problems
    except LabError:
        return  # a sound file whose conditions have no value for some row
    assert problems
    lines = text.count("\n") + 2
    assert all(1 <= one.line <= lines and one.text and one.remedy for one in problems), text
