"""Every query of the dashboard gives something, asked of a real Prometheus that scrapes a real store."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvik
from kvik.roles.ports import LOOPBACK, free_ports
from tests.python.peers import ROOT, until
from tests.python.store_rig import NAMESPACE, Rig, Served

DASHBOARD = ROOT / "deploy" / "grafana" / "kvik-store.json"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
LIMIT = 120.0
pytestmark = pytest.mark.timeout(300)
OLD = 20  # turns after which a prompt has left the log
METRIC = re.compile(r"kvik_store_\w+")
# Not brought about: a disk or an object store that fails, is slow or full, bytes that change, a put that
# meets another one.
NEVER = {
    "corrupt_blocks", "shared_waits", "log_failures", "log_quarantined_records", "log_unwritten_blocks",
    "object_failures", "object_quarantined_records", "object_unwritten_blocks", "object_dropped_blocks",
    "object_shut",
}  # fmt: skip


def queries() -> list[str]:
    """Every query of the dashboard, for all stores and the last ten seconds."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "10s").replace("$instance", ".*") for expr in found]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A store with a small memory, a log, objects and a tenant with a quota."""
    log, objects = tmp_path_factory.mktemp("log"), tmp_path_factory.mktemp("objects")
    arguments = ("--memory", "1MiB", "--log", str(log), "--log-size", "16MiB", "--metrics", f"{LOOPBACK}:0",
                 "--object", f"file://{objects}", "--object-batch", "1MiB",
                 "--tenant", "small=quota:256KiB,apart")  # fmt: skip
    with Served(*arguments) as served:
        yield served


@pytest.fixture(scope="module")
def prometheus(store: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes the store each second, else as the example has it."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [store.metrics]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"{LOOPBACK}:{free_ports(1)[0]}"
    with (folder / "log").open("w") as out:
        process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        assert until(functools.partial(_ready, address)), (folder / "log").read_text()
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=60) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:  # of urllib, or of a connection that it has already
        return False


def ask(address: str, query: str) -> list[Any]:
    """The series that a query gives. A query that Prometheus does not understand raises."""
    where = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(where, timeout=60) as answer:
        told = json.load(answer)
    assert told["status"] == "success", told
    result: list[Any] = told["data"]["result"]
    return result


def work(rig: Rig, small: kvik.Store, turn: int) -> None:
    """Something of everything that a store counts."""
    for prompt in range(4):
        keys = rig.store.keys([*range(1000 * (10 * turn + prompt), 1000 * (10 * turn + prompt) + 128)])
        rig.put(keys)
        if prompt % 2:  # What nobody reads makes room in the log.
            rig.got(keys)
        rig.got(rig.store.keys(range(128)))
    if turn > OLD:  # What neither memory nor the log has any more.
        rig.got(rig.store.keys([*range(10_000 * (turn - OLD), 10_000 * (turn - OLD) + 128)]))
    rig.store.pin(keys[: 4 * 32], 5.0)
    keys = small.keys(range(turn * 128, turn * 128 + 128))
    small.put(keys, rig.pages(range(32))).wait()  # Twice its quota.
    small.get(keys, rig.pages(range(32))).wait()
    small.put(keys[32:64], rig.pages(range(1)), before=bytes(32)).wait()
    if turn % 2:  # What it has is looked at between two turns, too.
        small.clear()
    with pytest.raises(kvik.InvalidArgument):
        rig.store.within(NAMESPACE, tenant="not its own")


def test_every_query_gives_something(store: Served, prometheus: str) -> None:
    with kvik.Engine() as engine:
        rig = Rig(engine, store.address)
        small = rig.store.within(kvik.Namespace(**{**NAMESPACE.__dict__, "salt": b"small"}), tenant="small")
        end, left, turn = time.monotonic() + LIMIT, queries(), 0
        while left:
            assert time.monotonic() < end, f"these give nothing after {turn} turns: {left}"
            turn += 1
            work(rig, small, turn)
            left = [query for query in left if not _moves(ask(prometheus, query), query)]
        del rig.bytes
    assert turn > 1


def _moves(series: list[Any], query: str) -> bool:
    """Whether a query gives numbers, and other ones than 0 where the test brings that about."""
    values = [float(one["value"][1]) for one in series]
    finite = [value for value in values if math.isfinite(value)]
    quiet = any(name in query for name in NEVER)
    return bool(finite) and (quiet or any(finite))


def test_the_dashboard_shows_every_metric() -> None:
    shown = {
        re.sub(r"_(bucket|count|sum)$", "", name) for query in queries() for name in METRIC.findall(query)
    }
    named = {name for name, *_ in kvik._native.store_metrics()}
    assert named == shown


def test_the_example_scrapes_what_a_store_serves(store: Served) -> None:
    with urllib.request.urlopen(f"http://{store.metrics}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    assert "kvik_store_blocks " in text
    assert "kvik_engine_info{" in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{store.metrics}/other", timeout=60)
    default = yaml.safe_load(CONFIG.read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert [Path(target).name for target in default] == ["127.0.0.1:9750"]
