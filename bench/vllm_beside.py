"""What a handover costs vLLM with kvik's connector, and with vLLM's own over NIXL.

    PYTHONPATH=. .venv/vllm/bin/python bench/vllm_beside.py [--out beside.json] [--go-on]

Real vLLM servers on CPU, a prefill and a decode server at a time. The arms: `kvik`, kvik's connector;
`nixl`, vLLM's `NixlConnector`; `none`, a decode server without a connector, which computes each prompt
itself. On a CPU that connector pins its worker to the last core, so those of both servers to the same one
where they share a host, and its threads, which spin, too: `nixl` has that undone, `nixl-pinned` (not run
unless asked for) is as it comes. All run in one environment, that of the tests with NIXL beside it (made by
`tools/contenders.py nixl-in-vllm` where it is not there). Each start of an arm is fresh servers; a round is
one start of each arm, in random order, and asks all of them the same prompts in the same order.

A prompt is computed by prefill; decode is asked for it with what prefill answered, and then once more
without: it finds it in its own prefix cache. What the handover adds is the difference of both times to the
first token, as the client sees them. A prompt is a number of whole KV blocks and one token, so that decode
computes one token of it either way.

An arm is invalid when its tokens are not those of `none`, when decode has computed a prompt token that was
handed over, by vLLM's own count, when the connector's counters tell of a load that failed, or when a start
broke off: a server did not come up, or did not answer in time. CPU time is that of all processes of a server,
by their CPU clocks; cores are CPU seconds a second, and idle ones are counted two seconds after the last
answer, since vLLM's own queues spin for one.

Every start is written to `--out` when it has ended; `--go-on` does what is missing there. Exit status 1: an
arm is invalid. 2: the time is up, and starts are missing. The goal is stated: what kvik adds is at most 0.85
of what NIXL adds, by the upper end of the interval.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import importlib.metadata
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import kept
import vllm_beside_figures as figures
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import ASK_PREFILL, ROOT, START_LIMIT, start_engine
from vllm_engine import cpu_of
from without_autogroups import without_autogroups

from kvik.bench import facts
from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, ensure_checkpoint
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec, Role
from kvik.roles.ports import LOOPBACK, free_ports
from kvik.roles.processes import Fleet, HttpServer, ProcessError, descendants

LENGTHS = "513,2049,3457"  # tokens: whole KV blocks and one token
WARM_UP = 4  # prompts before those that count; the first one introduces the servers to each other
SETTLE = 2.0  # seconds; vLLM's own queues spin for one after the last answer
LIMIT = 60.0  # seconds in which a request has to end
INSTALL = 1800.0  # seconds to make NIXL's environment
COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
FAILURES = (
    "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:kvik_loads_failed_total", "vllm:kvik_requests_recomputed_total", "vllm:kvik_grants_expired_total",
)  # fmt: skip
MOVED = {"kvik": "vllm:kvik_loaded_bytes_total", "nixl": "vllm:nixl_bytes_transferred_sum"}
# What a server that does not come up, or does not answer in time, raises.
BREAKS = (OSError, http.client.HTTPException, client.RequestError, ProcessError)
# Settings that going on keeps.
OF_ONE_RUN = ("seed", "lengths", "prompts", "tokens", "transport", "cores", "arms", "nixl_threads")


@dataclass(frozen=True)
class Nixl(Connector):
    """vLLM's own connector over NIXL."""

    def config(self) -> str:
        """The JSON of `--kv-transfer-config`."""
        return json.dumps({
            "kv_connector": "NixlConnector", "kv_role": self.role, "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(self.extra),
        })  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """What decode does to have a prompt's KV. `moves`: by whom it is moved. pinned: threads stay where the
    connector has put them."""

    moves: str | None
    pinned: bool = False


ARMS = {
    "kvik": Arm("kvik"), "nixl": Arm("nixl"), "none": Arm(None), "nixl-pinned": Arm("nixl", pinned=True),
}  # fmt: skip
ASKED = "kvik,nixl,none"


