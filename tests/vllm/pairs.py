"""A prefill engine, a decode engine and a router: started together, asked by hand or through the router."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, KV_BYTES_PER_TOKEN
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec, Role, start_router
from kvik.demo.reports import ReportReader
from kvik.roles.ports import LOOPBACK, free_ports
from kvik.roles.processes import Fleet, HttpServer, Process, descendants
from tests.netns.hosts import Host
from tests.python.peers import stop
from tests.vllm.adapter import ADAPTED, write_adapter
from tests.vllm.forked import ForkedServer, ForkParent
from tests.vllm.wire import Wire

ROOT = Path(__file__).parents[2]
ENGINES = ("prefill", "decode")
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
EXPIRY = 12.0  # seconds: how long an abandoned offer holds KV blocks in these tests
START_LIMIT = 300.0
COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
POLICY_WARNING = "kv_load_failure_policy is 'fail'"
ASK_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@dataclass(frozen=True)
class PairSpec:
    """How the engines of a pair differ from the plain ones.

    ranks: tensor-parallel ranks of prefill and decode. stages: their pipeline stages. both: each engine
    plays both roles, so that the pair can be turned round. With `secrets` they run on two hosts (network
    namespaces), and have these secrets: prefill's and decode's. wired: KV passes a `Wire`, and both engines
    may be killed and started again where they were. arguments, decode_arguments: more of both command
    lines, and of decode's. adapter: both have a LoRA adapter, `ADAPTED`. forked: from a process that has
    imported vLLM already, and not each by a command line of its own, which takes ten times as long.
    several: kvik's connector is one of two. unsaid: see `Unsaid`. mode: the router's transfer mode.
    """

    name: str
    prefix_caching: bool = False
    ranks: tuple[int, int] = (1, 1)
    stages: tuple[int, int] = (1, 1)
    both: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)
    secrets: tuple[str, str] | None = None
    wired: bool = False
    arguments: Sequence[str] = ()
    adapter: bool = False
    decode_arguments: Sequence[str] = ()
    forked: bool = True
    several: bool = False
    unsaid: bool = False
    mode: str = "pull"


@dataclass(frozen=True)
class Unsaid(Connector):
    """Says nothing of loads that fail, so that vLLM's own policy counts, which ends the request."""

    def config(self) -> str:
        """The JSON of `--kv-transfer-config`."""
        config = json.loads(super().config())
        del config["kv_load_failure_policy"]
        return json.dumps(config)


@dataclass(frozen=True)
class Several(Unsaid):
    """kvik's connector as the second of two of vLLM's `MultiConnector`, where only the whole has a policy."""

    def config(self) -> str:
        """The JSON of `--kv-transfer-config`."""
        beside = {
            "kv_connector": "BesideConnector",
            "kv_connector_module_path": "tests.vllm.beside_connector",
            "kv_role": self.role,
        }
        return json.dumps({
            "kv_connector": "MultiConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [beside, json.loads(super().config())]},
        })  # fmt: skip


Hosts = tuple[Host | None, Host | None]
THIS_HOST: Hosts = (None, None)


