"""Loads that another tool sends: what of a specification it can express, its flags, and its result as that of
the lab's own driver.

A tool's warm-up is none that it records, so it is asked for as many requests more, of which the first ones
are the warm-up. Flags are those of the version that is installed: its `--help` is asked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kvik_lab.errors import LabError
from kvik_lab.load.importers import read_foreign
from kvik_lab.load.spec import Closed, Gamma, HuggingFace, LoadSpec, UntilSteady
from kvik_lab.load.summary import summarise
from kvik_lab.records import Client, LoadResult, Request, WarmUp
from kvik_lab.records.measures import Goals

SEEDS = 1 << 32  # that numpy has
HELP_LIMIT = 120.0  # seconds: vLLM alone takes ten to be imported
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
_FLAG = re.compile(r"--([a-z0-9][a-z0-9-]*)")
_OWN = {"turns": "no conversations", "search": "no search", "most_in_flight": "no bound of its own"}
_OF_PROMPTS = {"system": "no system message", "overhead": "no room for tokens that a server adds"}

INSTEAD = "take it away, or let the lab's own driver send the load (tool: builtin)"

Flags = dict[str, str | bool | list[str]]
"""By name, without dashes; True is the flag alone, and a list several words behind it."""


@dataclass(frozen=True)
class Tool:
    """A program of a Python package. `more` says what else it cannot express, as key and reason; `wanted`
    are flags of those versions that know them."""

    name: str
    package: str
    module: tuple[str, ...]
    help: tuple[str, ...]
    result: str
    flags: Callable[[LoadSpec, str, Path], Flags]
    more: Callable[[LoadSpec], Iterator[tuple[str, str]]]
    wanted: Mapping[str, str] = field(default_factory=dict)


def total(load: LoadSpec) -> int:
    """Requests that a tool sends: the warm-up's too."""
    return load.requests + (load.warmup if isinstance(load.warmup, int) else 0)


def _folder(load: LoadSpec) -> str:
    """The tokenizer's folder, of a load that was not refused."""
    path = Path(load.prompt.by.path if isinstance(load.prompt.by, HuggingFace) else "")
    return str(path.parent if path.suffix == ".json" else path)


def _vllm_flags(load: LoadSpec, model: str, folder: Path) -> Flags:
    prompt, arrival = load.prompt, load.arrival
    shared = 0 if prompt.shared is None else round(prompt.shared.share * prompt.tokens)
    found: Flags = {
        "backend": "openai", "base-url": load.url, "endpoint": "/v1/completions", "model": model,
        "tokenizer": _folder(load), "dataset-name": "random", "num-prompts": str(total(load)),
        "random-input-len": str(prompt.tokens - shared), "random-output-len": str(prompt.output),
        "seed": str(load.seed % SEEDS), "temperature": str(load.temperature), "ignore-eos": True,
        "disable-tqdm": True, "save-result": True, "save-detailed": True, "result-dir": str(folder),
        "result-filename": VLLM.result,
    }  # fmt: skip
    if isinstance(arrival, Closed):
        found["max-concurrency"] = str(arrival.concurrency)
    else:
        shape = {"constant": "inf", "poisson": "1"}.get(arrival.kind)
        found["burstiness"] = str(arrival.shape) if isinstance(arrival, Gamma) else str(shape)
        found["request-rate"] = str(getattr(arrival, "rate", 0.0))
    found |= {"random-prefix-len": str(shared)} if shared else {}
    found |= {"header": [f"{name}={value}" for name, value in load.headers.items()]} if load.headers else {}
    return found | ({"extra-body": json.dumps(load.body)} if load.body else {})


def _vllm_more(load: LoadSpec) -> Iterator[tuple[str, str]]:
    if "timeout" in load.model_fields_set:
        yield "timeout", "it has a time limit of its own"
    if load.prompt.shared is not None and load.prompt.shared.groups > 1:
        yield "prompt.shared.groups", "its random prompts have one beginning in common"


def _aiperf_flags(load: LoadSpec, model: str, folder: Path) -> Flags:
    count, arrival = str(total(load)), load.arrival
    body = {"ignore_eos": True, "temperature": load.temperature, **load.body}
    found: Flags = {
        "model": model, "url": load.url, "endpoint-type": "completions", "streaming": True,
        "tokenizer": _folder(load), "isl": str(load.prompt.tokens), "isl-stddev": "0",
        "osl": str(load.prompt.output), "osl-stddev": "0", "request-count": count,
        "num-dataset-entries": count, "dataset-sampling-strategy": "sequential",
        "random-seed": str(load.seed % SEEDS), "request-timeout-seconds": str(load.timeout),
        "extra-inputs": json.dumps(body), "use-server-token-count": True, "artifact-dir": str(folder),
        "ui": "none", "no-gpu-telemetry": True, "no-server-metrics": True,
    }  # fmt: skip
    if isinstance(arrival, Closed):
        found["concurrency"] = str(arrival.concurrency)
    else:
        found |= {"request-rate": str(getattr(arrival, "rate", 0.0)), "arrival-pattern": arrival.kind}
        found |= {"arrival-smoothness": str(arrival.shape)} if isinstance(arrival, Gamma) else {}
    return found | ({"header": json.dumps(load.headers)} if load.headers else {})


def _aiperf_more(load: LoadSpec) -> Iterator[tuple[str, str]]:
    if load.prompt.shared is not None:
        yield "prompt.shared", "what it puts before prompts makes them longer than prompt.tokens"


VLLM = Tool(
    "vllm-bench", "vllm", ("vllm.entrypoints.cli.main", "bench", "serve"), ("--help=all",), "result.json",
    _vllm_flags, _vllm_more,
    {"ready-check-timeout-sec": "0"},  # else older ones send one request more, which they do not record
)  # fmt: skip
AIPERF = Tool(
    "aiperf", "aiperf", ("aiperf", "profile"), ("--help",), "profile_export.jsonl", _aiperf_flags,
    _aiperf_more,
)  # fmt: skip
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (VLLM, AIPERF)}