@dataclass
class Servers:
    """Running servers; `prefill` is None where decode computes everything itself."""

    decode: HttpServer
    prefill: HttpServer | None

    def __post_init__(self) -> None:
        """Their processes, which stay the same."""
        named = {"prefill": self.prefill, "decode": self.decode}
        self._pids = {side: descendants(server.pid) for side, server in named.items() if server is not None}

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each side so far."""
        return {side: sum(map(cpu_of, pids)) for side, pids in self._pids.items()}

    def place(self, cores: Mapping[str, set[int]]) -> None:
        """Let all threads of a side run on its cores; threads to come inherit that."""
        for side, tid in self._threads():
            os.sched_setaffinity(tid, cores[side])

    def elsewhere(self, cores: Mapping[str, set[int]]) -> dict[str, int]:
        """How many threads of each side may run on other cores than its own, or not on all of them."""
        found = dict.fromkeys(self._pids, 0)
        for side, tid in self._threads():
            found[side] += os.sched_getaffinity(tid) != cores[side]
        return found

    def _threads(self) -> list[tuple[str, int]]:
        return [
            (side, int(task.name))
            for side, pids in self._pids.items()
            for pid in pids
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]

    def counters(self) -> dict[str, float]:
        """What the servers count of loads, both together; and what decode has computed."""
        found = {COMPUTED: 0.0}
        for side in (self.prefill, self.decode):
            if side is not None:
                counted = client.metrics(side.url)
                for name in (*FAILURES, *MOVED.values()):
                    found[name] = found.get(name, 0.0) + counted.get(name, 0.0)
        found[COMPUTED] = client.metrics(self.decode.url)[COMPUTED]
        return found


@contextlib.contextmanager
def servers_of(
    arm: Arm, parent: ForkParent, model: Path, folder: Path, settings: argparse.Namespace, packages: str
) -> Iterator[Servers]:
    """The servers of an arm, ready; they are stopped at the end."""
    folder.mkdir(parents=True)
    with Fleet() as fleet:
        *ports, one, other = free_ports(4)
        running = [
            fleet.add(start_engine(parent, model, spec, port, folder))
            for spec, port in zip(_specs(arm, settings, packages, (one, other)), ports, strict=False)
        ]
        deadline = time.monotonic() + START_LIMIT
        for server in running:
            server.wait_ready(deadline)
        decode, *prefill = running
        servers = Servers(decode, prefill[0] if prefill else None)
        if not arm.pinned:
            servers.place(cores_of(settings.cores))
        yield servers


def cores_of(placement: str) -> dict[str, set[int]]:
    """The cores of each side: all, or half of them, as if each had a host of its own."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    halves = (cores[:half], cores[half:]) if placement == "apart" else (cores, cores)
    return {side: set(part) for side, part in zip(("prefill", "decode"), halves, strict=True)}


