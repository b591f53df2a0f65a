"""The Kubernetes manifests are right: by their schemas, by each other, and by kvik's own command line.

What is not run here: no cluster applies them. `test_deploy_runs.py` and `test_deploy_store_runs.py` run their
commands on this machine, and `tests/vllm/test_deploy_vllm.py` gives vLLM's arguments to vLLM.
"""

import importlib.metadata
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from kvik.cli import main
from tests.python.manifests import FOLDER, KINDS, Workload, documents, matches, objects, with_log, workloads

VERSIONS = ("1.28", "1.32", "1.37")
SECONDS = 60.0
ALL = [pytest.param(kind, name, id=f"{kind}-{name}") for kind in KINDS for name in workloads(kind)]
STORE = "kvik-store"


@pytest.mark.parametrize(
    "file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: str(file.relative_to(FOLDER))
)
def test_schema(file: Path) -> None:
    """Every object is right for each of these versions of Kubernetes, with no field that it does not know."""
    for document in documents(file):
        if document["apiVersion"].startswith("kustomize"):
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def test_schema_finds_mistakes() -> None:
    """The validation above would find a misspelt field and a wrong type."""
    router = workloads("emulator")["kvik-router"].manifest
    for wrong in ({"replica": 2}, {"replicas": "two"}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**router, "spec": {**router["spec"], **wrong}}, "1.32", strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_objects_of_one_name(kind: str) -> None:
    """Nor is there a secret: a value is not applied from a file."""
    found = [(item["kind"], item["metadata"]["name"]) for item in objects(FOLDER / kind)]
    assert len(found) == len(set(found))
    assert not [item for item in found if item[0] == "Secret"]


def test_every_file_is_used() -> None:
    """A kustomization names every file beside it, and wholes all folders but that of the log."""
    used = {"store-log", *KINDS}
    for file in FOLDER.rglob("kustomization.yaml"):
        (kustomization,) = documents(file)
        named = [*kustomization.get("resources", ()), *kustomization.get("components", ())]
        assert {other.name for other in file.parent.iterdir()} - {file.name} <= set(named)
        used |= {name.removeprefix("../") for name in named if name.startswith("../")}
    assert used == {folder.name for folder in FOLDER.iterdir() if folder.is_dir()}


