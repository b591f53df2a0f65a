"""`kvik bench transfer` with its target on one host and its initiator on the other."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.busy import Watch
from tests.netns.children import SECRET
from tests.netns.hosts import Connection, Host

Hosts = tuple[Host, Host]
ENGINE_PORT = 7700
SHORT = ("--page", "16KiB", "--pages", "20,200", "--duration", "0.2", "--buffer", "16MiB", "--seed", "5")
KVIK = [sys.executable, "-m", "kvik.cli", "bench", "transfer"]
LIMIT = 120.0  # seconds for one run
LOOKED_AWAY = 1.0  # seconds in which a machine that stood still may have missed what there was to see

pytestmark = pytest.mark.timeout(1200)


def environment(secret: str | None) -> dict[str, str]:
    """This process's environment with this secret or without any."""
    kept = {name: value for name, value in os.environ.items() if name != "KVIK_SECRET"}
    return {**kept, "PYTHONUNBUFFERED": "1", **({} if secret is None else {"KVIK_SECRET": secret})}


@contextlib.contextmanager
def launch(host: Host, *arguments: str, secret: str | None = SECRET) -> "Iterator[subprocess.Popen[str]]":
    """The benchmark on a host; it does not outlive the block."""
    with host.inside():
        process = subprocess.Popen(
            [*KVIK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(secret),
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def run(host: Host, *arguments: str, secret: str | None = SECRET) -> tuple[int, str, str]:
    """Run the benchmark on a host; its exit status and what it printed."""
    with launch(host, *arguments, secret=secret) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err


@contextlib.contextmanager
def target(host: Host, family: str) -> Iterator[str]:
    """A target that listens on a host; its control address."""
    address = host.v4 if family == "v4" else f"[{host.v6}]"
    ports = ("--listen", f"{address}:0", "--engine-listen", f"{address}:{ENGINE_PORT}")
    with launch(host, *SHORT, *ports) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT)[0], "the target said nothing"
        line = process.stdout.readline()
        assert line.startswith("bench target on "), line
        yield line.split()[-1]


@dataclass(frozen=True)
class Look:
    """The sockets of a host: its connections, and a moment later the listening ones."""

    connections: list[Connection]
    listening: list[str]


def watch(host: Host, process: "subprocess.Popen[str]") -> list[Look]:
    """Look at the host's sockets again and again while the benchmark runs."""
    looks = []
    until = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < until:
        looks.append(Look(host.connections(), host.listening()))
        time.sleep(0.05)  # sockets of other processes have no event to wait for
    return looks


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_between_two_hosts(hosts: Hosts, family: str) -> None:
    """All cells over tcp, every byte compared, and all of it through the engine's one port.

    The control connection has a port of its own, and the comparison's TCP stream, too, until it is taken.
    """
    left, right = hosts
    for _ in range(3):
        seen = Watch()
        with target(left, family) as control:
            engine = f"{control.rpartition(':')[0]}:{ENGINE_PORT}"
            with launch(right, *SHORT, "--target", control, "--json", "-") as process:
                looks = watch(left, process)
                out, err = process.communicate(timeout=LIMIT)
        print(err)
        if seen.longest() < LOOKED_AWAY:
            break
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["complete"] is True
    assert "transport tcp alone: the target is on another host, which local cannot reach" in err
    assert "equal in 4 of 4 cells" in err
    assert [list(path["used"]) for path in paths(document)] == [["tcp"]] * 4
    assert all(["page_checksum" in checks for checks in path["checks"]] for path in paths(document))
    # To the engine go one connection for words and the four channels. Beside them there are the control
    # connection and the comparison's stream, so that seven is all.
    whole = [look for look in looks if len(look.connections) == 7]
    assert whole, looks[-5:]
    assert max(len(look.connections) for look in looks) == 7
    print(*whole[-1].connections, sep="\n")
    assert [c.local for c in whole[-1].connections].count(engine) == 5
    assert whole[0].listening == sorted([control, engine])
    # The last look may see the engine close between its two halves.
    assert all(set(look.listening) <= {control, engine} for look in whole)


def paths(document: dict[str, Any]) -> list[dict[str, Any]]:
    """kvik's own results of all cells."""
    return [path for cell in document["cells"] for path in cell["kvik"]]


def test_local_is_refused_and_auto_explains(hosts: Hosts) -> None:
    """The kernel is one, the hosts are two: shared memory is refused by name when it is demanded."""
    left, right = hosts
    few = ("--page", "16KiB", "--pages", "20", "--op", "read", "--duration", "0.05", "--buffer", "16MiB")
    with target(left, "v4") as control:
        status, out, err = run(right, *few, "--transport", "local", "--target", control)
        assert status == 1
        assert "transport_unavailable" in out + err
        assert "another network namespace" in " ".join((out + err).split())
        status, out, err = run(right, *few, "--transport", "auto", "--target", control, "--json", "-")
    assert status == 0, err
    (path,) = paths(json.loads(out))
    assert list(path["used"]) == ["tcp"]
    assert any(
        text.startswith("local: the peer is in another network namespace")
        for text in path["rejected_transports"]
    )
    assert "Rejected: local: " in err


def test_secrets_are_demanded(hosts: Hosts) -> None:
    """Without one the target does not listen; a wrong one or none is refused, and the target goes on."""
    left, right = hosts
    status, _, err = run(left, *SHORT, "--listen", f"{left.v4}:0", secret=None)
    assert status == 2
    assert "listening there wants a secret, in KVIK_SECRET" in " ".join(err.replace("│", " ").split())
    with target(left, "v4") as control:
        for secret, said in (
            (None, "has a secret: set KVIK_SECRET here"),
            ("another one, as long", "refused the secret"),
        ):
            status, out, _ = run(right, *SHORT, "--target", control, secret=secret)
            assert status == 1
            assert said in " ".join(out.split())
        status, out, err = run(right, *SHORT, "--target", control)
        assert status == 0, out + err
