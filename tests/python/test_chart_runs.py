"""What the chart renders, running: servers with an etcd and with a bucket, and the client of `helm test`.

`test_deploy_store_runs.py` runs the store in memory and with a log, and `test_deploy_runs.py` the router:
`test_chart.py` finds that the chart has the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvik
from kvik.demo import client
from tests.python import charts
from tests.python.charts import rendered
from tests.python.etcd import Etcd
from tests.python.manifests import Workload, workloads_of
from tests.python.peers import until
from tests.python.pods import LIMIT, SECRET, Cluster, Pod, start
from tests.python.store_checks import the
from tests.python.store_rig import Rig
from tests.python.test_store_object import S3

REGION = "eu-central-1"  # as in ci/object-values.yaml


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Ends what a test has started."""
    charts.need_helm()
    with contextlib.ExitStack() as stack:
        yield stack


def address() -> str:
    """One that no other test run has."""
    return f"127.{random.randrange(64, 250)}.{random.randrange(250)}.{random.randrange(1, 250)}"


def server(name: str, cluster: Cluster, folder: Path, stack: contextlib.ExitStack) -> Pod:
    """Start a server of the store, and ask what the kubelet asks."""
    workload = workloads_of(dict(item) for item in cluster.objects)["kvik-store"]
    at = address()
    # What a cluster's DNS has of it.
    names = {f"{name}.kvik-store.default.svc": at}
    pod = start(workload, name, at, folder, cluster=cluster, names=names)
    stack.callback(pod.kill)
    pod.wait_ready()
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert pod.probe(kind) == 200, (pod.name, kind)
    return pod


def end(pod: Pod) -> None:
    """As the kubelet ends it."""
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(LIMIT) == 0


def members(rig: Rig) -> set[str]:
    """The servers that a client knows."""
    return {member.name for member in rig.store.members()}


def test_servers_in_etcd(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    """Clients follow them at the address that they are given; `helm test` finds that they answer."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("there is no etcd")
    etcd = Etcd(program, tmp_path)
    stack.callback(etcd.kill)
    found = rendered("etcd", f"store.etcd={etcd.url}", tests=True)
    cluster = Cluster(found)
    pods = [server(f"kvik-store-{number}", cluster, tmp_path, stack) for number in range(2)]
    entered = {f"{pod.address}:{pod.workload.ports['kvik']}" for pod in pods}
    engine = stack.enter_context(kvik.Engine(secret=SECRET))
    rig = met(engine, the(found, "ConfigMap")["data"]["address"])
    assert until(lambda: members(rig) == entered, LIMIT)
    said = answers(found, cluster, tmp_path)
    assert all(name in said for name in entered), said
    end(pods[0])
    assert until(lambda: len(members(rig)) == 1, LIMIT)
    del rig.bytes


def met(engine: kvik.Engine, text: str) -> Rig:
    """A client, once a server is entered."""
    rigs: list[Rig] = []

    def reached() -> bool:
        with contextlib.suppress(kvik.StoreUnavailable):
            rigs.append(Rig(engine, text))
        return bool(rigs)

    assert until(reached, LIMIT)
    return rigs[0]


def answers(found: list[dict[str, Any]], cluster: Cluster, folder: Path) -> str:
    """What the pod of `helm test` prints."""
    pod = Workload({"metadata": {"name": "client"}, "spec": {"template": the(found, "Pod", "store-client")}})
    declared = cluster.environment(pod, "client", "127.0.0.1")
    done = subprocess.run(
        [sys.executable, "-m", "kvik.cli", *pod.arguments(declared)],
        env=declared,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_objects_of_a_bucket(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    """A server that starts again, elsewhere, finds what it had sent under the name of its pod."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not in this environment")
    s3 = S3()
    stack.callback(s3.kill)
    credentials = {
        "AWS_ACCESS_KEY_ID": "kvik",
        "AWS_SECRET_ACCESS_KEY": "a-key",
        "AWS_ENDPOINT_URL": s3.endpoint,
    }
    bucket = importlib.import_module("boto3").client(
        "s3",
        endpoint_url=s3.endpoint,
        region_name=REGION,
        aws_access_key_id=credentials["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=credentials["AWS_SECRET_ACCESS_KEY"],
    )
    bucket.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": REGION})
    found = rendered("object")
    secrets = {**Cluster().secrets, "bucket-credentials": credentials}
    cluster = Cluster(found, secrets)
    first = server("kvik-store-1", cluster, tmp_path, stack)
    with kvik.Engine(secret=SECRET) as engine:
        rig = Rig(engine, f"{first.address}:{first.workload.ports['kvik']}")
        keys = rig.store.keys(range(4 * 8))
        assert rig.put(keys).stored == 8
        end(first)
        del rig.bytes
    listed = bucket.list_objects_v2(Bucket="bucket")["Contents"]
    assert {item["Key"].rpartition("/")[0] for item in listed} == {"kvik/kvik-store-1"}
    again = server("kvik-store-1", cluster, tmp_path, stack)
    assert until(lambda: client.metrics(again.url_of("metrics"))["kvik_store_object_open"] == 1, LIMIT)
    with kvik.Engine(secret=SECRET) as engine:
        rig = Rig(engine, f"{again.address}:{again.workload.ports['kvik']}")
        assert rig.got(keys) == 8
        del rig.bytes