def _specs(arm: Arm, settings: argparse.Namespace, packages: str, ports: tuple[int, int]) -> list[EngineSpec]:
    """Decode and, where the arm moves KV, prefill. `ports` are those by which NIXL's sides meet."""
    roles: Mapping[str, Role] = {"decode": "kv_consumer", "prefill": "kv_producer"}
    made = []
    for (side, role), port in zip(roles.items(), ports, strict=True):
        connector: Connector | None = None
        if arm.moves == "nixl":
            threads = settings.nixl_threads
            connector = Nixl(role, extra={} if threads is None else {"num_threads": threads})
        elif arm.moves == "kvik":
            connector = Connector(role, extra={"transport": "tcp"} if settings.transport == "tcp" else {})
        elif side == "prefill":
            continue
        env = {"PYTHONPATH": packages, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        made.append(EngineSpec(side, connector, env=env))
    return made


def plan_of(seed: int, start: int, lengths: Sequence[int], prompts: int) -> list[list[int]]:
    """The prompts of a round in the order in which they are asked, those of the warm-up first."""
    rng = random.Random(f"{seed}/{start}")  # noqa: S311 - a workload
    wanted = [length for length in lengths for _ in range(prompts)]
    rng.shuffle(wanted)
    wanted = [max(lengths)] * WARM_UP + wanted
    return [[rng.randrange(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256) for _ in range(size)] for size in wanted]


def ask(servers: Servers, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One prompt: prefill, its handover (or what is in its place), and the same from decode's own cache."""
    found: dict[str, Any] = {"length": len(prompt)}
    params: dict[str, Any] = {}
    cpu = [servers.cpu()]
    if servers.prefill is not None:
        began = time.monotonic()
        payload = client.body(prompt, 1, kv_transfer_params=ASK_PREFILL)
        params = {
            "kv_transfer_params": client.post(servers.prefill.url, payload, LIMIT)["kv_transfer_params"]
        }
        found["prefill_s"] = time.monotonic() - began
    cpu.append(servers.cpu())
    first = client.complete(servers.decode.url, prompt, tokens, timeout=LIMIT, **params)
    cpu.append(servers.cpu())
    again = client.complete(servers.decode.url, prompt, tokens, timeout=LIMIT)
    cpu.append(servers.cpu())
    found |= {"ttft_s": first.ttft, "cached_s": again.ttft, "total_s": first.total}
    found |= {"tokens": first.tokens, "cached_tokens": again.tokens}
    for name, (before, after) in zip(("prefill", "ttft", "cached"), pairwise(cpu), strict=True):
        found[f"{name}_cpu_s"] = {side: after[side] - before[side] for side in after}
    return found


def measure(servers: Servers, plan: list[list[int]], settings: argparse.Namespace) -> dict[str, Any]:
    """A start: warm-up, rest, requests. What came, and what vLLM counted."""
    warm = [ask(servers, prompt, settings.tokens) for prompt in plan[:WARM_UP]]
    time.sleep(SETTLE)  # rest has no event
    rest = _over(servers, lambda: time.sleep(settings.idle))
    before = servers.counters()
    requests: list[dict[str, Any]] = []
    busy = _over(
        servers,
        lambda: requests.extend(ask(servers, prompt, settings.tokens) for prompt in plan[WARM_UP:]),
    )
    after = servers.counters()
    return {
        "first_s": warm[0]["ttft_s"], "idle_cores": rest, "busy_cores": busy,
        "elsewhere": servers.elsewhere(cores_of(settings.cores)),
        "counted": {name: after[name] - before[name] for name in after}, "requests": requests,
    }  # fmt: skip


def _over(servers: Servers, work: Callable[[], object]) -> dict[str, float]:
    """Cores that each side, this program, and everybody else took while it was done."""
    began, cpu, ours, all_of = time.monotonic(), servers.cpu(), time.process_time(), _machine()
    work()
    seconds = time.monotonic() - began
    took = {side: value - cpu[side] for side, value in servers.cpu().items()}
    took["client"] = time.process_time() - ours
    took["others"] = _machine() - all_of - sum(took.values())
    return {name: value / seconds for name, value in took.items()}


def _machine() -> float:
    """CPU seconds of the whole machine that were not idle."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def expected_computed(lengths: Sequence[int], arm: Arm) -> int:
    """Prompt tokens that decode has to compute for these prompts, each asked for twice."""
    cached = sum(length - (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths)
    return cached if arm.moves else cached + sum(lengths)


def faults_of(cell: Mapping[str, Any], arm: Arm) -> list[str]:
    """Why a start says nothing of its arm."""
    counted = cell["counted"]
    lengths = [request["length"] for request in cell["requests"]]
    found = [f"{name} {counted[name]:g}" for name in FAILURES if counted.get(name)]
    wanted = expected_computed(lengths, arm)
    if counted[COMPUTED] != wanted:
        found.append(f"decode computed {counted[COMPUTED]:g} prompt tokens, not {wanted}")
    if arm.moves and not counted[MOVED[arm.moves]]:
        found.append(f"{arm.moves} has moved nothing")
    if any(request["tokens"] != request["cached_tokens"] for request in cell["requests"]):
        found.append("decode answers otherwise from its own cache")
    return found


@dataclass
class Run:
    """All starts; what is done is in `raw`, and in its file."""

    settings: argparse.Namespace
    raw: dict[str, Any]

    def missing(self) -> list[tuple[int, str]]:
        """Starts that are to come, in their order."""
        ended = [*self.raw["cells"], *self.raw.get("broken", ())]
        done = {(cell["start"], cell["arm"]) for cell in ended}
        found = []
        for start in range(self.settings.starts):
            arms = list(self.settings.arms)
            random.Random(f"{self.settings.seed}/order/{start}").shuffle(arms)  # noqa: S311 - an order
            found += [(start, arm) for arm in arms if (start, arm) not in done]
        return found

    def go(self) -> bool:
        """Do them; whether the time sufficed."""
        end = time.monotonic() + self.settings.minutes * 60
        model, packages = ensure_checkpoint(), nixl_packages()
        versions = {"vllm": importlib.metadata.version("vllm"), "nixl": nixl_version(packages)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_autogroups())
            kept.note_facts(self.raw, facts.collect() | versions)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-beside-")))
            parent = stack.enter_context(ForkParent(folder))
            for start, name in self.missing():
                if time.monotonic() > end:
                    return False
                self.keep(
                    start, name, functools.partial(self._one, start, name, parent, model, folder, packages)
                )
        return True

    def keep(self, start: int, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """One start, kept and told of; also one that broke off, which ends nothing but itself."""
        began = time.monotonic()
        try:
            cell = work()
        except BREAKS as error:
            broken = {"start": start, "arm": name, "why": f"{type(error).__name__}: {error}"}
            self.raw.setdefault("broken", []).append(broken)
            print(f"start {start} {name}: broke off: {broken['why']}", flush=True)
        else:
            cell["seconds"] = time.monotonic() - began
            self.raw["cells"].append(cell)
            self._tell(cell)
        kept.write(self.settings.out, self.raw)

    def _one(
        self, start: int, name: str, parent: ForkParent, model: Path, folder: Path, packages: str
    ) -> dict[str, Any]:
        settings, arm = self.settings, ARMS[name]
        plan = plan_of(settings.seed, start, settings.lengths, settings.prompts)
        with servers_of(arm, parent, model, folder / f"{start}-{name}", settings, packages) as servers:
            cell = {"start": start, "arm": name, **measure(servers, plan, settings)}
        cell["faults"] = faults_of(cell, arm)
        return cell

    def _tell(self, cell: Mapping[str, Any]) -> None:
        medians = figures.medians(cell)
        said = ", ".join(f"{length}: {1e3 * value:.2f} ms" for length, value in medians.items())
        faults = "; ".join(cell["faults"])
        print(
            f"start {cell['start']} {cell['arm']}: adds {said} ({cell['seconds']:.0f} s) {faults}", flush=True
        )


@functools.cache
def nixl_packages() -> str:
    """The folder with NIXL's packages, made where it is not there."""
    command = [sys.executable, str(ROOT / "tools" / "contenders.py"), "nixl-in-vllm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"NIXL cannot be installed:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1].partition(": ")[2]


def nixl_version(packages: str) -> str:
    """The version of NIXL in that folder."""
    for found in importlib.metadata.distributions(name="nixl", path=[packages]):
        return found.version
    raise SystemExit(f"no NIXL in {packages}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="of each arm")
    parser.add_argument("--prompts", type=int, default=30, help="of each length, in each start")
    parser.add_argument("--lengths", default=LENGTHS, type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--tokens", type=int, default=4, help="that each answer has")
    parser.add_argument("--arms", default=ASKED, type=lambda text: text.split(","))
    parser.add_argument(
        "--transport", choices=("auto", "tcp"), default="auto",
        help="auto: what kvik and UCX choose on one host; tcp: TCP for both, as between hosts",
    )  # fmt: skip
    parser.add_argument(
        "--cores", choices=("shared", "apart"), default="shared",
        help="apart: prefill has the first half of the cores, decode the other, as on two hosts",
    )  # fmt: skip
    parser.add_argument(
        "--nixl-threads", type=int, help="NIXL's threads of a worker; default: as vLLM has it"
    )
    parser.add_argument("--idle", type=float, default=3.0, help="seconds of rest in each start")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further start begins")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--out", type=Path, help="file of the raw data, JSON")
    parser.add_argument("--go-on", action="store_true", help="do what is missing in the file of the raw data")
    parser.add_argument("--table", action="store_true", help="only print the table of the raw data")
    settings = parser.parse_args()
    unknown = set(settings.arms) - ARMS.keys()
    if unknown:
        parser.error(f"no such arm: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if (settings.go_on or settings.table) and settings.out is None:
        parser.error("--go-on and --table take --out")
    if settings.cores == "apart" and len(os.sched_getaffinity(0)) < 2:
        parser.error("one core cannot be halved")
    return settings


def main() -> int:
    settings = parse()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # servers are stopped on the way
    if settings.go_on or settings.table:
        raw = kept.read(settings.out, settings, OF_ONE_RUN)
    else:
        raw = kept.begun(settings, OF_ONE_RUN)
    enough = True
    if not settings.table:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = LOOPBACK
        if settings.transport == "tcp":
            os.environ["UCX_TLS"] = "tcp"
        print(f"seed {settings.seed}, {len(Run(settings, raw).missing())} starts", flush=True)
        enough = Run(settings, raw).go()
    print(figures.report(raw))
    if figures.invalid(raw):
        return 1
    return 0 if enough else 2


if __name__ == "__main__":
    sys.exit(main())
