"""Loads that another tool sends: real ones where they are installed, what they cannot express, and what their
runs are held to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvik_lab.errors import LabError
from kvik_lab.load import tools
from kvik_lab.load.spec import LoadSpec, parse_spec
from kvik_lab.load.tools import TOOLS, Installed, installed, read_result, refused
from kvik_lab.records.measures import ttft, ttft_from_send
from kvik_lab.run.build import resolve, varied
from kvik_lab.run.clients import served
from kvik_lab.run.slots import plan_slots
from kvik_lab.study import StudyError, parse_study
from tests.docs.pages import ROOT
from tests.lab.gates.scene import finding
from tests.lab.run import byte_tokenizer
from tests.lab.run.studies import PLAIN, processes, records, run, written

LOAD = {
    "url": "http://127.0.0.1:1", "arrival": {"kind": "closed", "concurrency": 2}, "requests": 5, "warmup": 2,
    "prompt": {"tokens": 640, "output": 4, "by": {"kind": "hf", "path": "/m"}},
}  # fmt: skip
OF_TOOL = """
  nodes: {{other: {{python: {python}}}}}
  roles: {{load: {{node: other}}}}
  load:
    tool: {tool}
    arrival: {{kind: closed, concurrency: 2}}
    requests: 5
    prompt: {{tokens: "{{tokens}}", output: 4, by: {{kind: hf, path: {folder}}}}}
"""
ARMS = """
study: arms
unit: {{model: tiny}}
factors:
  tool: {{levels: [builtin, aiperf], restart: true, sets: {{aiperf: {{load.tool: aiperf, {sets}}}}}}}
model: log(ttft) ~ tool
design: {{kind: full}}
warmup: {{until: count, min: 5}}
run:
  driver: emulator
  nodes: {{other: {{python: /opt/aiperf/bin/python}}}}
  load:
    arrival: {{kind: closed, concurrency: 4}}
    prompt: {{tokens: 1000, output: 16, by: {{kind: hf, path: /m}}}}
"""


def study(tool: str, python: str, folder: Path | str = "/m") -> str:
    """Two runs of one start, of prompts by a tokenizer."""
    text = PLAIN.replace("levels: [64, 256]", "levels: [640, 1280]").replace(
        "min: 1, max: 1", "min: 2, max: 2"
    )
    return text[: text.index("  load:")] + OF_TOOL.format(tool=tool, python=python, folder=folder).lstrip(
        "\n"
    )


def load(tool: str, **changes: Any) -> LoadSpec:
    """A load that both can send, and what is changed of it."""
    return parse_spec({**LOAD, "tool": tool, **changes})


def python_with(tool: str) -> str:
    """A Python that has it: KVIK_TEST_VLLM_PYTHON, KVIK_TEST_AIPERF_PYTHON, or the build's of vLLM."""
    package = TOOLS[tool].package
    places = [
        os.environ.get(f"KVIK_TEST_{package.upper()}_PYTHON"),
        str(ROOT / ".venv" / package / "bin" / "python"),
    ]
    found = next((one for one in places if one and Path(one).exists()), None)
    if found is None:
        pytest.skip(f"no Python that has {package}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_a_tool_sends_the_load_of_a_study(tool: str, tmp_path: Path) -> None:
    """Every request is recorded, those of the warm-up apart; what the tool does not see has not passed."""
    text = study(tool, python_with(tool), byte_tokenizer.write(tmp_path / "tokenizer"))
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, text), out)
    assert status == 0, said
    found = records(out)
    assert len(found) == 2
    for one in found.values():
        assert one.client is not None
        assert (one.client.driver, bool(one.client.version)) == (tool, True)
        assert one.client.warmup is not None
        assert one.client.warmup.requests == 2
        assert [request.phase for request in one.requests] == ["warmup"] * 2 + ["measure"] * 5
        assert all(request.ok and request.tokens for request in one.requests)
        assert all(ttft(request) == ttft_from_send(request) for request in one.requests)
        assert all(request.output_tokens_counted == 4 for request in one.requests)
        assert any(figure.metric == "load_ttft" for figure in one.figures)
        for gate in ("V1", "V2", "V3", "V4", "V7"):
            assert finding(one, gate).status == "passed", finding(one, gate)
        for gate in ("V6", "V9"):
            assert finding(one, gate).status in ("unchecked", "suspect"), finding(one, gate)
        merged = any(len(request.tokens) != 4 for request in one.requests)  # emulators do where all is busy
        said = "answers came in other messages than one a token"
        assert (said in finding(one, "V6").what) == merged
        if tool != "aiperf":
            assert "the server counted the tokens of 0 of 7 prompts" in finding(one, "V6").what
        elif not merged:
            assert f"not seen, as {tool} does not record it: whether prompts" in finding(one, "V6").what
    assert processes(out) == []


