"""A store above an object store that speaks S3: a server of its own (moto), over HTTP, with credentials."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import kvik
from kvik.roles.ports import LOOPBACK
from tests.busy import Watch
from tests.python.s3_relay import Meddling, S3Relay
from tests.python.store_rig import NAMESPACE, Rig, Served

KEY = "a-secret-key-of-this-test"
PROMPTS = range(0, 10_000, 100)
"""Where the tokens of each prompt begin; a prompt has four blocks of four tokens, 6 MiB in all."""
DEADLINE = 1.0
ARGUMENTS = ("--memory", "1MiB", "--object", "s3://kvik-test/one", "--object-batch", "256KiB")


class S3:
    """A process of moto's S3 server, with a bucket."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.requests: list[str] = []
        self.endpoint = ""
        for line in self.process.stderr:
            if found := re.search(r"Running on (http://\S+)", line):
                self.endpoint = found[1]
                break
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.requests.extend(self.process.stderr)

    def counted(self, method: str) -> int:
        """Requests of this kind for objects, once all were read that it has written."""
        return sum(f"{method} /kvik-test/" in line for line in self.requests)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)
        self._reader.join()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not in this environment")
    server = S3()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kvik")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        boto3 = importlib.import_module("boto3")
        client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="kvik-test")
        yield server
    finally:
        server.kill()
        assert server.process.stderr is not None
        server.process.stderr.close()


@pytest.fixture
def relay(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Relay]:
    """Before the S3 server; kvik is told of it alone."""
    relay = S3Relay(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.endpoint)
    try:
        yield relay
    finally:
        relay.close()


def becomes(so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    until = time.monotonic() + 60
    while not so():
        assert time.monotonic() < until, "it does not become so"
        time.sleep(0.01)


def keys_of(rig: Rig) -> list[bytes]:
    return [rig.store.keys(range(first, first + 16)) for first in PROMPTS]


def put_all(rig: Rig) -> None:
    gathered = 0

    def are_gathered() -> bool:
        return rig.store.stat()["object_written"] >= gathered

    for keys in keys_of(rig):
        assert rig.put(keys).stored == 4
        gathered += 4
        becomes(are_gathered)


def found(rig: Rig) -> int:
    """How many blocks are there; each is compared."""
    return sum(rig.got(keys) for keys in keys_of(rig))


def all_there(rig: Rig) -> bool:
    """Whether all blocks are, once a new server has found them."""
    with contextlib.suppress(kvik.StoreUnavailable):
        return found(rig) == 4 * len(PROMPTS)
    return False


def test_blocks_outlive_the_server_in_a_bucket(
    s3: S3, relay: S3Relay, capfd: pytest.CaptureFixture[str]
) -> None:
    with Served(*ARGUMENTS) as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        put_all(rig)
        # Memory has room for a sixth of them.
        assert found(rig) == 4 * len(PROMPTS)
        assert rig.store.stat()["object_loaded"] > 100
        served.end()
        blocks = 4 * len(PROMPTS)
        put, got = relay.received["PUT"] / blocks, relay.sent["GET"] / blocks
        said = [
            f"a block stored: {s3.counted('PUT') / blocks:.3f} PUT, {put:.0f} bytes",
            f"a block read: {s3.counted('GET') / blocks:.3f} GET, {got:.0f} bytes",
        ]
        served.again()
        becomes(lambda: all_there(rig))
        del rig.bytes
    logged = capfd.readouterr().err
    print(*said, sep="\n")
    assert s3.counted("PUT") < 80
    assert KEY not in logged


def test_a_bucket_that_dies_costs_misses(s3: S3) -> None:
    with Served(*ARGUMENTS) as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        put_all(rig)
        s3.kill()
        left = found(rig)
        print(f"{left} of {4 * len(PROMPTS)} blocks without the bucket")
        assert left < 4 * len(PROMPTS)
        keys = rig.store.keys(range(50_000, 50_016))
        assert rig.put(keys).stored == 4
        assert rig.got(keys) == 4
        del rig.bytes


@pytest.mark.parametrize("meddling", ["fails", "slow", "cut", "short", "swapped"])
def test_a_bucket_that_meddles_costs_misses(relay: S3Relay, meddling: Meddling) -> None:
    """Whatever it answers, no other bytes come, no call takes longer than its deadline, and puts go on."""
    with Served(*ARGUMENTS) as served, kvik.Engine() as engine:
        rig = Rig(engine, served.address)
        put_all(rig)
        relay.meddling = meddling
        left, longest = 0, 0.0
        for keys in keys_of(rig):
            watch = Watch()
            left += rig.got(keys, deadline=DEADLINE)
            longest = max(longest, watch.seconds())
        blocks, corrupt = 4 * len(PROMPTS), rig.store.stat()["corrupt"]
        print(f"{meddling}: {left} of {blocks} blocks, {corrupt} corrupt, longest get {longest:.3f} s")
        assert left < blocks
        assert relay.meddled > 0
        assert longest < 1.5 * DEADLINE
        assert (corrupt > 0) == (meddling in ("short", "swapped"))
        keys = rig.store.keys(range(50_000, 50_016))
        assert rig.put(keys).stored == 4
        assert rig.got(keys) == 4
        relay.meddling = "none"
        if meddling in ("fails", "slow", "cut"):
            becomes(lambda: all_there(rig))
        del rig.bytes


def test_an_address_with_credentials_is_refused_and_not_repeated() -> None:
    with kvik.Engine() as engine:
        layout = kvik.Layout(2, 8192, layers=2, layer_stride=16384)
        with pytest.raises(kvik.InvalidArgument, match="environment") as refused:
            kvik.Store.embedded(engine, NAMESPACE, layout, object=f"s3://kvik:{KEY}@kvik-test/one")
        assert KEY not in str(refused.value)