def refused(load: LoadSpec) -> list[tuple[str, str]]:
    """Keys of a load that its tool cannot express, each with the reason; none of the lab's own driver."""
    if load.tool not in TOOLS:
        return []
    found = [*_no_arrival(load), *_no_prompt(load)]
    found += [(key, f"it has {what}") for key, what in _OWN.items() if key in load.model_fields_set]
    if load.endpoint == "chat":
        found.append(("endpoint", "a chat template's tokens would come on top of prompt.tokens"))
    if isinstance(load.warmup, UntilSteady):
        found.append(("warmup.until", "it looks at no times while it sends; write a number of requests"))
    if load.token_ids and "token_ids" in load.model_fields_set:
        found.append(("token_ids", "it counts messages of the stream, and not tokens"))
    found += TOOLS[load.tool].more(load)
    return [(key, f"{load.tool} cannot express it: {why}") for key, why in found]


def _no_arrival(load: LoadSpec) -> Iterator[tuple[str, str]]:
    if load.arrival.kind in ("rounds", "trace"):
        yield "arrival.kind", f"it has no arrivals of the kind {load.arrival.kind}"
    elif isinstance(load.arrival, Closed) and load.arrival.pause:
        yield "arrival.pause", "its users send the next request at once"


def _no_prompt(load: LoadSpec) -> Iterator[tuple[str, str]]:
    prompt = load.prompt
    if not isinstance(prompt.by, HuggingFace):
        yield "prompt.by", "it makes prompts by a tokenizer: write {kind: hf, path: FOLDER}"
    if prompt.unique != "prefix":
        yield "prompt.unique", "its prompts differ from the first token on"
    for key, what in _OF_PROMPTS.items():
        if key in prompt.model_fields_set:
            yield f"prompt.{key}", f"it has {what}"


@dataclass(frozen=True)
class Installed:
    """A tool as it is in an environment."""

    tool: Tool
    python: str
    version: str
    known: frozenset[str]

    def command(self, load: LoadSpec, model: str, folder: Path, more: Sequence[str] = ()) -> list[str]:
        """What sends the load, and writes its result into a folder. Raises `LabError` where this version
        lacks a flag that is needed."""
        said = [self.python, "-m", *self.tool.module]
        wanted = {name: value for name, value in self.tool.wanted.items() if name in self.known}
        for name, value in {**self.tool.flags(load, model, folder), **wanted}.items():
            if name not in self.known:
                raise LabError(
                    f"{self.tool.name}: {self.tool.package} {self.version} has no --{name}, without which "
                    "this load cannot be sent; install another version on the node of role load"
                )
            if isinstance(value, bool):
                said.append(f"--{name}")
            else:
                said += [f"--{name}", *([value] if isinstance(value, str) else value)]
        return [*said, *more]


@lru_cache(maxsize=16)
def installed(name: str, python: str) -> Installed:
    """The tool in the environment of a Python of this host. Raises `LabError` where it is not there."""
    tool = TOOLS[name]
    said = [
        _ask(tool, [python, *arguments])
        for arguments in (("-c", _VERSION, tool.package), ("-m", *tool.module, *tool.help))
    ]
    return Installed(tool, python, said[0].strip().rpartition("\n")[2], frozenset(_FLAG.findall(said[1])))


def _ask(tool: Tool, command: Sequence[str]) -> str:
    env = {**os.environ, "COLUMNS": "400"}  # a narrow help would break names of flags
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HELP_LIMIT, check=True, env=env
        )
    except subprocess.CalledProcessError as error:
        why = str(error.stderr).strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        return done.stdout
    raise LabError(
        f"{tool.name} is not in the environment of {command[0]}: {why}; install {tool.package} there, or "
        "give role load a node whose `python` has it"
    )


def read_result(found: Installed, load: LoadSpec, folder: Path, *, began: int, ended: int) -> LoadResult:
    """What the tool wrote, with every request. Raises `LabError` where some are not in it, or not when they
    were sent."""
    told = read_foreign(found.tool.name, folder / found.tool.result)
    requests = sorted(told.requests, key=lambda one: one.sent or 0.0)
    if len(requests) != total(load):
        raise LabError(f"{found.tool.name} recorded {len(requests)} requests of {total(load)}")
    if len(requests) > 1 and len({one.sent for one in requests}) == 1:  # each has a clock of its own
        raise LabError(
            f"{found.tool.name}: {found.tool.package} {found.version} does not record when requests were "
            "sent, without which rates are not known; install a newer version on the node of role load"
        )
    first = total(load) - load.requests
    requests = [_placed(one, at, first, load) for at, one in enumerate(requests)]
    measured = requests[first:]
    seconds = 0.0 if not first else (measured[0].sent or 0.0) - (requests[0].sent or 0.0)
    client = Client(
        driver=found.tool.name, version=found.version, target=load.url, seed=load.seed,
        load=load.model_dump(mode="json", exclude_defaults=True),
        warmup=WarmUp(rule="count", requests=first, seconds=max(0.0, seconds)),
    )  # fmt: skip
    goals = None if load.goals is None else Goals(**load.goals.model_dump())
    return LoadResult(
        began=began, ended=ended, client=client, requests=tuple(requests),
        figures=tuple(summarise(measured, goals)),
    )  # fmt: skip


def _placed(one: Request, at: int, first: int, load: LoadSpec) -> Request:
    phase = "warmup" if at < first else "measure"
    return one.model_copy(update={"iteration": at, "phase": phase, "output_tokens": load.prompt.output})
