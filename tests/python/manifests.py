"""The manifests of `deploy/kubernetes`, as far as tests look at them.

Which files make a whole, what is changed in them, and what their containers are told: no cluster and no other
program is needed.
"""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KINDS = ("emulator", "vllm", "emulator-store", "vllm-store")
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def documents(file: Path) -> list[dict[str, Any]]:
    """The objects in one file."""
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def objects(folder: Path) -> list[dict[str, Any]]:
    """All objects of a kustomization: its files, those of the folders that it names, and what it changes."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    return _changed(list(_resources(folder, kustomization)), folder, kustomization)


def with_log(kind: str, folder: Path) -> Path:
    """A kustomization in this folder that gives the store of a whole its log, as the component says."""
    there = {"resources": [FOLDER / kind], "components": [FOLDER / "store-log"]}
    # kustomize takes paths that are relative only.
    text = {key: [os.path.relpath(path, folder.resolve()) for path in paths] for key, paths in there.items()}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


def _resources(folder: Path, kustomization: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        yield from objects(path) if path.is_dir() else documents(path)


def _changed(
    found: list[dict[str, Any]], folder: Path, kustomization: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """These objects with the components and patches of a kustomization."""
    known = {"apiVersion", "kind", "resources", "components", "patches"}
    assert kustomization.keys() <= known, "this reader knows no more"
    for name in kustomization.get("components", ()):
        path = (folder / name).resolve()
        (component,) = documents(path / "kustomization.yaml")
        assert component["kind"] == "Component"
        found = _changed([*found, *_resources(path, component)], path, component)
    for patch in kustomization.get("patches", ()):
        target, operations = patch["target"], yaml.safe_load(patch["patch"])
        hit = [
            item["kind"] == target["kind"] and re.fullmatch(target["name"], item["metadata"]["name"])
            for item in found
        ]
        assert any(hit), f"{folder.name} changes what is not there: {target}"
        found = [_patched(item, operations) if so else item for item, so in zip(found, hit, strict=True)]
    return found


def _patched(item: dict[str, Any], operations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """An object after the operations of a JSON patch (RFC 6902)."""
    item = copy.deepcopy(item)
    for operation in operations:
        *way, last = operation["path"].removeprefix("/").split("/")
        at: Any = item
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        if operation["op"] == "add" and last == "-":
            at.append(operation["value"])
        else:
            assert operation["op"] == ("replace" if last in at else "add"), operation
            at[last] = operation["value"]
    return item


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet with its one container."""

    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name, which is also that of the service before it."""
        return str(self.manifest["metadata"]["name"])

    @property
    def is_engine(self) -> bool:
        """Whether its pods are serving engines."""
        return self.labels["app.kubernetes.io/component"] in ("prefill", "decode")

    @property
    def replicas(self) -> int:
        """How many pods it has."""
        return int(self.manifest["spec"]["replicas"])

    @property
    def pod(self) -> dict[str, Any]:
        """The specification of its pods."""
        spec: dict[str, Any] = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods."""
        labels: dict[str, str] = self.manifest["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def container(self) -> dict[str, Any]:
        """The one container."""
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        """The container's ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def arguments(self, variables: Mapping[str, str]) -> list[str]:
        """The container's arguments, with `$(NAME)` expanded as the kubelet does; all must be declared."""
        declared = {entry["name"] for entry in self.container["env"]}
        used = {name for text in self.container["args"] for name in _REFERENCE.findall(text)}
        assert used <= declared, f"{self.name}: {used - declared} would stay as they are"
        return [_REFERENCE.sub(lambda match: variables[match[1]], text) for text in self.container["args"]]


def workloads_of(found: Iterable[dict[str, Any]]) -> dict[str, Workload]:
    """The Deployments and StatefulSets among objects, by name."""
    some = [Workload(item) for item in found if item["kind"] in ("Deployment", "StatefulSet")]
    return {workload.name: workload for workload in some}


def workloads(kind: str) -> dict[str, Workload]:
    """The Deployments and StatefulSets of a whole, by name."""
    return workloads_of(objects(FOLDER / kind))


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True