@pytest.mark.timeout(600)
def test_a_tool_that_is_not_installed_is_said_before_servers_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    out = tmp_path / "out"
    status, said = run("run", written(tmp_path, study("aiperf", str(python))), out)
    assert status == 1
    assert f"aiperf is not in the environment of {python}: " in said
    assert "install aiperf there, or give role load a node whose `python` has it" in said
    assert not list((out / "logs").glob("*/prefill.log"))


@pytest.fixture
def old(tmp_path: Path) -> Iterator[str]:
    """A Python with a program that knows one flag alone."""
    package = tmp_path / "packages" / "aiperf"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("print('  --model NAME   the model')")
    info = tmp_path / "packages" / "aiperf-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiperf\nVersion: 0.0.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    yield str(python)
    installed.cache_clear()


def test_flags_are_those_of_the_installed_version(old: str, tmp_path: Path) -> None:
    found = installed("aiperf", old)
    assert (found.version, set(found.known)) == ("0.0.1", {"model"})
    with pytest.raises(
        LabError, match=r"aiperf: aiperf 0\.0\.1 has no --url, without which this load cannot"
    ):
        found.command(load("aiperf"), "m", tmp_path)


def flags(tool: str, tmp_path: Path, **changes: Any) -> dict[str, str]:
    """The flags of a load with their values."""
    spec = load(tool, **changes)
    known = frozenset(TOOLS[tool].flags(spec, "m", tmp_path))
    command = Installed(TOOLS[tool], "python", "1", known).command(spec, "m", tmp_path, ["--more", "1"])
    assert command[-2:] == ["--more", "1"]
    pairs = zip(command, [*command[1:], "--"], strict=True)
    return {one[2:]: "" if two.startswith("--") else two for one, two in pairs if one.startswith("--")}


def test_a_specification_becomes_flags(tmp_path: Path) -> None:
    """Of each tool its own; the warm-up's requests are among those that it is asked for."""
    said = flags("vllm-bench", tmp_path, arrival={"kind": "gamma", "rate": 5.0, "shape": 0.5})
    assert (said["request-rate"], said["burstiness"], said["num-prompts"]) == ("5.0", "0.5", "7")
    assert "max-concurrency" not in said
    assert flags("vllm-bench", tmp_path, arrival={"kind": "constant", "rate": 5.0})["burstiness"] == "inf"
    shared = {**LOAD["prompt"], "shared": {"share": 0.25}}  # type: ignore[dict-item]
    said = flags("vllm-bench", tmp_path, prompt=shared, headers={"X-A": "b"}, body={"top_k": 1})
    assert (said["random-prefix-len"], said["random-input-len"]) == ("160", "480")
    assert (said["header"], said["extra-body"], said["max-concurrency"]) == ("X-A=b", '{"top_k": 1}', "2")
    assert flags("aiperf", tmp_path, headers={"X-A": "b"})["header"] == '{"X-A": "b"}'
    said = flags("aiperf", tmp_path, arrival={"kind": "poisson", "rate": 5.0}, timeout=9.0)
    assert (said["request-rate"], said["arrival-pattern"], said["request-count"]) == ("5.0", "poisson", "7")
    assert (said["isl"], said["osl"], said["request-timeout-seconds"]) == ("640", "4", "9.0")


def test_vllm_is_to_send_no_request_that_is_not_recorded(tmp_path: Path) -> None:
    """Older versions ask the server first whether it is ready, by the first prompt; others have no such
    flag."""
    spec = load("vllm-bench")
    needed = frozenset(TOOLS["vllm-bench"].flags(spec, "m", tmp_path))
    for more in (set(), {"ready-check-timeout-sec"}):
        tool = Installed(TOOLS["vllm-bench"], "python", "1", needed | more)
        said = tool.command(spec, "m", tmp_path, ["--more"])
        assert ("--ready-check-timeout-sec" in said) == bool(more)
        assert not more or said[-3:] == ["--ready-check-timeout-sec", "0", "--more"]


@pytest.mark.parametrize("times", [True, False])
def test_a_result_without_times_of_sending_is_refused(times: bool, tmp_path: Path) -> None:
    """Of older versions: each request would begin at 0, and rates would be those of the longest one."""
    spec = load("vllm-bench")
    told = {"duration": 7.0, "ttfts": [0.25] * 7, "itls": [[0.1]] * 7, "errors": [""] * 7}
    told |= {"start_times": [float(at) for at in range(7)]} if times else {}
    (tmp_path / "result.json").write_text(json.dumps(told))
    old = Installed(TOOLS["vllm-bench"], "python", "0.9.1", frozenset())
    if times:
        assert len(read_result(old, spec, tmp_path, began=0, ended=1).requests) == 7
        return
    with pytest.raises(LabError, match=r"vllm 0\.9\.1 does not record when .*; install a newer"):
        read_result(old, spec, tmp_path, began=0, ended=1)


