"""`run` of a study file: levels put in, and mistakes with their place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvik.roles.node import LocalNode, Node
from kvik_lab.design.factor import Level
from kvik_lab.errors import LabError
from kvik_lab.load.spec import LoadSpec, UntilSteady
from kvik_lab.run import execute, told
from kvik_lab.run.build import TEMPLATE, Planned, resolve, servers, setup, stated, varied
from kvik_lab.run.clients import Client, Seen
from kvik_lab.run.drivers import DRIVERS
from kvik_lab.run.drivers.system import System
from kvik_lab.run.nodes import client_node
from kvik_lab.run.slots import plan_slots
from kvik_lab.run.spec import RunSpec
from kvik_lab.study import Study, StudyError, parse_study
from kvik_lab.study.programs import PutError, put_levels
from tests.lab.run.studies import SMALL

LINKED = """
study: linked
unit: {model: tiny}
constants: {answer: 5}
factors:
  mode: {levels: [together, apart], restart: true, sets: {together: {mode: unified}}}
  link:
    levels: [near, far]
    within: {mode: apart}
    restart: true
    sets:
      near: {link.rate: 100mbit}
      far: {link.rate: 400mbit, link.delay: 0.02, roles.decode.env.KVIK_CHANNELS: 2}
  tokens: {levels: [64, 256], scale: log2}
  users: {levels: [1, 2]}
model: log(ttft) ~ mode/link * tokens + users
design: {kind: full, starts: 2, blocks: 2, anchors: {at: {tokens: 64, users: 1}, every: 4}}
run:
  driver: emulator
  load:
    arrival: {kind: closed, concurrency: "{users}"}
    prompt: {tokens: "{tokens}", output: "{answer}"}
    headers: {X-Levels: "tokens={tokens} users={users}"}
