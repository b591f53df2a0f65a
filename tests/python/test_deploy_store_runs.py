"""A store and its engines as the manifests have them, running: each pod with its arguments and variables as
they are, but for a longer deadline, in a file system that it cannot write to but where it has a volume,
without capabilities.

Loopback addresses stand for those of the pods; /etc/hosts of each pod says what the DNS of a cluster would.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvik.demo import client
from kvik.shapes import ModelShape
from tests.busy import Watch
from tests.python.manifests import FOLDER, objects, with_log, workloads_of
from tests.python.peers import until
from tests.python.pods import LIMIT, Cluster, Container, Pod, need_containers, start
from tests.python.store_checks import Objects

BLOCKS = 2  # of each prompt
TOKENS = 16 * BLOCKS + 8
PROMPTS = 24  # so that no server has none of them, but for one time in some millions
MODEL = "llama-3.1-8b"
SERVERS = ("kvik-store-0", "kvik-store-1")


class Whole:
    """The pods of a whole that were started."""

    def __init__(self, found: Objects, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        for item in found:
            if item["kind"] == "ConfigMap":  # what a request waits for its blocks: users have a second
                item["data"]["address"] += f",deadline={LIMIT:g}"
        self._cluster, self._workloads = Cluster(found), workloads_of(dict(item) for item in found)
        # Else another test run has the ports.
        net = f"127.{random.randrange(64, 250)}.{random.randrange(250)}"
        self._addresses = (f"{net}.{number}" for number in range(1, 250))
        self._containers: dict[str, Container] = {}
        self.pods: dict[str, Pod] = {}

    def start(self, *names: str) -> list[Pod]:
        """Start these pods, at addresses that none has had yet; of one that was there before volumes stay."""
        started = []
        for name in names:
            workload = self._workloads[name.rpartition("-")[0]]
            if name not in self._containers:
                self._containers[name] = Container(workload, self._cluster, self._folder / name)
            container, address = self._containers[name], next(self._addresses)
            pod = start(workload, name, address, self._folder, cluster=self._cluster, container=container)
            self._stack.callback(pod.kill)
            self.pods[name] = pod
            started.append(pod)
        self._tell_names()
        for pod in started:
            pod.wait_ready()
        return started

    def end(self, name: str) -> None:
        """A pod ends as the kubelet ends it, and its name goes before."""
        pod = self.pods.pop(name)
        self._tell_names()
        watch = Watch()
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(LIMIT) == 0
        assert watch.seconds() < pod.workload.pod["terminationGracePeriodSeconds"]

    def data(self, name: str) -> Path:
        """The volume of a pod."""
        return self._containers[name].data

    def _tell_names(self) -> None:
        lines = []
        for name, pod in self.pods.items():
            service = name.rpartition("-")[0]
            lines += [(pod.address, service), (pod.address, f"{name}.{service}")]
        for container in self._containers.values():
            container.names(lines)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[Path], Whole]]:
    """Makes a whole of a folder, whose pods end with the test."""
    need_containers()
    with contextlib.ExitStack() as stack:
        yield lambda folder: Whole(objects(folder), tmp_path, stack)


def prompts(seed: int) -> list[list[int]]:
    """Prompts that begin with different tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(300, 30_000) for _ in range(TOKENS)] for _ in range(PROMPTS)]


def compute(engine: Pod, some: Sequence[list[int]]) -> list[list[int]]:
    """What an engine answers."""
    asked = [client.body(prompt, 2, model=MODEL) for prompt in some]
    return [client.tokens_of(client.post(engine.url, body, LIMIT)) for body in asked]


def blocks(engine: Pod, *results: str) -> float:
    """Blocks of an engine that the store has taken, found, or had."""
    found = client.metrics(engine.url)
    return sum(found[f'kvik_emulator_store_blocks_total{{result="{result}"}}'] for result in results)


def kept(server: Pod, metric: str = "kvik_store_blocks") -> float:
    """Blocks that a server has, or another figure of it."""
    found = client.metrics(server.url_of("metrics"))
    return sum(value for name, value in found.items() if name.partition("{")[0] == metric)


def check_probes(pods: Sequence[Pod]) -> None:
    """Every probe of a server is answered with 200 once it serves."""
    for pod in pods:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.probe(kind) == 200, (pod.name, kind)


def put_and_found(whole: Whole, some: Sequence[list[int]]) -> list[list[int]]:
    """One engine puts, another one finds all of it: the answers, which are equal."""
    writer, reader = whole.start("kvik-prefill-0", "kvik-decode-0")
    answers = compute(writer, some)
    assert until(lambda: blocks(writer, "put", "known") >= PROMPTS * BLOCKS, LIMIT), writer.log.read_text()
    assert compute(reader, some) == answers
    assert blocks(reader, "hit") == PROMPTS * BLOCKS
    return answers


@pytest.mark.timeout(400)
def test_engines_share_a_store_by_dns(begin: Callable[[Path], Whole]) -> None:
    """Also with a server that has started again elsewhere, which engines follow by themselves."""
    whole = begin(FOLDER / "emulator-store")
    check_probes(whole.start(*SERVERS))
    put_and_found(whole, prompts(1))
    assert min(kept(whole.pods[name]) for name in SERVERS) > 0
    whole.end("kvik-store-1")
    (again,) = whole.start("kvik-store-1")
    assert kept(again) == 0
    seeds = iter(range(2, 1000))

    def reached() -> bool:
        compute(whole.pods["kvik-prefill-0"], prompts(next(seeds))[:4])
        return kept(again) > 0

    assert until(reached, LIMIT), "nothing was put to the server at its new address"


@pytest.mark.timeout(400)
def test_a_log_is_found_again_elsewhere(
    begin: Callable[[Path], Whole], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All servers start again at other addresses: what they had kept is looked for where it is."""
    whole = begin(with_log("emulator-store", tmp_path_factory.mktemp("overlay")))
    check_probes(whole.start(*SERVERS))
    answers = put_and_found(whole, prompts(1))
    nbytes = PROMPTS * BLOCKS * ModelShape.preset(MODEL).page_bytes(16)
    # What was put is written a moment later: nobody has waited for that.
    written = [whole.pods[name] for name in SERVERS]
    assert until(lambda: sum(kept(pod, "kvik_store_log_bytes") for pod in written) >= nbytes, LIMIT)
    for name in SERVERS:
        whole.end(name)
        assert any(whole.data(name).iterdir())
    check_probes(whole.start(*SERVERS))
    (fresh,) = whole.start("kvik-prefill-1")
    assert compute(fresh, prompts(1)) == answers
    assert blocks(fresh, "hit") == PROMPTS * BLOCKS


def test_containers_of_these_tests_are_confined(tmp_path: Path) -> None:
    """A server that wrote beside its volume, or needed a capability, would fail in them."""
    need_containers()
    found = objects(with_log("emulator-store", tmp_path))
    container = Container(workloads_of(found)["kvik-store"], Cluster(found), tmp_path / "pod")
    script = "touch /var/lib/kvik/x; for at in / /etc /var/lib /tmp; do touch $at/x; done"
    script += "; grep CapEff /proc/self/status"
    done = subprocess.run(
        container.command(["sh", "-c", script]), capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stderr.count("Read-only file system") == 4
    assert done.stdout.split() == ["CapEff:", "0" * 16]
    assert [file.name for file in container.data.iterdir()] == ["x"]
