"""The driver `vllm`: the command of each engine of each arm, and what cannot be run. Servers are not started
here: they take a minute each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvik.roles.node import LocalNode
from kvik_lab.errors import LabError
from kvik_lab.run.build import PlannedStart, resolve, setup, stated, varied
from kvik_lab.run.drivers import DRIVERS, nixl
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


def test_a_store_is_started_and_asked_by_kviks_connector(tmp_path: Path) -> None:
    """Of a pair, and of one engine, which has no connector otherwise."""
    text = ARMS.replace("  load: {req", "  roles: {store: {options: {memory: 64MiB}}}\n  load: {req")
    text = text.replace("tcp, local, nixl]", "tcp]").replace("      local: {transport: local}\n", "")
    text = re.sub(r"      nixl: .*\n", "", text)
    for arm, (_, system) in systems(parse_study(text), tmp_path).items():
        (store,) = (part for part in system.parts if part.kind == "store")
        assert system.parts[0] is store
        for role in ("unified",) if arm == "unified" else ("prefill", "decode"):
            config = json.loads(flag(system, role, "--kv-transfer-config"))
            assert config["kv_connector_extra_config"]["store"] == {"address": store.url}
            assert config["kv_role"] == ("kv_both" if arm == "unified" else ROLES[role])


ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def test_what_the_arms_change_is_known_to_the_gates() -> None:
    assert set(varied(parse_study(ARMS))) == {"mode", "transport", "kv_connector", "UCX_TLS"}


@pytest.mark.parametrize(
    ("sets", "more"),
    [
        ("engines.env.PYTHONPATH: /other", {"PYTHONPATH", "kvik", "vllm", "nixl", "ucx"}),
        ("engines.node: other", {"python", "kvik", "vllm", "nixl", "ucx"}),
        ("engines.options.seed: 7", {"seed"}),
    ],
)
def test_programs_that_are_studied_are_known_to_the_gates(sets: str, more: set[str]) -> None:
    """Whatever leads an engine to another build lets versions differ, and nothing else does."""
    text = ARMS.replace("tcp: {transport: tcp}", f"tcp: {{transport: tcp, {sets}}}")
    text = text.replace(
        "  driver: vllm\n", "  driver: vllm\n  nodes: {other: {python: /opt/other/bin/python}}\n"
    )
    found = set(varied(parse_study(text)))
    assert more <= found
    assert ("vllm" in found) == ("vllm" in more)


@pytest.mark.parametrize(
    ("config", "backends"),
    [
        ({"kv_connector": "NixlConnector"}, "UCX"),
        ({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": []}}, "UCX"),
        ({"kv_connector": "NixlPushConnector", "kv_connector_extra_config": {"backends": ["GDS", "UCX"]}},
         "GDS,UCX"),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
            {"kv_connector": "KvikConnector"},
            {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}]}},
         "LIBFABRIC"),
        ({"kv_connector": "KvikConnector", "kv_connector_extra_config": {"backends": ["UCX"]}}, None),
        ({"kv_connector": "NixlConnector", "kv_connector_extra_config": "none"}, None),
        (["NixlConnector"], None),
    ],
)  # fmt: skip
def test_the_backends_are_those_that_the_configuration_names(config: object, backends: str | None) -> None:
    assert nixl.backends(json.dumps(config)) == backends
    assert nixl.backends(json.dumps(config)[:-1]) is None


def test_the_backends_are_a_setting_of_the_engines_that_use_nixl(tmp_path: Path) -> None:
    """And one that a factor changes only where both its levels use it."""
    found = systems(parse_study(ARMS), tmp_path)
    said = {
        arm: [part.settings.get("nixl_backends") for part in system.parts]
        for arm, (_, system) in found.items()
    }
    assert said["nixl"] == ["UCX", "UCX", None]
    assert {one for arm in ("unified", "tcp", "local") for one in said[arm]} == {None}
    own = json.dumps(
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}
    )
    both = ARMS.replace(
        "tcp: {transport: tcp}", f"tcp: {{transport: ucx, engines.options.kv_transfer_config: '{own}'}}"
    )
    _, system = systems(parse_study(both), tmp_path)["tcp"]
    assert [part.settings.get("nixl_backends") for part in system.parts] == ["LIBFABRIC", "LIBFABRIC", None]
    assert "nixl_backends" in varied(parse_study(both))
    assert "nixl_backends" not in varied(parse_study(ARMS))


def packages(folder: Path, version: str, ucx: str) -> Path:
    """A folder with NIXL's packages as they lie there, and with a UCX in them that knows its version."""
    libraries = folder / "nixl_cu12.libs"
    libraries.mkdir(parents=True)
    source, library = folder / "ucp.c", libraries / "libucp-0a1b2c3d.so.0.0.0"
    source.write_text(f'const char *ucp_get_version_string(void) {{ return "{ucx}"; }}')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    for name in ("nixl", "nixl_cu12"):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{library.relative_to(folder)},,\n" if "cu12" in name else "")
    return folder


def test_versions_of_nixl_are_those_that_its_engines_find(tmp_path: Path) -> None:
    """Beside the node's Python, where their environment leads; and of an arm without NIXL there are none."""
    first = packages(tmp_path / "first", "1.5.1", "1.20.0")
    second = packages(tmp_path / "second", "1.6.0", "1.21.0")
    nodes = {"local": LocalNode(sys.executable)}
    text = ARMS.replace("OMP_NUM_THREADS: 1", f"PYTHONPATH: {first}")
    driver = DRIVERS["vllm"]
    found = {
        arm: driver.code(system, nodes) for arm, (_, system) in systems(parse_study(text), tmp_path).items()
    }
    asked = {name: found["nixl"].get(name) for name in nixl.PROGRAMS}
    known = {"nixl": "1.5.1", "nixl-cu12": "1.5.1", "ucx": "1.20.0"}
    assert asked == dict.fromkeys(nixl.PROGRAMS) | known
    assert not {*nixl.PROGRAMS} & {*found["tcp"], *found["unified"]}
    assert found["tcp"]["kvik"] == found["nixl"]["kvik"]
    own = text.replace(
        "  load: {req", f"  roles: {{decode: {{env: {{PYTHONPATH: {second}}}}}}}\n  load: {{req"
    )
    own = own.replace("unified, ", "").replace("      unified: {mode: unified}\n", "")
    _, system = systems(parse_study(own), tmp_path)["nixl"]
    unlike = driver.code(system, nodes)
    assert unlike["nixl"] == "1.5.1 (prefill), 1.6.0 (decode)"
    assert unlike["ucx"] == "1.20.0 (prefill), 1.21.0 (decode)"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("model: /m, ", "", "has no model; write model: /path"),
        ("block_size: 32", "block_size: much", "block_size is 'much', and no whole number"),
        ("transport: ucx", "transport: tcp", "tcp is none of NIXL's; write transport: ucx"),
        (
            "  load: {req",
            "  roles: {store: {}}\n  load: {req",
            "kvik's connector asks it, and run.connector is nixl",
        ),
        (
            "unified: {mode: unified}",
            "unified: {mode: unified, connector: nixl, roles.store.count: 1}",
            "kvik's connector asks it, and run.connector is nixl; write connector: kvik, or take",
        ),
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