"""


def linked(text: str = LINKED) -> Study:
    """The study."""
    return parse_study(text)


def test_levels_are_put_in() -> None:
    """As what they are where they stand alone, as text within text, and by path."""
    study = linked()
    assert study.program is not None
    row: dict[str, Level | None] = {"mode": "apart", "link": "far", "tokens": 256, "users": 2}
    spec = put_levels(study.program, row, study.constants)
    assert spec.load["prompt"] == {"tokens": 256, "output": 5}
    assert spec.load["headers"] == {"X-Levels": "tokens=256 users=2"}
    assert spec.mode == "disaggregated"
    assert spec.link is not None
    assert (spec.link.rate, spec.link.delay) == ("400mbit", 0.02)
    assert spec.roles["decode"].env == {"KVIK_CHANNELS": 2}
    alone = put_levels(study.program, {**row, "mode": "together", "link": None}, study.constants)
    assert (alone.mode, alone.link, alone.roles) == ("unified", None, {})


def test_what_factors_change_is_known_to_the_gates() -> None:
    """Flags and variables, and the mode; not the load."""
    assert set(varied(linked())) == {"mode", "KVIK_CHANNELS"}
    assert varied(parse_study(SMALL)) == ("compute",)


@pytest.mark.parametrize(("measured", "metric"), [("log(tpot)", "tpot"), ("throughput", "ttft")])
def test_the_study_s_warm_up_is_that_of_each_load(measured: str, metric: str) -> None:
    """By count, unless until says changepoint: then of what the model is of, where a request has that."""
    steady = UntilSteady(until="changepoint", min=9, max=20, metric=metric)
    for until, expected in (
        ("until: count, min: 1, max: 1", 1),
        ("until: changepoint, min: 9, max: 20", steady),
    ):
        text = SMALL.replace("until: count, min: 1, max: 1", until).replace("log(ttft)", measured)
        study = parse_study(text)
        found = [run.load for start in resolve(study, plan_slots(study)) for run in start.runs]
        assert [load.warmup for load in found] == [expected] * 8


def test_slots_are_those_of_the_plan_each_time() -> None:
    """The same ids, order and levels, with anchors; no id comes twice."""
    study = linked()
    first, second = plan_slots(study), plan_slots(linked())
    assert first == second
    slots = [slot for start in first for slot in start.slots]
    assert len({slot.id for slot in slots}) == len(slots)
    assert [slot.order for slot in slots] == list(range(len(slots)))
    assert len([slot for slot in slots if not slot.anchor]) == 2 * 3 * 2 * 2
    anchors = [slot for slot in slots if slot.anchor]
    assert anchors
    assert all(slot.levels["tokens"] == 64 and slot.levels["mode"] is not None for slot in anchors)
    planned = resolve(study, first)
    loads = [run.load for start in planned for run in start.runs]
    seeds = [load.seed for load in loads if isinstance(load, LoadSpec)]
    assert len(set(seeds)) == len(seeds) == len(loads)


@pytest.mark.parametrize(
    ("said", "held_to"), [("nics", "nics"), ("local", "local"), ("auto", None)], ids=["nics", "local", "auto"]
)
def test_a_transport_is_stated_where_one_is_demanded(said: str, held_to: str | None) -> None:
    """`auto` takes what is there, and V7 is asked nothing."""
    study = parse_study(SMALL.replace("transport: tcp", f"transport: {said}"))
    start = resolve(study, plan_slots(study))[0]
    assert stated(start, start.runs[0], System((), "router", "", 16), ()).transport == held_to


def test_what_a_study_states_is_put_in_for_each_run() -> None:
    """By levels that share a start; it is no part of what makes runs replicates."""
    sets = "{levels: [64, 256], sets: {256: {stated.ttft_floor: 0.5}}, scale: log2}"
    text = SMALL.replace("{levels: [64, 256], scale: log2}", sets)
    text += '  stated: {prefix_hit_share: "{share}", unified_ttft: "{one}"}\n'
    study = parse_study(text.replace("factors:", "constants: {share: 0.5, one: 2}\nfactors:"))
    start = resolve(study, plan_slots(study))[0]
    found = {
        run.slot.levels["tokens"]: stated(start, run, System((), "router", "", 16), ()) for run in start.runs
    }
    assert {tokens: one.ttft_floor for tokens, one in found.items()} == {64: None, 256: 0.5}
    for one in found.values():
        assert (one.prefix_hit_share, one.store_hit_share, one.unified_ttft) == (0.5, 0.0, 2.0)
    assert all("stated" not in servers(run.spec) for run in start.runs)


def test_runs_of_one_start_have_one_system() -> None:
    """A factor that changes servers takes a restart."""
    study = parse_study(SMALL.replace("    restart: true\n", "").replace("starts: 2, blocks: 2", "starts: 2"))
    with pytest.raises(LabError, match=r"write `restart: true` at what changes them \(of .*speed"):
        resolve(study, plan_slots(study))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("driver: emulator", "driver: sglang", "run.driver: input should be 'emulator'"),
        ("{users}", "{user}", "'user' is no factor and no constant"),
        ("link.delay: 0.02", "link.delay: -1", "greater than or equal to 0"),
        ("far: {link.rate", "fast: {link.rate", "'link' has no level 'fast'"),
        ("link.rate: 400mbit", "link.rat: 400mbit", "run.link.rat: unknown key"),
        ("driver: emulator", "driver: emulator\n  stated: {ttft: 1}", "run.stated.ttft: unknown key"),
        (
            "driver: emulator",
            'driver: emulator\n  stated: {prefix_hit_share: "{users}"}',
            "run.stated.prefix_hit_share: input should be less than or equal to 1",
        ),
    ],
)
def test_mistakes(before: str, after: str, said: str) -> None:
    """Each level is tried when the file is read."""
    assert before in LINKED
    with pytest.raises(StudyError) as found:
        parse_study(LINKED.replace(before, after))
    assert said in str(found.value)


@pytest.mark.parametrize(
    ("node", "load", "said"),
    [
        (
            "{executor: ssh}",
            "",
            "study:18:10: run.nodes.one: `executor: ssh` and `host: user@address` go together",
        ),
        (
            "{host: a@b}",
            "",
            "run.nodes.one: `executor: ssh` and `host: user@address` go together; write both",
        ),
        ("{executor: ssh, host: a@b}", "load: {node: one}", "give it a local node"),
        ("{executor: slurm}", "load: {node: one}", "give it a local node"),
        ("{executor: ray, options: [GPU]}", "", "run.nodes.one: GPU: no resource of Ray's and its amount"),
        ("{executor: slurm, host: one}", "", "Slurm is asked for a host by options"),
    ],
)
def test_hosts_that_cannot_be_used(node: str, load: str, said: str) -> None:
    """Before anything is started."""
    more = f"  driver: emulator\n  nodes:\n    one: {node}\n  roles: {{{load}}}\n"

    def read() -> None:
        study = parse_study(SMALL.replace("  driver: emulator\n", more))
        resolve(study, plan_slots(study))

    with pytest.raises(LabError, match=said):
        read()


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("load: {count: 3}", "run.roles.load: count is 3, and one is started"),
        ("router: {count: 2}", "run.roles.router: count is 2, and one is started"),
        ("router: {count: 0}", "run.roles.router: count is 0, and one is started"),
        ("store: {count: 2}", "run.roles.store: count is 2, and one is started"),
        ("load: {nodes: [x]}", "run.roles.load: no node 'x'; the nodes are local"),
        ("store: {count: 0}, load: {count: 1}", None),
    ],
)
def test_of_some_roles_there_is_one(roles: str, said: str | None) -> None:
    """More are refused, as none would be started."""
    study = parse_study(f"{SMALL}  roles: {{{roles}}}\n")
    if said is None:
        assert resolve(study, plan_slots(study))
        return
    with pytest.raises(LabError, match=said):
        resolve(study, plan_slots(study))


def test_the_load_is_on_the_first_of_its_nodes() -> None:
    """As of every role; and what its programs are found by is a factor's, by whichever key it is said."""
    spec = RunSpec.model_validate({"driver": "emulator", "roles": {"load": {"nodes": ["b", "a"]}}})
    assert client_node(spec) == "b"
    more = "  nodes: {slow: {python: /a/python}, fast: {python: /b/python}}\n"
    more += '  roles: {decode: {nodes: ["{speed}"]}}\n'
    text = SMALL[: SMALL.index("    sets:")] + SMALL[SMALL.index("  tokens:") :] + more
    assert {"python", "kvik"} <= set(varied(parse_study(text)))


