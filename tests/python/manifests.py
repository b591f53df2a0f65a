"""The manifests of `deploy/kubernetes`, as far as tests look at them.

Which files make a whole, and what their containers are told: no cluster and no other program is needed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KINDS = ("emulator", "vllm")
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def documents(file: Path) -> list[dict[str, Any]]:
    """The objects in one file."""
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def objects(folder: Path) -> Iterator[dict[str, Any]]:
    """All objects of a kustomization: its files, and those of the folders that it names."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert kustomization.keys() == {"apiVersion", "kind", "resources"}, "this reader knows resources only"
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        yield from objects(path) if path.is_dir() else documents(path)


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet with its one container."""

    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name, which is also that of the service before it."""
        return str(self.manifest["metadata"]["name"])

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


def workloads(kind: str) -> dict[str, Workload]:
    """The Deployments and StatefulSets of a whole, by name."""
    found = [
        Workload(item) for item in objects(FOLDER / kind) if item["kind"] in ("Deployment", "StatefulSet")
    ]
    return {workload.name: workload for workload in found}


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True
