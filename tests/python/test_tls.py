"""Engines of two processes under TLS, with certificates as the documentation makes them: by openssl."""

from pathlib import Path

import numpy as np
import pytest

import kvik
from tests.python.authority import Authority
from tests.python.peers import LIMIT, Peer, empty, engines, owner, random_bytes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One for all tests here."""
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


def test_pages_come_from_another_process(authority: Authority) -> None:
    pages, page_bytes, seed = 512, 64 << 10, 7
    theirs, mine = authority.admit("owner"), authority.admit("reader")
    with (
        Peer(owner, pages=pages, page_bytes=page_bytes, seed=seed, tls=str(theirs)) as peer,
        engines() as start,
    ):
        ticket = kvik.Ticket(peer.hear()["ticket"])
        here = start(tls=mine, transport="tcp")  # a path is as good as a text
        target = empty(here, pages, page_bytes)
        told = here.explain(ticket)
        assert (told["transport"], told["mechanism"]) == ("tcp", "4 channels, tls")
        warmed = here.warm_up(ticket).wait(LIMIT)
        assert (warmed.opened, warmed.channels) == (("tcp",), 4)
        report = here.read(target.of(), ticket).wait(LIMIT)
        assert (report.mechanism, report.bytes) == ("4 channels, tls", pages * page_bytes)
        assert "page_checksum" in report.checks
        assert np.array_equal(target.memory, random_bytes(pages * page_bytes, seed))

        # Without it, or with a certificate of somebody else, the same ticket opens nothing.
        here = start(transport="tcp")
        blank = empty(here, pages, page_bytes)
        with pytest.raises(kvik.TlsRequired, match="`tls`"):
            here.read(blank.of(), ticket).wait(LIMIT)
        stranger = Authority(authority.directory / "theirs").admit("stranger")
        (stranger / "ca.crt").write_bytes(authority.cert.read_bytes() + (stranger / "ca.crt").read_bytes())
        here = start(tls=stranger, transport="tcp")
        blank = empty(here, pages, page_bytes)
        with pytest.raises(kvik.TlsFailed, match="broke off TLS"):
            here.read(blank.of(), ticket).wait(LIMIT)
        assert not blank.memory.any()


def test_beyond_loopback_tls_is_enough(authority: Authority) -> None:
    with pytest.raises(kvik.SecretRequired, match="KVIK_TLS"):
        kvik.Engine("0.0.0.0:0")
    with kvik.Engine("0.0.0.0:0", advertise="127.0.0.1", tls=authority.admit("open")) as engine:
        assert engine.addresses


def test_what_cannot_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(kvik.InvalidArgument, match=r"tls\.crt: it cannot be read"):
        kvik.Engine(tls=tmp_path)
    with pytest.raises(TypeError, match="argument 'tls'"):
        kvik.Engine(tls=4)  # type: ignore[arg-type]
    mixed = authority.admit("mixed")
    (mixed / "tls.key").write_bytes((authority.admit("another") / "tls.key").read_bytes())
    with pytest.raises(kvik.InvalidArgument, match=r"tls\.key: it is not the key of"):
        kvik.Engine(tls=mixed)


def test_the_variable_is_enough(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_TLS", str(authority.admit("variable")))
    with engines() as start:
        there, here = start(transport="tcp"), start(transport="tcp")
        source, target = empty(there), empty(here)
        ticket = there.grant(source.of()).ticket
        # Not all channels have joined when a first transfer ends.
        assert here.read(target.of(), ticket).wait(LIMIT).mechanism.endswith(", tls")