def test_where_kvik_is_not_no_engine_is_one_of_its() -> None:
    """A host of other engines is no host that is lost."""
    command = [sys.executable, "-I", "-S", told.__file__, "mark"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr


def test_the_load_has_the_variables_of_its_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever program it is."""
    made = Client(["sh", "-c", 'echo "$WHO $HOW"'], lambda said: cast(Seen, said.strip()), {"HOW": "so"})
    monkeypatch.setattr(execute, "client", lambda *_: made)
    spec = RunSpec.model_validate({"driver": "emulator", "roles": {"load": {"env": {"WHO": 5}}}})
    run = SimpleNamespace(spec=spec, slot=SimpleNamespace(id="r1"))
    graph = SimpleNamespace(dead=tuple)
    nodes = {"local": LocalNode(sys.executable)}
    up = SimpleNamespace(nodes=nodes, logs=tmp_path, system=None, name="s1", mark="m", graph=graph)
    said: object = execute._load(cast(execute.Up, up), cast(Planned, run))
    assert said == "5 so"


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("turns: {turns: 3, new_tokens: 50}", 256 + 3 * 3 + 2 * 50),
        ("turns: {turns: 3, new_tokens: 50}\n    endpoint: chat", 256 + 3 * 3 + 2 * (50 + TEMPLATE)),
        ("arrival: {kind: trace, file: TRACE, scale_tokens: 0.5}", 1000 + 1),
        ("arrival: {kind: trace, file: /nowhere}", 259),
    ],
    ids=["turns", "chat", "trace", "no trace"],
)
def test_engines_have_room_for_the_longest_of_a_load(tmp_path: Path, more: str, tokens: int) -> None:
    """A conversation's last turn, and a trace's own lengths: emulated engines refuse what does not fit."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 500 * at, "output_length": 2} for at in range(1, 5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    text = f"{SMALL}    {more.replace('TRACE', str(trace))}\n"
    if "chat" in more:
        text = text.replace("output: 3}", "output: 3, by: {kind: bytes}}")
    study = parse_study(text)
    assert {start.most_tokens for start in resolve(study, plan_slots(study))} == {tokens}


def test_what_is_not_said() -> None:
    """A study without `run` cannot be run, and one whose factors set something has to have it."""
    text = SMALL[: SMALL.index("run:")]
    with pytest.raises(StudyError, match="'speed' sets something, and the study has no run"):
        parse_study(text)
    plain = parse_study(text[: text.index("    sets:")] + text[text.index("  tokens:") :])
    with pytest.raises(LabError, match="nothing says what is to be run"):
        resolve(plain, plan_slots(plain))
    study = linked()
    assert study.program is not None
    with pytest.raises(PutError, match="'tokens' does not exist in a row"):
        put_levels(study.program, {"mode": "together", "tokens": None, "users": 1}, study.constants)


MODELS = """
study: models
unit: {kv_dtype: bfloat16}
factors:
  model: {levels: [tiny, llama-3.1-8b]}
  tokens: {levels: [64, 256]}
model: log(ttft) ~ model + tokens
design: {kind: full, starts: 1}
run: {driver: emulator, load: {requests: 2, prompt: {tokens: "{tokens}", output: 3}}}
"""
RESTARTED = MODELS.replace("8b]}", "8b], restart: true}")


def test_servers_have_one_model() -> None:
    """So a factor of models takes a restart, and each start has its own."""
    with pytest.raises(LabError, match=r"write `restart: true` at what changes them \(of model\)"):
        resolve(parse_study(MODELS), plan_slots(parse_study(MODELS)))
    study = parse_study(RESTARTED)
    assert {start.model for start in resolve(study, plan_slots(study))} == {"tiny", "llama-3.1-8b"}


def test_what_follows_from_a_model_and_its_parts_is_varied() -> None:
    """An emulator's memory is made for them."""
    assert {"model_shape", "kv_memory"} <= set(varied(parse_study(RESTARTED)))
    assert not {"model_shape", "kv_memory"} & set(varied(parse_study(SMALL)))
    parts = SMALL.replace("prefill.options.compute", "decode.options.tp")
    parts = parts.replace('"prefill_token=0.0004"', "1").replace('"prefill_token=0.0001"', "2")
    assert "kv_memory" in varied(parse_study(parts))
    assert "model_shape" not in varied(parse_study(parts))


def emulated(text: str, folder: Path, nodes: Mapping[str, Node]) -> System:
    """The system of a study's first start."""
    study = parse_study(text)
    (first, *_) = resolve(study, plan_slots(study))
    return DRIVERS["emulator"].system(setup(first, nodes, folder, "mark"))


def test_pages_of_another_length_are_counted_as_such(tmp_path: Path) -> None:
    """What gates take hits and margins by, and what memory is made for."""
    nodes = {"local": LocalNode(sys.executable)}
    usual, longer = (
        SMALL,
        SMALL.replace("  transport", "  engines: {options: {page_tokens: 64}}\n  transport"),
    )
    systems = [emulated(text, tmp_path, nodes) for text in (usual, longer)]
    assert [one.block_tokens for one in systems] == [16, 64]
    (memory, more) = ([part.settings.get("kv_memory") for part in one.parts] for one in systems)
    assert memory != more


def test_versions_are_those_of_the_engines(tmp_path: Path) -> None:
    """Each with its engines where nodes have unlike ones; a store and a router are no engines."""
    nodes = {"local": LocalNode(sys.executable), **{name: LocalNode(sys.executable) for name in ("a", "b")}}
    text = SMALL.replace(
        "  transport", "  nodes: {a: {}, b: {}}\n  roles: {decode: {node: b}, store: {}}\n  transport"
    )
    system = emulated(text, tmp_path, nodes)
    said = {"local": "1.0", "b": "2.0"}
    asked = {name: cast("Node", Saying(name, json.dumps(said.get(name, "?")))) for name in nodes}
    assert DRIVERS["emulator"].code(system, asked) == {"kvik": "1.0 (prefill), 2.0 (decode)"}


@dataclass(frozen=True)
class Saying:
    """A node whose Python says what it is told to."""

    name: str
    answer: str
    python: str = "python"

    def run(self, _command: Sequence[str]) -> str:
        """The answer."""
        return self.answer
