"""The manifests of a store, alone and with engines that use it: sizes, names, and what engines are told."""

from collections.abc import Callable
from pathlib import Path

import kubernetes_validate
import pytest

from kvik.emulator.store_option import parse_store
from kvik.serving_cache.config import CacheConfig
from tests.python.manifests import FOLDER, KINDS, Workload, objects, with_log, workloads_of
from tests.python.pods import Cluster
from tests.python.store_checks import CHECKS, Objects, the
from tests.python.test_deploy import VERSIONS

STORES = [(kind, log) for kind in KINDS if kind.endswith("-store") for log in (False, True)]


@pytest.fixture
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """All objects of a whole, with the store's log or without."""
    kind, log = request.param
    return objects(with_log(kind, tmp_path) if log else FOLDER / kind)


every_store = pytest.mark.parametrize(
    "whole", STORES, indirect=True, ids=lambda store: f"{store[0]}{'-with-log' if store[1] else ''}"
)


@every_store
def test_schema(whole: Objects) -> None:
    """What patches have made of an object is right, too."""
    for item in whole:
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)


@every_store
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_store(whole: Objects, check: Callable[[Objects], None]) -> None:
    check(whole)


@every_store
def test_engines_are_told_of_the_store(whole: Objects) -> None:
    """By variables that kvik reads, and with the file that a `file:` address names."""
    config = the(whole, "ConfigMap")["data"]
    engines = [
        workload for workload in workloads_of(dict(item) for item in whole).values() if workload.is_engine
    ]
    assert len(engines) == 2
    for engine in engines:
        told = Cluster(whole).environment(engine, f"{engine.name}-0", "10.1.2.3")
        if "KVIK_EMULATOR_STORE" in told:
            assert parse_store(told["KVIK_EMULATOR_STORE"]).address == config["address"]
        else:
            cache = CacheConfig.from_extra(None, "store", told)
            assert (cache.address, str(cache.copies)) == (config["address"], config["copies"])
        assert _files(engine) == {"/etc/kvik/store/servers"}


def _files(engine: Workload) -> set[str]:
    """The files that ConfigMaps put into the container."""
    mounts = {mount["name"]: mount["mountPath"] for mount in engine.container["volumeMounts"]}
    return {
        f"{mounts[volume['name']]}/{item['path']}"
        for volume in engine.pod["volumes"]
        for item in volume.get("configMap", {}).get("items", ())
    }


def test_the_log_changes_how_clients_find_servers(tmp_path: Path) -> None:
    """Nothing of the store's own but its arguments and its volume."""
    without = objects(FOLDER / "emulator-store")
    changed = [
        item["metadata"]["name"]
        for item, before in zip(objects(with_log("emulator-store", tmp_path)), without, strict=True)
        if item != before
    ]
    assert sorted(changed) == ["kvik-store", "kvik-store-clients"]
