"""The Helm chart: linted, rendered with several files of values, right by the schemas of Kubernetes and by
kvik's own command line, and the same as the manifests of `deploy/kubernetes` for the same settings.

Chart and manifests are both written by hand, and compared here: so the manifests can be read and applied
without helm, and where the two differ a test says so.
"""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.python import charts
from tests.python.charts import CHART, FILES, leaves, refused, rendered, schema_of, values
from tests.python.manifests import FOLDER, Workload, objects, with_log, workloads, workloads_of
from tests.python.pods import Cluster
from tests.python.store_checks import CHECKS, Objects
from tests.python.test_deploy import VERSIONS, command_of

EVERY = ("", *FILES)
NAMES = [name or "defaults" for name in EVERY]
WITH_STORE = [name for name in EVERY if name != "router-only"]
RESTART = "kubectl rollout restart " + " ".join(
    f"statefulset/{name}" for name, workload in workloads("emulator-store").items() if workload.is_engine
)
LOG_ON = "store.log.enabled=true"
# Labels that helm's own conventions ask for, and the manifests do without.
HELMS = {f"app.kubernetes.io/{name}" for name in ("instance", "managed-by", "name", "version")} | {
    "helm.sh/chart"
}


@pytest.fixture(autouse=True)
def _helm() -> None:
    charts.need_helm()


@pytest.mark.parametrize("name", EVERY, ids=NAMES)
def test_lint(name: str) -> None:
    """With this file of values helm finds nothing to say against the chart."""
    done = charts.helm("lint", "--strict", CHART, *(["--values", FILES[name]] if name else []))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", EVERY, ids=NAMES)
def test_schema(name: str) -> None:
    """Every object is right for each of these versions of Kubernetes, with no field that it does not know."""
    found = rendered(name, tests=True)
    assert len({(item["kind"], item["metadata"]["name"]) for item in found}) == len(found) >= 3
    for item in found:
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("name", WITH_STORE, ids=lambda name: name or "defaults")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("release", ["kvik", "prod"])
def test_the_store(name: str, release: str, check: Callable[[Objects], None]) -> None:
    check(rendered(name, release=release))


@pytest.mark.parametrize("name", EVERY, ids=NAMES)
def test_arguments(name: str) -> None:
    """kvik's own command line takes every argument, of the client that `helm test` starts, too."""
    found = rendered(name, tests=True)
    cluster = Cluster(found, {**Cluster().secrets, "bucket-credentials": {}})
    pods = [item for item in found if item["kind"] == "Pod"]
    some = [
        *workloads_of(found).values(),
        *(Workload({"metadata": {}, "spec": {"template": pod}}) for pod in pods),
    ]
    for workload in some:
        declared = cluster.environment(workload, "pod-0", "fd00::1" if name == "everything" else "10.1.2.3")
        command, words = command_of(workload.arguments(declared))
        command.make_context("kvik", list(words))  # refuses what it does not know, and values that cannot be


def plain(item: Any) -> Any:
    """An object without the labels that only helm gives it."""
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items() if key not in HELMS}
    return [plain(value) for value in item] if isinstance(item, list) else item


def by_name(found: Objects, *components: str) -> dict[tuple[str, str], Any]:
    """The objects of some components."""
    return {
        (item["kind"], item["metadata"]["name"]): plain(item)
        for item in found
        if item["metadata"]["labels"].get("app.kubernetes.io/component") in components
    }


@pytest.mark.parametrize("log", [False, True], ids=["memory", "log"])
def test_the_same_as_the_manifests(log: bool, tmp_path: Path) -> None:
    """Store and router of both are the same objects, but for labels."""
    folder = with_log("emulator-store", tmp_path) if log else FOLDER / "emulator-store"
    chart = by_name(rendered("log" if log else ""), "store", "router")
    assert len(chart) == 8
    assert chart == by_name(objects(folder), "store", "router")


