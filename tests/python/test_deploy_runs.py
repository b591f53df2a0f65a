"""The manifests' commands, running: each pod of the emulator's whole as a process with its own address.

Loopback addresses stand for those of the pods, and for the names that a cluster's DNS gives them. The
container files are checked by their text; an image is not built, because that takes a container engine and a
base image from a registry.
"""

import contextlib
import importlib.metadata
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvik.demo import client
from kvik.shapes import ModelShape
from tests.busy import Watch
from tests.python.manifests import FOLDER, workloads
from tests.python.pods import LIMIT, Pod, start

DEPLOY = FOLDER.parent
PROMPT = 100  # tokens


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    """All pods: engines first, then one router, each ready."""
    found = workloads("emulator")
    net = f"127.{random.randrange(64, 250)}.{random.randrange(250)}"  # else another test run has the port
    names = [f"{each.name}-{n}" for each in found.values() for n in range(each.replicas)]
    addresses = {name: f"{net}.{number}" for number, name in enumerate(names, 1)}
    folder = tmp_path_factory.mktemp("pods")
    order = [name for name in names if "router" not in name] + ["kvik-router-0"]
    running: dict[str, Pod] = {}
    urls = {f"{name}.{name.rpartition('-')[0]}:": f"{address}:" for name, address in addresses.items()}
    with contextlib.ExitStack() as stack:
        for name in order:
            workload = found[name.rpartition("-")[0]]
            running[name] = start(workload, name, addresses[name], folder, names=urls)
            stack.callback(running[name].kill)
        for pod in running.values():
            pod.wait_ready()
        yield running


def test_probes(pods: dict[str, Pod]) -> None:
    """Every probe of every pod is answered with 200."""
    for pod in pods.values():
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.probe(kind) == 200, (pod.name, kind)


def test_requests_are_handed_over(pods: dict[str, Pod]) -> None:
    """Through the router, with the secret: decode loads the KV of whole prompts and recomputes none."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests = 4
    for _ in range(requests):
        prompt = [rng.randrange(300, 30_000) for _ in range(PROMPT)]
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        answer: dict[str, Any] = client.post(pods["kvik-router-0"].url, body, timeout=LIMIT)
        assert answer["usage"]["completion_tokens"] == 8
    shape = ModelShape.preset("llama-3.1-8b")
    pages = -(-PROMPT // 16)
    loaded = [client.metrics(pods[f"kvik-decode-{n}"].url) for n in (0, 1)]
    assert sum(_value(each, "vllm:kvik_loaded_bytes_total") for each in loaded) == (
        requests * pages * shape.page_bytes(16)
    )
    assert [_value(each, "vllm:kvik_requests_recomputed_total") for each in loaded] == [0, 0]


def _value(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


def health_check(url: str) -> int:
    """The status with which the HEALTHCHECK of the container file ends."""
    text = (DEPLOY / "Containerfile").read_text()
    found = re.search(r"^HEALTHCHECK (?:.*\\\n\s*)*.*?CMD (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    program, *words = json.loads(found[1])
    assert program == "python"
    env = {"HEALTH_URL": url, "http_proxy": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, *words], env=env, timeout=LIMIT, check=False, capture_output=True)
    return done.returncode


def test_image_health_check(pods: dict[str, Pod]) -> None:
    """It succeeds where somebody answers, and fails where nobody does."""
    assert health_check(pods["kvik-router-0"].url + "/health") == 0
    assert health_check(pods["kvik-prefill-0"].url + "/health") == 0
    assert health_check(pods["kvik-prefill-0"].url + "/nothing") == 1
    assert health_check("http://127.0.0.1:1/health") == 1


def test_an_engine_that_goes(pods: dict[str, Pod]) -> None:
    """A pod ends by SIGTERM within its grace period; requests go on, and the router stays ready and alive."""
    gone = pods["kvik-prefill-1"]
    watch = Watch()
    gone.process.send_signal(signal.SIGTERM)
    assert gone.process.wait(LIMIT) == 0
    assert watch.seconds() < gone.workload.pod["terminationGracePeriodSeconds"]
    router = pods["kvik-router-0"]
    for _ in range(4):
        body = {"prompt": [300, 301, 302], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        answer: dict[str, Any] = client.post(router.url, body, timeout=LIMIT)
        assert answer["usage"]["completion_tokens"] == 4
    assert (router.probe("readinessProbe"), router.probe("livenessProbe")) == (200, 200)
    pods["kvik-prefill-0"].process.send_signal(signal.SIGTERM)
    assert pods["kvik-prefill-0"].process.wait(LIMIT) == 0
    body = {"prompt": [300], "max_tokens": 1}
    with pytest.raises(client.RequestError, match=r"50[234]"):
        client.post(router.url, body, timeout=LIMIT)
    # No requests for a router without engines, and no restart of it.
    deadline = time.monotonic() + LIMIT
    while router.probe("readinessProbe") != 503:
        assert time.monotonic() < deadline
        time.sleep(0.2)  # an answer of an engine counts for 10 s, and nothing tells when these are over
    assert router.probe("livenessProbe") == 200


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a container file, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines]


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.vllm"])
def test_container_file(name: str) -> None:
    """Known instructions, a user that is not root, nothing secret, and only the wheel comes in."""
    found = instructions(name)
    known = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in found} <= known
    assert [text for word, text in found if word == "USER"][-1] == "10001:10001"
    given = " ".join(text for word, text in found if word in ("ARG", "ENV", "RUN"))
    assert not re.search(r"SECRET|TOKEN|PASSWORD", given, re.IGNORECASE)
    stages = {text.split(" AS ")[1] for word, text in found if word == "FROM" and " AS " in text}
    for text in (text for word, text in found if word == "COPY"):
        if text.startswith("--from="):
            assert text.split()[0].removeprefix("--from=") in stages
        else:
            assert text == "kvik-*.whl /tmp/"
    for text in (text for word, text in found if word == "FROM"):
        assert text.split()[0] in ("python:3.12-slim", "${VLLM_IMAGE}")
    entry = json.loads(next(text for word, text in found if word == "ENTRYPOINT"))
    scripts = {script.name for script in importlib.metadata.distribution("kvik").entry_points}
    assert entry[0] in scripts or entry == ["vllm", "serve"]


def test_the_wheel_fits_the_base() -> None:
    """The base image's Python is one that the wheel is for."""
    (base,) = {text.split()[0] for word, text in instructions("Containerfile") if word == "FROM"}
    found = re.fullmatch(r"python:(\d+)\.(\d+)-slim", base)
    assert found is not None
    lowest = importlib.metadata.metadata("kvik")["Requires-Python"].removeprefix(">=")
    assert (int(found[1]), int(found[2])) >= tuple(map(int, lowest.split(".")))


def test_exposed_ports() -> None:
    """The image names the ports that the manifests use."""
    used = {port for workload in workloads("emulator").values() for port in workload.ports.values()}
    exposed = next(text for word, text in instructions("Containerfile") if word == "EXPOSE")
    assert {int(port) for port in exposed.split()} == used