@pytest.mark.parametrize(
    ("tool", "changes", "key"),
    [
        ("vllm-bench", {"arrival": {"kind": "rounds", "concurrency": 2}}, "arrival.kind"),
        ("aiperf", {"arrival": {"kind": "closed", "concurrency": 2, "pause": 1.0}}, "arrival.pause"),
        ("aiperf", {"turns": {"turns": 2, "new_tokens": 5}}, "turns"),
        ("aiperf", {"warmup": {"until": "changepoint"}}, "warmup.until"),
        ("vllm-bench", {"token_ids": True}, "token_ids"),
        ("vllm-bench", {"timeout": 5.0}, "timeout"),
        ("vllm-bench", {"most_in_flight": 5}, "most_in_flight"),
        ("aiperf", {"endpoint": "chat"}, "endpoint"),
        ("vllm-bench", {"prompt": {"tokens": 9}}, "prompt.by"),
        ("aiperf", {"prompt": {**LOAD["prompt"], "unique": "none"}}, "prompt.unique"),  # type: ignore[dict-item]
        ("aiperf", {"prompt": {**LOAD["prompt"], "overhead": 1}}, "prompt.overhead"),  # type: ignore[dict-item]
        ("aiperf", {"prompt": {**LOAD["prompt"], "shared": {"share": 0.5}}}, "prompt.shared"),  # type: ignore[dict-item]
    ],
)
def test_what_a_tool_cannot_express_is_refused_by_name(tool: str, changes: dict[str, Any], key: str) -> None:
    assert [one for one, _ in refused(load(tool, **changes))] == [key]
    assert refused(load("builtin", **changes)) == []
    assert refused(load(tool)) == []


def test_check_names_the_line_of_what_a_tool_cannot_express() -> None:
    """Of any level; and where the study's own warm-up looks at times."""
    text = study("aiperf", sys.executable).replace(
        "    requests: 5\n", "    requests: 5\n    most_in_flight: 3\n"
    )
    with pytest.raises(StudyError) as found:
        parse_study(text)
    (problem,) = found.value.problems
    assert problem.line == text.splitlines().index("    most_in_flight: 3") + 1
    assert "run.load.most_in_flight: aiperf cannot express it: it has no bound of its own" in problem.text
    assert problem.remedy == tools.INSTEAD
    text = study("aiperf", sys.executable)
    steady = parse_study(text.replace("count, min: 2, max: 2", "changepoint, min: 8, max: 9"))
    with pytest.raises(LabError, match=r"run\.load\.warmup\.until: aiperf cannot express it"):
        resolve(steady, plan_slots(steady))


def test_flags_of_a_load_that_no_command_takes_are_refused() -> None:
    """The lab's own load takes none, though it be that of one level only."""
    with pytest.raises(StudyError) as found:
        parse_study(ARMS.format(sets="load.warmup: 5") + "  roles: {load: {options: {seed: 3}}}\n")
    (problem,) = found.value.problems
    assert "run.roles.load.options: the lab's own load takes no flags" in problem.text
    assert "another tool" in str(problem.remedy)
    parse_study(study("aiperf", sys.executable).replace("{node: other}", "{node: other, options: {seed: 3}}"))


def test_a_server_is_asked_for_its_model_whatever_proxies_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load goes straight to it, too."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert served(f"http://127.0.0.1:{server.server_port}") == "tiny"
        finally:
            server.shutdown()
            thread.join()


class Models(BaseHTTPRequestHandler):
    """A server that names its models."""

    def do_GET(self) -> None:
        """Its list of them."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("sets", ["node: other", "env.PYTHONPATH: /other"])
def test_where_a_tool_is_found_lets_no_server_differ(sets: str) -> None:
    """What a factor changes of the load's node alone leads no server to another build."""
    assert varied(parse_study(ARMS.format(sets=f"roles.load.{sets}"))) == ()
    found = varied(parse_study(ARMS.format(sets="engines.node: other")))
    assert {"python", "kvik"} <= set(found)


def test_the_lab_s_own_driver_sends_no_other_s_load(tmp_path: Path) -> None:
    spec = tmp_path / "load.json"
    spec.write_text(load("aiperf").model_dump_json())
    command = [
        sys.executable,
        "-m",
        "kvik.cli",
        "lab",
        "load",
        "--spec",
        str(spec),
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tool: aiperf sends the load of a study" in done.stderr