def test_a_difference_would_be_found() -> None:
    """Of one value that is not the manifests'."""
    both = [by_name(rendered("", *sets), "store", "router") for sets in ((), ("store.memory=8GiB",))]
    assert [key for key in both[0] if both[0][key] != both[1][key]] == [("StatefulSet", "kvik-store")]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("store.memory=4Gi",), "4Gi' does not match pattern"),
        (("store.memroy=4GiB",), "'memroy' not allowed"),
        (("stroe.replicas=3",), "'stroe' not allowed"),
        (("store.replicas=two",), "got string, want integer"),
        (("store.object.url=https://bucket/kvik",), "/store/object/url"),
        (("store.object.url=s3://key@bucket/kvik",), "/store/object/url"),
        (("store.etcd=etcd.example:2379/kvik",), "/store/etcd"),
        (("router.prefill={prefill.example:8100}",), "/router/prefill/0"),
        (("store.extraArgs={metrics=0.0.0.0:1}",), "/store/extraArgs/0"),
        (("store.copies=3",), "store.copies is 3, and store.replicas 2"),
        (("secret.name=",), "a store demands a secret or TLS"),
        ((LOG_ON, "store.log.volumeSize=99GiB"), "volumeSize is 99GiB, less than store.log.size, 100GiB"),
        ((LOG_ON, "store.log.size=1TiB", "store.log.volumeSize=1023GiB"), "less than store.log.size, 1TiB"),
        (("router.decode=null",), "router.prefill and router.decode name the engines"),
        (("store.enabled=false", "router.enabled=false"), "there is nothing to install"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(sets: tuple[str, ...], said: str) -> None:
    """Refused before anything is made, with the name of the value and what is wrong."""
    assert said in refused(*sets)


@pytest.mark.parametrize(
    ("memory", "beside", "limit"),
    [
        ("4GiB", "1GiB", "5Gi"),
        ("1536MiB", "768MiB", "2304Mi"),
        ("1TiB", "512MiB", "1049088Mi"),
        ("1TiB", "1TiB", "2048Gi"),
    ],
)
def test_sizes(memory: str, beside: str, limit: str) -> None:
    """kvik's sizes become Kubernetes'."""
    found = workloads_of(rendered("", f"store.memory={memory}", f"store.memoryBeside={beside}"))
    assert found["kvik-store"].container["resources"]["limits"]["memory"] == limit


def test_what_is_off_is_not_there() -> None:
    """Neither its objects nor its test."""
    for name, gone in (("router-only", "store"), ("store-only", "router")):
        assert not by_name(rendered(name, tests=True), gone, "store-client" if gone == "store" else gone)
    kinds = {(item["kind"], item["metadata"]["name"]) for item in rendered("everything")}
    assert ("PodDisruptionBudget", "kvik-store") not in kinds
    assert ("NetworkPolicy", "kvik-router") not in kinds


def test_the_client_of_helm_test_is_known_to_etcd_as_servers_are() -> None:
    """It asks etcd for the servers: with the same variables, files, and group that may read them."""
    found = rendered("etcd-tls", tests=True)
    (test,) = [item for item in found if item["kind"] == "Pod"]
    (client,), server = test["spec"]["containers"], workloads_of(found)["kvik-store"]
    assert [entry for entry in client["env"] if entry["name"].startswith("ETCDCTL_")] == [
        entry for entry in server.container["env"] if entry["name"].startswith("ETCDCTL_")
    ]
    for mine, of_server in (
        (client["volumeMounts"], server.container["volumeMounts"]),
        (test["spec"]["volumes"], server.pod["volumes"]),
    ):
        assert [one for one in of_server if one["name"] == "etcd-client"]
        assert [one for one in of_server if one["name"] != "log"] == [
            one for one in mine if one["name"] != "store"
        ]
    assert test["spec"]["securityContext"]["fsGroup"] == server.pod["securityContext"]["fsGroup"]


def test_a_policy_for_nobody() -> None:
    """No clients and no readers of metrics: a policy that lets nobody in, not one that is missing."""
    (policy,) = [item for item in rendered("everything") if item["kind"] == "NetworkPolicy"]
    assert policy["spec"]["ingress"] == []
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_versions() -> None:
    """Chart and image are those of kvik, which the manifests use, too."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == importlib.metadata.version("kvik")
    # What the chart is checked against, and no older one, is what it says that it takes.
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_every_value_has_a_schema() -> None:
    """And a type, so that what is written wrongly is refused by name."""
    for name, _ in leaves(values()):
        schema = schema_of(name.split("."))
        assert {"type", "enum", "$ref"} & schema.keys(), name


@pytest.mark.parametrize("name", EVERY, ids=NAMES)
def test_notes(name: str, tmp_path: Path) -> None:
    """They name the address that clients are given."""
    said = charts.notes(tmp_path, *(["--values", FILES[name]] if name else []))
    config = [item for item in rendered(name) if item["kind"] == "ConfigMap"]
    assert all(item["data"]["address"] in said for item in config)
    assert ("helm test kvik" in said) == bool(config)
    assert (RESTART in said) == bool(config)
    assert ("service/kvik-router" in said) == (name != "store-only")


def test_the_docs_say_how_engines_take_another_address() -> None:
    """Their variables stay as they were at their start, and the chart has no engines to start again."""
    text = (CHART.parents[2] / "docs" / "deploy.md").read_text()
    assert RESTART in text.partition("**An upgrade**")[2].partition("\n## ")[0]


def test_the_table_of_the_docs() -> None:
    """It has every value, in the order of the file, with its default."""
    text = (CHART.parents[2] / "docs" / "deploy.md").read_text()
    table = text.partition("| value | default |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [(row[0].strip("| `"), row[1]) for row in rows] == [
        (name, written(default)) for name, default in leaves(values())
    ]


def written(default: Any) -> str:
    """A default, as the table has it; a long one is in the file."""
    text = default if isinstance(default, str) and default else json.dumps(default)
    return "see `values.yaml`" if len(text) > 40 else f"`{text}`"