@dataclass
class Pair:
    """A running pair. `hosts` are prefill's and decode's; the router is where prefill is. `reports` are of
    what decode loads, `reverse` of what prefill does where it plays both roles."""

    spec: PairSpec
    prefill: HttpServer
    decode: HttpServer
    router: HttpServer
    reports: ReportReader
    reverse: ReportReader
    fleet: Fleet
    starts: Mapping[str, Callable[[], HttpServer]]
    hosts: Hosts = THIS_HOST
    wire: Wire | None = None

    def turned(self) -> "Pair":
        """The same engines the other way round; not for the router."""
        assert self.spec.both
        spec = replace(self.spec, ranks=self.spec.ranks[::-1], stages=self.spec.stages[::-1])
        return replace(
            self, spec=spec, prefill=self.decode, decode=self.prefill,
            reports=self.reverse, reverse=self.reports,
        )  # fmt: skip

    def near(self) -> contextlib.AbstractContextManager[None]:
        """Within the block this thread is where the router and both engines can be reached."""
        return _inside(self.hosts[0])

    def engines(self) -> tuple[HttpServer, HttpServer]:
        """Both engines."""
        return self.prefill, self.decode

    def stop(self) -> None:
        """Stop all of it."""
        self.fleet.stop()
        if self.wire is not None:
            self.wire.end()

    def begin_again(self, name: str) -> None:
        """Start an engine ("prefill" or "decode") that was killed anew, where it was."""
        old = getattr(self, name)
        if not old.alive:
            self.fleet.stop(old)
            new = self.fleet.add(self.starts[name]())
            new.wait_ready(time.monotonic() + START_LIMIT)
            setattr(self, name, new)

    def prefill_by_hand(self, prompt: list[int], **more: object) -> dict[str, object] | None:
        """Let the prefill engine compute a prompt; returns the `kv_transfer_params` of its answer."""
        payload = client.body(prompt, 1, kv_transfer_params=ASK_PREFILL, **more)
        params = client.post(self.prefill.url, payload)["kv_transfer_params"]
        assert params is None or isinstance(params, dict)
        return params

    def decode_by_hand(
        self,
        prompt: list[int],
        params: dict[str, object] | None,
        tokens: int,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Let the decode engine answer with the KV that the parameters name."""
        more = {} if cache_salt is None else {"cache_salt": cache_salt}
        payload = client.body(prompt, tokens, kv_transfer_params=params, **more)
        return client.tokens_of(client.post(self.decode.url, payload))

    def decode_computed(self) -> float:
        """Prompt tokens that the decode engine has computed itself so far, by its own count."""
        return client.metrics(self.decode.url)[COMPUTED]


@dataclass(frozen=True)
class Starting:
    """A pair whose engines were started and may not be up yet; it has no router so far."""

    spec: PairSpec
    folder: Path
    hosts: Hosts
    fleet: Fleet
    servers: Sequence[HttpServer]
    starts: Mapping[str, Callable[[], HttpServer]]
    router_port: int
    reports: Sequence[Path]
    wire: Wire | None

    def ready(self) -> Pair:
        """Wait for the engines, and start the router."""
        try:
            deadline = time.monotonic() + START_LIMIT
            with _inside(self.hosts[0]):
                for server in self.servers:
                    server.wait_ready(deadline)
                prefill, decode = self.servers
                started = start_router(
                    [prefill.url], [decode.url], self.router_port, self.folder, self.spec.mode
                )
                router = self.fleet.add(started)
                router.wait_ready(time.monotonic() + START_LIMIT)
        except BaseException:
            self.stop()
            raise
        reverse, forward = map(ReportReader, self.reports)
        return Pair(
            self.spec, prefill, decode, router, forward, reverse, self.fleet, self.starts, self.hosts,
            self.wire,
        )  # fmt: skip

    def stop(self) -> None:
        """Stop all of it."""
        self.fleet.stop()
        if self.wire is not None:
            self.wire.end()


def begin_pair(
    spec: PairSpec, model: Path, folder: Path, hosts: Hosts = THIS_HOST, parent: ForkParent | None = None
) -> Starting:
    """Start the engines side by side, each on its host, and wait for nothing.

    Without a `parent` to fork them they are started by their command lines, whatever the spec says.
    """
    begin = partial(start_engine, parent if spec.forked else None, model)
    folder.mkdir(parents=True)
    if spec.adapter:
        adapter = f"{ADAPTED}={write_adapter(folder / 'adapter')}"
        spec = replace(spec, arguments=[*spec.arguments, "--enable-lora", "--lora-modules", adapter])
    reports = [folder / f"{name}-loads.jsonl" for name in ENGINES]
    fleet = Fleet()
    wire = None
    try:
        with _inside(hosts[0]):
            *ports, router_port, kv_port = free_ports(4)
            wire = Wire(kv_port).begin() if spec.wired else None
            starts = {
                engine.name: partial(_start, partial(begin, engine, port, folder), host)
                for engine, host, port in zip(_engines(spec, reports, hosts, wire), hosts, ports, strict=True)
            }
            servers = [fleet.add(start()) for start in starts.values()]
    except BaseException:
        fleet.stop()
        if wire is not None:
            wire.end()
        raise
    return Starting(spec, folder, hosts, fleet, servers, starts, router_port, reports, wire)


def start_pair(
    spec: PairSpec, model: Path, folder: Path, hosts: Hosts = THIS_HOST, parent: ForkParent | None = None
) -> Pair:
    """As `begin_pair`; then wait for the engines, and start the router."""
    return begin_pair(spec, model, folder, hosts, parent).ready()


def start_engine(
    parent: ForkParent | None, model: Path, engine: EngineSpec, port: int, logs: Path
) -> HttpServer:
    """Start an engine: forked, or without a parent by its command line. It is up once `wait_ready`
    returns."""
    if parent is None:
        return engine.start(model, port, logs)
    return ForkedServer(parent, engine, model, port, logs)


def _start(begin: Callable[[], HttpServer], host: Host | None) -> HttpServer:
    with _inside(host):
        return begin()


def _engines(spec: PairSpec, reports: list[Path], hosts: Hosts, wire: Wire | None) -> list[EngineSpec]:
    """The prefill and the decode engine."""
    made = []
    for name, host, secret, ranks, stages, report in zip(
        ENGINES, hosts, spec.secrets or ("", ""), spec.ranks, spec.stages, reports, strict=True
    ):
        address = LOOPBACK if host is None else host.v4
        extra = {"expiry": EXPIRY, "listen": f"{address}:0", **spec.extra}
        if wire is not None:
            extra["transport"] = "tcp"
            if name == "prefill":
                extra |= {"listen": f"{address}:{wire.target}", "advertise": f"{address}:{wire.port}"}
        role: Role = "kv_both" if spec.both else "kv_producer" if name == "prefill" else "kv_consumer"
        kind = Several if spec.several else Unsaid if spec.unsaid else Connector
        writes = role != "kv_producer" or spec.mode == "stream"
        connector = kind(role, report if writes else None, extra=extra)
        env = {"KVIK_SECRET": secret} if secret else {}
        arguments = [*spec.arguments, *(spec.decode_arguments if name == "decode" else ())]
        if stages > 1:
            arguments += ["--pipeline-parallel-size", str(stages)]
        made.append(
            EngineSpec(
                name, connector, tensor_parallel=ranks, prefix_caching=spec.prefix_caching,
                host=address, env=env | {"PYTHONPATH": str(ROOT)} if spec.several else env,
                arguments=arguments,
            )
        )  # fmt: skip
    return made


def _inside(host: Host | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if host is None else host.inside()


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of random bytes."""
    rng = random.Random(seed * 1_000_003 + length)
    return [rng.randrange(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256) for _ in range(length)]


def blocks_of(length: int) -> int:
    """KV blocks of a prompt."""
    return -(-length // BLOCK_TOKENS)


def logged(engine: HttpServer, text: str) -> list[str]:
    """The lines of its log that have this text."""
    return [line for line in engine.log.read_text(errors="replace").splitlines() if text in line]


def used(engine: HttpServer) -> float:
    """The share of KV blocks in use, freshly counted.

    The engine updates the gauge only when it steps, so a request of one token makes it step.
    """
    client.complete(engine.url, [FIRST_BYTE_TOKEN], 1, cache_salt="nudge")
    return client.metrics(engine.url)[USAGE]


def wait_used(engine: HttpServer, level: float, within: float) -> None:
    """Wait until an engine uses no more KV blocks than `level`; fails when it still does after `within`
    seconds."""
    last = wait_for(lambda: used(engine), lambda value: value <= level, within)
    assert last <= level, (
        f"{engine.name} uses {last:.4%} of its KV blocks, {level:.4%} before\n{engine.tail()}"
    )


def wait_for(look: Callable[[], float], good: Callable[[float], bool], within: float) -> float:
    """Look again and again until the value is good or the time is up; returns the last value."""
    until = time.monotonic() + within
    value = look()
    while not good(value) and time.monotonic() < until:
        time.sleep(0.2)  # a gauge has no event to wait for
        value = look()
    return value


def freeze(process: Process) -> Callable[[], None]:
    """Stop a server and all its descendants; returns what lets them go on."""
    pids = descendants(process.pid)
    for pid in pids:
        stop(pid)

    def thaw() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    return thaw


def kill(process: Process) -> None:
    """Kill a server and all its descendants at once (SIGKILL), and wait until it is gone."""
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert process.wait(60.0) is not None, f"{process.name} was killed and is still there"
