"""What holds of every store in Kubernetes, whether it comes of the manifests or of the chart."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import kvik
from tests.python.manifests import Workload, matches, workloads_of

Objects = Sequence[Mapping[str, Any]]
MI = 1 << 20
_UNITS = {"Mi": MI, "Gi": 1 << 30}
_ADDRESS = re.compile(r"(\[[^]]+\]|[^:]+):(\d+)")


def quantity(text: str) -> int:
    """Bytes, as Kubernetes writes them."""
    return int(text[:-2]) * _UNITS[text[-2:]]


def the(found: Objects, kind: str, component: str = "store") -> dict[str, Any]:
    """The one object of this kind and component."""
    (item,) = [
        item
        for item in found
        if item["kind"] == kind and item["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    return dict(item)


def servers(found: Objects) -> Workload:
    """The servers of the store."""
    return Workload(the(found, "StatefulSet"))


def given(workload: Workload) -> dict[str, str]:
    """The options of the container's command, by name; those that may come twice have the last one."""
    return {
        option: value for option, _, value in (word.partition("=") for word in workload.container["args"])
    }


def check_memory(found: Objects) -> None:
    """The limit has room for the blocks and for what the server needs besides, and is all asked for."""
    workload = servers(found)
    resources = workload.container["resources"]
    limit = quantity(resources["limits"]["memory"])
    # The engine's buffers (`memory_cap`, 256 MiB) and the process (100 MiB) at least.
    assert limit >= kvik.parse_size(given(workload)["--memory"]) + 356 * MI
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def check_log(found: Objects) -> None:
    """A log lies on a volume that it fits on, and that kvik's user may write to; or there is none."""
    workload, options = servers(found), given(servers(found))
    claims = workload.manifest["spec"].get("volumeClaimTemplates", [])
    assert ("--log" in options) == bool(claims)
    if not claims:
        return
    (claim,) = claims
    mounts = {mount["name"]: mount for mount in workload.container["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == {"name": "log", "mountPath": options["--log"]}
    volume = quantity(claim["spec"]["resources"]["requests"]["storage"])
    assert 10 * volume >= 11 * kvik.parse_size(options["--log-size"])
    security = workload.pod["securityContext"]
    assert security["fsGroup"] == security["runAsGroup"]


def check_clients(found: Objects) -> None:
    """Clients find every server, and by a name that stays where what a server keeps does."""
    workload, service = servers(found), the(found, "Service")
    config, options = the(found, "ConfigMap")["data"], given(servers(found))
    name, port = service["metadata"]["name"], workload.ports["kvik"]
    assert workload.manifest["spec"]["serviceName"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ipFamilyPolicy"] == "SingleStack"
    # A server that is not ready must not be found by the name.
    assert not service["spec"].get("publishNotReadyAddresses")
    assert config["servers"].split() == [
        f"{workload.name}-{number}.{name}:{port}" for number in range(workload.replicas)
    ]
    assert 1 <= int(config["copies"]) <= workload.replicas
    if "--etcd" in options:
        assert config["address"] == f"etcd:{options['--etcd']}"
        host, _, end = options["--etcd-name"].rpartition(":")
        assert host.startswith(f"$(POD_NAME).{name}.")
        assert host.endswith(".svc")
        assert int(end) == port
    elif "--log" in options or "--object" in options:
        assert config["address"] == "file:/etc/kvik/store/servers"
    else:
        assert config["address"] == f"dns:{name}:{port}"


def check_ending(found: Objects) -> None:
    """Clients by DNS have time to notice (5 s that an answer is kept, 5 s until kvik asks again), and what an
    object store is still to get has time (17 s), with some to spare."""
    pod, container = servers(found).pod, servers(found).container
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert int(seconds) >= 10
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + 17 + 10


def check_scraping(found: Objects) -> None:
    """The annotations lead to the metrics that are served, and the probes ask there."""
    workload = servers(found)
    annotations = workload.manifest["spec"]["template"]["metadata"]["annotations"]
    served = _ADDRESS.fullmatch(given(workload)["--metrics"])
    assert served is not None
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == served[2] == str(workload.ports["metrics"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = workload.container[probe]["httpGet"]
        assert get == {"path": annotations["prometheus.io/path"], "port": "metrics"}


def check_selectors(found: Objects) -> None:
    """What selects pods of the store selects them, and those of nobody else."""
    workload = servers(found)
    labels = {other.name: other.labels for other in workloads_of(dict(item) for item in found).values()}
    selectors = [
        workload.manifest["spec"]["selector"],
        {"matchLabels": the(found, "Service")["spec"]["selector"]},
    ]
    selectors += [spread["labelSelector"] for spread in workload.pod["topologySpreadConstraints"]]
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selectors += [
            item["spec"][key]
            for item in found
            if item["kind"] == kind and item["metadata"]["name"] == workload.name
        ]
    for selector in selectors:
        assert [name for name in labels if matches(selector, labels[name])] == [workload.name]


CHECKS = (
    check_memory, check_log, check_clients, check_ending, check_scraping, check_selectors,
)  # fmt: skip
