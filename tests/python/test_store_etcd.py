"""Servers of a store that enter themselves in etcd, clients that follow them, and an etcd that goes away."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvik
from kvik.roles.ports import LOOPBACK, free_ports
from kvik.store.cli import serve
from tests.python.authority import Authority
from tests.python.etcd import Etcd
from tests.python.peers import stop
from tests.python.store_load import becomes
from tests.python.store_rig import NAMESPACE, Rig, Served

pytestmark = pytest.mark.timeout(300)  # several waits of up to LIMIT each
LIMIT = 60.0
"""For what a test waits for: a lease takes ten seconds to end, and more on a busy machine."""


@pytest.fixture
def program() -> str:
    found = Etcd.program()
    if found is None:
        pytest.skip("there is no etcd")
    return found


@pytest.fixture
def etcd(program: str, tmp_path: Path) -> Iterator[Etcd]:
    running = Etcd(program, tmp_path)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


def _met(engine: kvik.Engine, etcd: Etcd) -> Rig:
    """A client, as soon as some server is entered."""
    until = time.monotonic() + LIMIT
    while True:
        try:
            return Rig(engine, f"etcd:{etcd.url}")
        except kvik.StoreUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)  # a client that was not made has nothing to wait for


def _post(etcd: Etcd, context: ssl.SSLContext, path: str, request: object, token: str = "") -> Any:
    """Ask an etcd that may still be starting; its answer."""
    until = time.monotonic() + LIMIT
    headers = {"Authorization": token} if token else {}
    asked = urllib.request.Request(
        f"https://{etcd.address}/v3/auth/{path}", json.dumps(request).encode(), headers
    )
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=LIMIT, context=context) as answer:  # noqa: S310 - https
                return json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{path}: {error.read()!r}")
        except urllib.error.URLError:
            assert time.monotonic() < until
            time.sleep(0.05)  # it does not say when it listens


def _asked(etcd: Etcd, path: str, request: object) -> Any:
    """Ask an etcd that may still be starting, for it is not waited for; its answer."""
    until = time.monotonic() + LIMIT
    asked = urllib.request.Request(f"http://{etcd.address}/v3/{path}", json.dumps(request).encode())
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=LIMIT) as answer:  # noqa: S310 - http
                return json.load(answer)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > until:
                raise
            time.sleep(0.05)  # it does not say when it listens


def _key(name: str) -> dict[str, str]:
    return {"key": base64.b64encode(f"kvik/store/{name}".encode()).decode()}


def _lease(etcd: Etcd, name: str) -> str | None:
    """What the key of a server with this name hangs on, if it is there."""
    found = _asked(etcd, "kv/range", _key(name)).get("kvs")
    return found[0]["lease"] if found else None


def _names(rig: Rig) -> set[str]:
    return {member.name for member in rig.store.members()}


def test_servers_come_and_go_in_etcd(etcd: Etcd) -> None:
    given = ("--etcd", etcd.url)
    with Served(*given) as one, Served(*given) as two, kvik.Engine() as engine:
        rig = _met(engine, etcd)
        becomes(lambda: _names(rig) == {one.address, two.address})
        with Served(*given) as three:
            becomes(lambda: _names(rig) == {one.address, two.address, three.address})
            keys = [rig.store.keys([prompt] * 64) for prompt in range(30)]
            becomes(lambda: all(rig.put(some).refused == 0 for some in keys))
            assert [rig.got(some) for some in keys] == [16] * 30
            # One that ends in order takes itself out; what it had is missed, and what others have is not.
            two.process.terminate()
            becomes(lambda: _names(rig) == {one.address, three.address})
            there = [rig.got(some) for some in keys]
            assert set(there) <= {0, 16}
            assert 16 in there
            # One that is killed goes with its lease.
            three.kill()
            becomes(lambda: _names(rig) == {one.address})
        assert all(rig.put(some).refused == 0 for some in keys)
        assert [rig.got(some) for some in keys] == [16] * 30
        del rig.bytes


def test_a_server_keeps_the_name_that_it_was_given(etcd: Etcd, tmp_path: Path) -> None:
    """By it clients place its blocks, and resolve it: what its log has is found again after a restart."""
    given = ("--etcd", etcd.url, "--etcd-name", "localhost:{port}", "--log", str(tmp_path / "blocks"))
    with Served(*given) as one, Served("--etcd", etcd.url) as two, kvik.Engine() as engine:
        rig, both = _met(engine, etcd), {f"localhost:{one.address.rpartition(':')[2]}", two.address}
        becomes(lambda: _names(rig) == both)
        keys = [rig.store.keys([prompt] * 64) for prompt in range(20)]
        assert [rig.put(some).stored for some in keys] == [16] * 20
        one.end()
        becomes(lambda: _names(rig) == {two.address})
        there = [rig.got(some) for some in keys]
        assert {0, 16} == set(there)
        one.again()
        becomes(lambda: _names(rig) == both)
        becomes(lambda: [rig.got(some) for some in keys] == [16] * 20)
        del rig.bytes


def test_a_server_whose_key_was_deleted_enters_itself_again(etcd: Etcd) -> None:
    with Served("--etcd", etcd.url) as one:
        becomes(lambda: _lease(etcd, one.address) is not None)
        held = _lease(etcd, one.address)
        assert _asked(etcd, "kv/deleterange", _key(one.address))["deleted"] == "1"
        becomes(lambda: _lease(etcd, one.address) == held)


def test_a_name_stays_with_who_has_it_when_one_that_had_it_ends(etcd: Etcd) -> None:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(Served("--etcd", etcd.url))
        name = one.address
        becomes(lambda: _lease(etcd, name) is not None)
        with one.stopped():
            becomes(lambda: _lease(etcd, name) is None)
            two = stack.enter_context(Served("--etcd", etcd.url, "--etcd-name", name))
            becomes(lambda: _lease(etcd, name) is not None)
            held = _lease(etcd, name)
        # It has a lease again.
        becomes(lambda: len(_asked(etcd, "lease/leases", {}).get("leases", ())) == 2)
        one.end()
        assert _lease(etcd, name) == held
        two.end()
        assert _lease(etcd, name) is None


def test_a_name_in_etcd_needs_an_etcd() -> None:
    found = CliRunner().invoke(serve, ["--etcd-name", "localhost:7500"])
    assert (found.exit_code, "--etcd-name goes with --etcd" in found.output) == (2, True)


def test_an_etcd_that_is_away_costs_nothing(etcd: Etcd) -> None:
    given = ("--etcd", etcd.url)
    with Served(*given) as one, Served(*given) as two, kvik.Engine() as engine:
        rig, both = _met(engine, etcd), {one.address, two.address}
        becomes(lambda: _names(rig) == both)
        keys = [rig.store.keys([prompt] * 64) for prompt in range(10)]
        assert [rig.put(some).stored for some in keys] == [16] * 10
        stop(etcd.process.pid)  # as if the network were cut
        assert [rig.got(some) for some in keys] == [16] * 10
        etcd.kill()
        assert [rig.got(some) for some in keys] == [16] * 10
        # It has forgotten all: the servers enter themselves again.
        etcd.again(empty=True)
        with kvik.Engine() as other:
            fresh = _met(other, etcd)
            becomes(lambda: _names(fresh) == both)
            assert [fresh.got(some) for some in keys] == [16] * 10
            del fresh.bytes
        becomes(lambda: _names(rig) == both)
        assert [rig.got(some) for some in keys] == [16] * 10
        # The first one follows again.
        with Served(*given) as three:
            becomes(lambda: _names(rig) == {*both, three.address})
        del rig.bytes


def _serves(etcd: Etcd, meanwhile: Callable[[], object] = lambda: None) -> None:
    """A server enters itself, and a client finds it and what it has, and one that comes after `meanwhile`."""
    with Served("--etcd", etcd.url) as one, kvik.Engine() as engine:
        rig = _met(engine, etcd)
        assert _names(rig) == {one.address}
        keys = rig.store.keys([1] * 64)
        assert (rig.put(keys).stored, rig.got(keys)) == (16, 16)
        meanwhile()
        with Served("--etcd", etcd.url) as two:
            becomes(lambda: _names(rig) == {one.address, two.address})
        del rig.bytes


def test_etcd_asks_for_a_user_under_tls(
    program: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = authority.admit("etcd-with-users", LOOPBACK)
    etcd = Etcd(program, tmp_path, f"--cert-file={made / 'tls.crt'}", f"--key-file={made / 'tls.key'}")
    try:
        context = ssl.create_default_context(cafile=made / "ca.crt")
        for path, request in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            _post(etcd, context, path, request)
        layout = kvik.Layout(2, 8192)

        def refused(match: str, error: type[kvik.KvikError] = kvik.StoreUnavailable) -> None:
            with kvik.Engine() as engine, pytest.raises(error, match=match):
                kvik.Store.connect(engine, f"etcd:{etcd.url}", NAMESPACE, layout, again=False)

        refused("certificate")  # of nobody that the system knows
        monkeypatch.setenv("ETCDCTL_CACERT", str(made / "ca.crt"))
        refused("user name is empty")
        monkeypatch.setenv("ETCDCTL_USER", "root")
        refused("ETCDCTL_PASSWORD", kvik.InvalidArgument)
        monkeypatch.setenv("ETCDCTL_PASSWORD", "wrong")
        refused("authentication failed")
        monkeypatch.setenv("ETCDCTL_PASSWORD", "secret")
        me = {"name": "root", "password": "secret"}

        def forgets_logins() -> None:
            token = _post(etcd, context, "authenticate", me)["token"]
            _post(etcd, context, "user/changepw", me, token)

        _serves(etcd, forgets_logins)
    finally:
        etcd.kill()


def test_etcd_asks_for_a_certificate(
    program: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mine = authority.admit("etcd", LOOPBACK), authority.admit("client")
    etcd = Etcd(
        program, tmp_path, f"--cert-file={made / 'tls.crt'}", f"--key-file={made / 'tls.key'}",
        "--client-cert-auth", f"--trusted-ca-file={made / 'ca.crt'}",
    )  # fmt: skip
    try:
        monkeypatch.setenv("ETCDCTL_CACERT", str(made / "ca.crt"))
        with kvik.Engine() as engine, pytest.raises(kvik.StoreUnavailable, match="etcd at https"):
            kvik.Store.connect(engine, f"etcd:{etcd.url}", NAMESPACE, kvik.Layout(2, 8192), again=False)
        monkeypatch.setenv("ETCDCTL_CERT", str(mine / "tls.crt"))
        monkeypatch.setenv("ETCDCTL_KEY", str(mine / "tls.key"))
        _serves(etcd)
    finally:
        etcd.kill()


def test_without_an_etcd_there_is_no_client() -> None:
    with kvik.Engine() as engine:
        layout = kvik.Layout(2, 8192)
        nowhere = f"etcd:http://{LOOPBACK}:{free_ports(1)[0]}/kvik"
        with pytest.raises(kvik.StoreUnavailable, match="etcd at http"):
            kvik.Store.connect(engine, nowhere, NAMESPACE, layout, again=False)
        with pytest.raises(kvik.InvalidArgument, match="ETCDCTL_USER"):
            kvik.Store.connect(engine, "etcd:http://me:secret@a:1/b", NAMESPACE, layout)