def test_no_secret_has_a_value() -> None:
    """The template says the name that is asked for, and no value."""
    (secret,) = documents(FOLDER / "secret.template.yaml")
    assert not {"data", "stringData"} & secret.keys()
    for kind in KINDS:
        for workload in workloads(kind).values():
            for entry in workload.container["env"]:
                source = entry.get("valueFrom", {}).get("secretKeyRef")
                assert "SECRET" not in entry["name"] or source == {
                    "name": secret["metadata"]["name"],
                    "key": "KVIK_SECRET",
                }


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The subcommand of `kvik` that these words name, and the words after its name."""
    command: click.Command = main
    while isinstance(command, click.Group):
        context = click.Context(command)
        found = command.get_command(context, words[0])
        assert found is not None, f"kvik has no command {words[0]!r}"
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("name", list(workloads("emulator-store")))
def test_arguments(name: str) -> None:
    """kvik's own command line takes every argument; the ports are those that the container declares."""
    workload = workloads("emulator-store")[name]
    command, words = command_of(workload.arguments({"POD_IP": "10.1.2.3"}))
    command.make_context(name, list(words))  # refuses what it does not know, and values that cannot be
    given = {option: value for option, _, value in (word.partition("=") for word in words)}
    if name != "kvik-router":
        assert given["--listen"] == f"10.1.2.3:{workload.ports['kvik']}"
    if name == STORE:
        assert given["--metrics"] == f"10.1.2.3:{workload.ports['metrics']}"
        return
    assert given["--host"] == "10.1.2.3"
    assert given["--port"] == str(workload.ports["http"])
    assert given.get("--role", "router") == workload.labels["app.kubernetes.io/component"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_knows_every_engine(kind: str) -> None:
    """Its URLs are those of all pods of the StatefulSets, by the services that give them names."""
    found = workloads(kind)
    services = {
        item["metadata"]["name"]: item["spec"] for item in objects(FOLDER / kind) if item["kind"] == "Service"
    }
    _, words = command_of(found["kvik-router"].arguments({"POD_IP": "10.1.2.3"}))
    for role in ("prefill", "decode"):
        engines = found[f"kvik-{role}"]
        service = engines.manifest["spec"]["serviceName"]
        (port,) = [port["port"] for port in services[service]["ports"] if port["name"] == "http"]
        assert services[service]["clusterIP"] == "None"
        assert [word.partition("=")[2] for word in words if word.startswith(f"--{role}=")] == [
            f"http://{engines.name}-{number}.{service}:{port}" for number in range(engines.replicas)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_services(kind: str) -> None:
    """Each selects the pods of one workload, and its ports are theirs. A headless one does not map ports."""
    found = workloads(kind)
    for service in (item for item in objects(FOLDER / kind) if item["kind"] == "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        (workload,) = [each for each in found.values() if matches(selector, each.labels)]
        assert workload.name == service["metadata"]["name"]
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        assert ports == workload.ports
        assert all(port["targetPort"] == port["name"] for port in service["spec"]["ports"])


@pytest.mark.parametrize(("kind", "name"), [each for each in ALL if STORE not in each.values])
def test_drain(kind: str, name: str) -> None:
    """The grace period, which also counts preStop, is longer than preStop and draining with 10 s to spare."""
    workload = workloads(kind)[name]
    (drain,) = [
        int(word.partition("=")[2])
        for word in workload.container["args"]
        if word.startswith(("--drain=", "--drain-timeout=", "--shutdown-timeout="))
    ]
    program, seconds = workload.container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert workload.pod["terminationGracePeriodSeconds"] == int(seconds) + drain + 10


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_pods_are_confined(kind: str, name: str) -> None:
    """No root, no privileges, no writable image, no token; bounded memory; probes of all three kinds."""
    workload = workloads(kind)[name]
    pod, container = workload.pod, workload.container
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostIPC", "hostPID", "shareProcessNamespace"} & pod.keys()
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    version = importlib.metadata.version("kvik")
    assert (
        container["image"]
        == ("kvik-vllm" if kind.startswith("vllm") and workload.is_engine else "kvik") + f":{version}"
    )
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["port"] == ("metrics" if name == STORE else "http")
    ready = container["readinessProbe"]["httpGet"]["path"]
    assert ready == ("/metrics" if name == STORE else "/health")
    mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounts == {volume["name"] for volume in pod.get("volumes", [])}


@pytest.mark.parametrize("kind", KINDS)
def test_network_policies(kind: str) -> None:
    """Who reaches which port, worked out from the rules: engines kvik, routers HTTP, clients the router."""
    found = workloads(kind)
    policies = [item["spec"] for item in objects(FOLDER / kind) if item["kind"] == "NetworkPolicy"]
    sources = {name: Source(workload.labels) for name, workload in found.items()}
    sources["client"] = Source({"app": "client"})
    sources["client of the store"] = Source(
        {"app.kubernetes.io/part-of": "kvik", "app.kubernetes.io/component": "store-client"}
    )
    sources["prometheus"] = Source({"app": "prometheus"}, "monitoring")
    reached = {
        (name, target.name, port)
        for target in found.values()
        for port in target.ports
        for name, source in sources.items()
        if _reaches(policies, source, target, port)
    }
    engines = ("kvik-prefill", "kvik-decode")
    expected = {
        *((source, target, "kvik") for source in engines for target in engines),
        *(("kvik-router", target, "http") for target in engines),
        *((source, "kvik-router", "http") for source in sources),
    }
    if STORE in found:
        expected |= {(source, STORE, "kvik") for source in (*engines, "client of the store")}
        expected |= {("prometheus", STORE, "metrics")}
    assert reached == expected


@dataclass(frozen=True)
class Source:
    """A pod that connects: its labels, and its namespace, if that is another one."""

    labels: dict[str, str]
    namespace: str = "here"

    def is_meant(self, peer: dict[str, Any]) -> bool:
        """Whether a peer of a rule takes it."""
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        namespace = {"kubernetes.io/metadata.name": self.namespace}
        if "namespaceSelector" in peer and not matches(peer["namespaceSelector"], namespace):
            return False
        if "namespaceSelector" not in peer and self.namespace != "here":
            return False
        return matches(peer.get("podSelector", {}), self.labels)


def _reaches(policies: list[dict[str, Any]], source: Source, target: Workload, port: str) -> bool:
    """A pod that a policy selects takes what a rule lets in; one that none selects takes everything."""
    own = [policy for policy in policies if matches(policy["podSelector"], target.labels)]
    if not own:
        return True
    rules = [rule for policy in own for rule in policy["ingress"]]
    return any(
        any(entry["port"] == port for entry in rule["ports"])
        and ("from" not in rule or any(source.is_meant(peer) for peer in rule["from"]))
        for rule in rules
    )


WHOLES = [(kind, log) for kind in KINDS for log in (False, True) if not log or kind.endswith("-store")]


@pytest.mark.parametrize(("kind", "log"), WHOLES)
def test_kustomize_builds(kind: str, log: bool, tmp_path: Path) -> None:
    """kubectl's kustomize makes the same objects of the files as this test reads."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on the path")
    folder = with_log(kind, tmp_path) if log else FOLDER / kind
    argv = [kubectl, "kustomize", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=True)

    def order(item: dict[str, Any]) -> str:
        return json.dumps([item["kind"], item["metadata"]["name"]])

    assert sorted(yaml.safe_load_all(done.stdout), key=order) == sorted(objects(folder), key=order)
