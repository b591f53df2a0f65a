"""The driver `vllm`: the command of each engine of each arm, and what cannot be run. Servers are not started
here: they take a minute each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvik.roles.node import LocalNode
from kvik_lab.errors import LabError
from kvik_lab.run.build import PlannedStart, resolve, setup, stated, varied
from kvik_lab.run.drivers import DRIVERS
from kvik_lab.run.drivers.system import System
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import Study, parse_study

ARMS = """
study: arms
unit: {model: tiny}
factors:
  arm:
    levels: [unified, tcp, local, nixl]
    restart: true
    sets:
      unified: {mode: unified}
      tcp: {transport: tcp}
      local: {transport: local}
      nixl: {connector: nixl, transport: ucx, engines.env.UCX_TLS: "tcp,self"}
model: log(ttft) ~ arm
design: {kind: full, starts: 1}
run:
  driver: vllm
  engines: {options: {model: /m, block_size: 32, enforce_eager: true}, env: {OMP_NUM_THREADS: 1}}
  load: {requests: 2, prompt: {tokens: 64, output: 3}}
"""


def systems(study: Study, folder: Path) -> dict[str, tuple[PlannedStart, System]]:
    """Of each arm what would be started."""
    found = {}
    for start in resolve(study, plan_slots(study)):
        made = setup(start, {"local": LocalNode(sys.executable)}, folder, "mark")
        found[str(start.runs[0].slot.levels["arm"])] = (start, DRIVERS["vllm"].system(made))
    return found


def flag(system: System, role: str, name: str) -> str:
    """The value of a flag of a role."""
    (part,) = (one for one in system.parts if one.role.name == role)
    command = part.role.command
    return command[command.index(name) + 1]


def test_each_arm_has_its_engines_and_connector(tmp_path: Path) -> None:
    """Unified is one engine and no router; the others a pair, with kvik's connector or vLLM's over NIXL."""
    found = systems(parse_study(ARMS), tmp_path)
    start, unified = found["unified"]
    assert [(part.kind, part.role.name) for part in unified.parts] == [("unified", "unified")]
    assert unified.target == unified.parts[0].url
    assert "--kv-transfer-config" not in unified.parts[0].role.command
    assert stated(start, start.runs[0], unified, ()).transport is None
    for arm, transport in (("tcp", "tcp"), ("local", "local"), ("nixl", "ucx")):
        start, system = found[arm]
        assert [part.kind for part in system.parts] == ["prefill", "decode", "router"]
        assert (system.entry, system.block_tokens) == ("router", 32)
        assert stated(start, start.runs[0], system, ()).transport == transport
        for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            config = json.loads(flag(system, role, "--kv-transfer-config"))
            assert config["kv_role"] == kv_role
            assert config["kv_load_failure_policy"] == "recompute"
            name = "NixlConnector" if arm == "nixl" else "KvikConnector"
            assert config["kv_connector"] == name
            if arm != "nixl":
                assert config["kv_connector_extra_config"]["transport"] == transport
            (part,) = (one for one in system.parts if one.role.name == role)
            assert part.role.env["OMP_NUM_THREADS"] == "1"
            assert {"--no-enable-prefix-caching", "--enforce-eager"} <= set(part.role.command)
            assert flag(system, role, "--block-size") == "32"
    sides = [part.role.env for part in found["nixl"][1].parts if part.kind in ("prefill", "decode")]
    assert len({env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for env in sides}) == 2
    assert {env["UCX_TLS"] for env in sides} == {"tcp,self"}
    assert "UCX_TLS" not in found["tcp"][1].parts[0].role.env


def test_what_the_arms_change_is_known_to_the_gates() -> None:
    assert set(varied(parse_study(ARMS))) == {"mode", "transport", "kv_connector", "UCX_TLS"}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("model: /m, ", "", "has no model; write model: /path"),
        ("block_size: 32", "block_size: much", "block_size is 'much', and no whole number"),
        ("transport: ucx", "transport: tcp", "tcp is none of NIXL's; write transport: ucx"),
        ("  load: {req", "  roles: {store: {}}\n  load: {req", "starts no store"),
        ("driver: vllm", "driver: emulator", "the emulator has kvik's transfers, and not nixl"),
    ],
)
def test_what_cannot_be_run_is_said_before_it_is(before: str, after: str, said: str) -> None:
    assert before in ARMS
    study = parse_study(ARMS.replace(before, after))
    with pytest.raises(LabError, match=said):
        resolve(study, plan_slots(study))


def test_a_role_s_own_goes_before_what_all_engines_have() -> None:
    own = "  roles: {decode: {options: {block_size: 16}, env: {OMP_NUM_THREADS: 2}}}\n  load: {req"
    text = ARMS.replace("levels: [unified, tcp,", "levels: [tcp,").replace(
        "      unified: {mode: unified}\n", ""
    )
    study = parse_study(text.replace("  load: {req", own))
    spec = resolve(study, plan_slots(study))[0].spec
    assert spec.role("decode").options == {"model": "/m", "block_size": 16, "enforce_eager": True}
    assert spec.role("decode").env["OMP_NUM_THREADS"] == 2
    assert spec.role("prefill").options["block_size"] == 32
    assert spec.role("router").options == {}
