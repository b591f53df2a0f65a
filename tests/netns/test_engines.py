"""Engines on two hosts: what they let in, by which address they are reached, and over which socket."""

import socket

import pytest

import kvik
from tests.netns.children import LIMIT, SECRET, ask, own, read, reader, start
from tests.netns.hosts import Host
from tests.python.peers import Peer

Hosts = tuple[Host, Host]
PAGES, PAGE = 512, 128 * 1024  # 64 MiB

pytestmark = pytest.mark.timeout(600)


def at(host: Host, family: str, port: int = 0) -> str:
    """An address of a host to listen on."""
    return f"{host.v4}:{port}" if family == "v4" else f"[{host.v6}]:{port}"


def port_of(address: str) -> int:
    """The port of `ADDRESS:PORT`."""
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_all_bytes_pass_one_listening_socket(hosts: Hosts, family: str) -> None:
    """The owner's host has one listening port, and every byte of a read goes over connections to it."""
    left, right = hosts
    size = {"pages": PAGES, "page_bytes": PAGE}
    listen = at(left, family)
    with own(left, listen=listen, secret=SECRET, **size) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        (address,) = kvik.Ticket(ticket).addresses
        assert address.rpartition(":")[0] == listen.rpartition(":")[0]
        assert left.listening() == [address]
        with right.inside(), Peer(reader, secret=SECRET, channels=4, **size) as peer:
            peer.hear(LIMIT)
            said = ask(peer, do="read", ticket=ticket, seed=1, deadline=LIMIT)
            connections = left.connections()
            assert left.listening() == [address]
        print(family, said, *connections, sep="\n")
    assert said["same"] is True
    assert (said["transport"], said["bytes"]) == ("tcp", PAGES * PAGE)
    assert "4" in said["mechanism"]
    assert "page_checksum" in said["checks"]
    assert {connection.local for connection in connections} == {address}
    # The one for words between the engines, and the four channels.
    assert len(connections) == 5
    assert PAGES * PAGE <= sum(connection.acknowledged for connection in connections) < 1.01 * PAGES * PAGE


def test_auto_passes_over_local_and_says_why(hosts: Hosts) -> None:
    """Two namespaces of one kernel: the same boot, and still no shared memory."""
    left, right = hosts
    with own(left, listen=at(left, "v4"), secret=SECRET) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        said = read(right, ticket, secret=SECRET, transport="auto")
        assert said["same"] is True
        assert said["transport"] == "tcp"
        assert [
            text for text in said["rejected_transports"] if "local: " in text and "network namespace" in text
        ], said
        refused = read(right, ticket, secret=SECRET, transport="local")
    assert refused["code"] == "transport_unavailable"
    assert "another network namespace" in refused["text"]
    assert refused["untouched"] is True


@pytest.mark.parametrize("family", ["v4", "v6", "wildcard v4", "wildcard v6"])
def test_no_listening_beyond_loopback_without_a_secret(hosts: Hosts, family: str) -> None:
    """Nobody gets in unless told."""
    wild = {"wildcard v4": "0.0.0.0:0", "wildcard v6": "[::]:0"}
    said = start(hosts[0], listen=wild.get(family) or at(hosts[0], family))
    assert said["code"] == "secret_required"
    assert "KVIK_SECRET" in said["text"]


@pytest.mark.parametrize(
    ("secret", "code"),
    [
        ("another secret, as long", "secret_mismatch"),
        (SECRET[:-1], "secret_mismatch"),
        (None, "secret_required"),
    ],
)
def test_a_stranger_gets_nothing(hosts: Hosts, secret: str | None, code: str) -> None:
    """A wrong secret or none is refused by name, and the right one still works afterwards."""
    left, right = hosts
    with own(left, listen=at(left, "v4"), secret=SECRET) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        said = read(right, ticket, secret=secret)
        assert said["code"] == code
        assert "give both the same `secret` (KVIK_SECRET)" in said["text"]
        assert said["untouched"] is True
        assert ask(owner, do="state")["state"] == "live"
        assert read(right, ticket, secret=SECRET)["same"] is True


def test_a_secret_on_the_reader_alone_is_refused(hosts: Hosts) -> None:
    """One-sided the other way round: the owner listens on its loopback without a secret."""
    left = hosts[0]
    with own(left, listen="127.0.0.1:0") as owner:
        said = read(left, owner.hear(LIMIT)["ticket"], secret=SECRET, transport="tcp")
    assert said["code"] == "secret_required"


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_loopback_of_another_host_is_unreachable(hosts: Hosts, listen: str) -> None:
    """The ticket's loopback address means another host here: nothing is dialled, and the option is named."""
    left, right = hosts
    with own(left, listen=listen, secret=SECRET) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        port = port_of(kvik.Ticket(ticket).addresses[0])
        host = listen.rpartition(":")[0].strip("[]")
        with right.inside(), socket.create_server((host, port), family=_family(host)) as decoy:
            decoy.settimeout(0.0)
            said = read(right, ticket, secret=SECRET)
            with pytest.raises(BlockingIOError):
                decoy.accept()
        assert read(left, ticket, secret=SECRET)["same"] is True
    assert said["code"] == "peer_unreachable"
    assert "set its `listen`" in said["text"]


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_a_wildcard_listener_gives_tickets_with_addresses(hosts: Hosts, family: str) -> None:
    """Only addresses that another host can use are in the ticket, and they work."""
    left, right = hosts
    with own(left, listen="0.0.0.0:0" if family == "v4" else "[::]:0", secret=SECRET) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        addresses = kvik.Ticket(ticket).addresses
        assert addresses == [at(left, family, port_of(addresses[0]))]
        assert len(left.listening()) == 1
        assert read(right, ticket, secret=SECRET)["same"] is True


def test_an_advertised_address_is_the_one_that_is_used(hosts: Hosts) -> None:
    """An owner that listens everywhere names one of its addresses."""
    left, right = hosts
    with own(left, listen=["0.0.0.0:0", "[::1]:0"], advertise=left.v4, secret=SECRET) as owner:
        ticket = owner.hear(LIMIT)["ticket"]
        assert [address.rpartition(":")[0] for address in kvik.Ticket(ticket).addresses] == [left.v4]
        assert read(right, ticket, secret=SECRET)["same"] is True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
