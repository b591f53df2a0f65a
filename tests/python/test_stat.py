"""`kvik stat`: engines are found and asked over their UNIX sockets, whatever the program around them does."""

import ctypes
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import kvik
from kvik.stat import engines as found
from kvik.stat.cli import stat
from kvik.stat.engines import PREFIX, StatError
from kvik.stat.show import WIDTH, duration
from kvik.stat.snapshot import Snapshot, rates
from tests.python.peers import LIMIT, Peer, Pipe, empty, engines, owned, stop


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs has longer to answer than a user waits: it may get no processor for seconds."""
    monkeypatch.setattr(found, "ANSWER_SECONDS", 30.0)


def ask(*arguments: str, status: int = 0) -> str:
    """What the command prints; where it fails, with what it says of that.

    Otherwise stderr is about engines that are none of these tests', and end while they are listed.
    """
    done = CliRunner().invoke(stat, arguments)
    assert done.exit_code == status, done.output
    return done.output if status else done.stdout


def waiting(pipe: Pipe, **options: str) -> None:
    """A peer with an engine, which it keeps until it is told to end."""
    with kvik.Engine(**options) as engine:  # type: ignore[arg-type]
        pipe.say(id=engine.id, addresses=engine.addresses)
        pipe.hear()


def test_engines_of_any_transport_are_listed_while_they_run() -> None:
    with Peer(waiting, name="far", transport="tcp") as far, engines() as start:
        near = start(name="near", transport="local")
        told = far.hear()
        listed = {about["engine"]: about for about in json.loads(ask("--json"))}
        about = listed[told["id"]]
        assert (about["name"], about["pid"], about["transport"]) == ("far", far.pid, "tcp")
        assert about["addresses"] == told["addresses"]
        assert about["version"] == kvik.__version__
        assert listed[near.id]["pid"] == os.getpid()
        table = ask()
        assert "far" in table
        assert "near" in table
        far.say(end=True)
        assert far.end() == 0
        assert told["id"] not in found.names()
    assert near.id not in found.names()


def test_an_engine_is_named_by_process_name_or_id() -> None:
    with Peer(waiting, name="only-me") as peer:
        told = peer.hear()
        for wanted in (str(peer.pid), "only-me", told["id"], told["id"][:6]):
            assert found.find(wanted).engine == told["id"]
        with pytest.raises(StatError, match=r"those that run: .*only-me"):
            found.find("nobody")
        with engines() as start:
            start(name="only-me")
            with pytest.raises(StatError, match="fits 2 engines"):
                found.find("only-me")
    assert "no engine 'nobody'" in ask("nobody", status=1)


def test_rates_are_those_between_two_looks() -> None:
    with engines() as start:
        here, there = start(name="a-reader-with-quite-a-long-name"), start(name="owner")
        source, target = owned(there, 64), empty(here, 64)
        grant = there.grant(source.of(), use="many")
        for transport in ("tcp", "local"):
            here.read(target.of(), grant.ticket, transport=transport).wait(LIMIT)
        before = found.snapshot(here.id)
        for _ in range(3):
            here.read(target.of(), grant.ticket, transport="tcp").wait(LIMIT)
        now = rates(Snapshot(*before), Snapshot(*found.snapshot(here.id)))
        tcp, local = (next(row for row in now.peers if row.transport == name) for name in ("tcp", "local"))
        assert (tcp.name, tcp.peer, tcp.errors) == ("owner", there.id, 0)
        assert round(tcp.transfers * now.interval_s) == 3
        assert round(tcp.in_bytes * now.interval_s) == 3 * source.memory.size
        assert (tcp.out_bytes, local.in_bytes, local.transfers) == (0, 0, 0)
        assert set(now.seconds) == {"read tcp"}
        assert now.cpu_percent["kvik-ctl"] >= 0
        for engine in (here, there):
            lines = ask(engine.id, "--once", "--interval", "0.1").splitlines()
            assert lines
            assert max(map(len, lines)) <= WIDTH, lines
        told = json.loads(ask(there.id, "--json", "--interval", "0.1"))
        assert (told["grants_live"], told["sessions"]) == (1, 1)


def looked(started: int, uptime_s: float, *moved: tuple[str, str, int]) -> Snapshot:
    """A look at an engine: when it was started, how long ago, and of each peer id, name and bytes it read."""
    about = found.About("0" * 32, "one", 1, "0", "tcp", (), uptime_s)
    lines = [f"kvik_engine_start_time_seconds {started}"]
    for peer, name, count in moved:
        of = f'peer="{peer}",peer_name="{name}",transport="tcp",outcome="ok"'
        lines.append(f'kvik_transfer_bytes_total{{direction="in",{of}}} {count}')
        lines.append(f"kvik_transfers_total{{{of}}} {count}")
    return Snapshot(about, "\n".join(lines) + "\n")


def test_an_engine_that_was_started_again_has_done_what_it_did_since() -> None:
    """It keeps its id at its address, and what is counted begins anew."""
    before = looked(1, 5000.0, ("a", "owner", 10), ("b", "", 9000))
    now = rates(before, looked(2, 4.0, ("a", "owner", 100), ("b", "", 20)))
    assert now.interval_s == 4.0
    assert {row.peer: (row.in_bytes, row.transfers) for row in now.peers} == {"a": (25, 25), "b": (5, 5)}


def test_what_was_counted_before_is_no_rate() -> None:
    """Under another name: that of all peers that were forgotten, or one that a peer has now."""
    before = looked(1, 10.0, ("a", "", 100), ("b", "owner", 50), ("gone", "", 7))
    now = rates(before, looked(1, 12.0, ("a", "named", 104), ("gone", "", 57)))
    assert {row.peer: (row.name, row.in_bytes, row.transfers) for row in now.peers} == {
        "a": ("named", 2, 2),
        "gone": ("", 0, 0),
    }


def test_a_name_may_be_anything() -> None:
    """Of a peer, who chooses it, or of an engine: neither an end of a line nor an order to the terminal."""
    name = "a\u2028b\x85c\x1b[31md\n[/e]"
    with engines() as start:
        here, there = start(name="reader"), start(name=name)
        source, target = owned(there, 4), empty(here, 4)
        here.read(target.of(), there.grant(source.of()).ticket).wait(LIMIT)
        text = ask("--prometheus")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert name in {sample.labels.get("peer_name") for sample in samples}
        assert name in {sample.labels["engine_name"] for sample in samples}
        for shown in (ask(), ask(here.id, "--once", "--interval", "0.1"), ask(name, "--once")):
            assert "\x1b" not in shown
            assert r"a\u2028b\x85c" in shown


def test_names_that_are_no_engines_are_passed_over() -> None:
    """Any user of the host may listen under any name."""
    text = "kvik-nobody\n1: 2 0 zz010000 1 1 7 @kvik-stat-" + "0" * 8
    with socket.socket(socket.AF_UNIX) as stranger, engines() as start:
        stranger.bind("\0" + text)
        stranger.listen()
        assert start().id in found.names()


def test_metrics_of_several_engines_make_one_exposition() -> None:
    with engines() as start:
        one, two = start(name='the "first"'), start(name="second")
        raw = ask(one.id, "--prometheus")
        assert raw.startswith("# HELP kvik_engine_info")
        text = ask("--prometheus")
        titles = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(titles) == len(set(titles))
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert {sample.labels["engine"] for sample in samples} >= {one.id, two.id}
        named = {sample.labels["engine_name"] for sample in samples if sample.labels["engine"] == one.id}
        assert named == {'the "first"'}


def hold_the_gil(pipe: Pipe) -> None:
    """A peer whose Python does nothing until it is told to, and lets nobody else do anything either."""
    with kvik.Engine(name="held") as engine:
        pipe.say(id=engine.id)
        pipe.hear()
        pipe.say(held=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # Unlike CDLL, it keeps the GIL.
        pipe.say(held=False)


def test_an_engine_answers_while_its_program_holds_the_gil() -> None:
    with Peer(hold_the_gil) as peer:
        engine = peer.hear()["id"]
        assert peer.ask(hold=True) == {"held": True}
        about, text = found.snapshot(engine)
        # The program has said nothing since, so it was held all the time.
        assert peer.process.stdout is not None
        assert not select.select([peer.process.stdout], [], [], 0)[0]
        assert about.pid == peer.pid
        assert "kvik_grants_live 0" in text
        peer.say(go=True)
        assert peer.hear() == {"held": False}


def test_a_stopped_program_is_said_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(waiting, name="stopped") as peer:
        engine = peer.hear()["id"]
        stop(peer.pid)
        monkeypatch.setattr(found, "ANSWER_SECONDS", 3.0)
        begun = time.monotonic()
        with pytest.raises(StatError, match=r"does not answer: no answer within 3 s.*stopped"):
            found.snapshot(engine)
        assert time.monotonic() - begun < LIMIT
        for arguments in ([], ["--prometheus"]):
            done = CliRunner().invoke(stat, arguments)
            assert "not shown" in done.stderr
            assert engine[:8] in done.stderr
            assert "runs in this network namespace" not in done.stdout
        os.kill(peer.pid, signal.SIGCONT)
        monkeypatch.setattr(found, "ANSWER_SECONDS", 30.0)
        assert found.snapshot(engine)[0].name == "stopped"


def test_a_forked_child_does_not_keep_its_parents_engine_listed() -> None:
    with engines() as start:
        engine = start()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # Until the parent closes its end.
            os._exit(0)
        os.close(reader)
        engine.close()
        try:
            with pytest.raises(StatError):
                found.snapshot(engine.id)
        finally:
            os.close(writer)
            os.waitpid(child, 0)


def test_a_listener_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines() as start:
        engine = start()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(StatError, match="belongs to user"):
            found.snapshot(engine.id)


def test_an_engine_that_refuses_says_why() -> None:
    with engines() as start:
        engine = start()
        with pytest.raises(StatError, match="snapshot, trace"), found.asking(engine.id, "everything"):
            pass


def test_a_program_with_many_open_files_asks_as_well() -> None:
    """Descriptors beyond 1,023 are none for select()."""
    program = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
from kvik.stat.engines import asking
many = [socket.socket() for _ in range(1100)]
with asking(sys.argv[1], "snapshot") as question:
    print(question.about.engine)
"""
    with engines() as start:
        engine = start()
        done = subprocess.run(
            [sys.executable, "-c", program, engine.id],
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert done.stdout == f"{engine.id}\n", done.stderr


def test_what_listens_is_found_in_the_kernels_list() -> None:
    listed = Path("/proc/net/unix").read_text()
    with engines() as start:
        engine = start(transport="tcp")
        assert f"@{PREFIX}{engine.id}" not in listed
        assert engine.id in found.names()


def read_until(terminal: int, text: str) -> str:
    """What a program writes to its terminal, until it has written this or has ended."""
    seen, end = "", time.monotonic() + LIMIT
    while text not in seen and select.select([terminal], [], [], max(end - time.monotonic(), 0))[0]:
        try:
            seen += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:  # Nobody has the other end any more.
            break
    return seen


def test_the_live_view_ends_with_its_engine() -> None:
    with Peer(waiting, name="brief") as peer:
        engine = peer.hear()["id"]
        terminal, theirs = pty.openpty()
        argv = [sys.executable, "-m", "kvik.cli", "stat", engine, "--interval", "0.1"]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": str(WIDTH)}
        with subprocess.Popen(argv, stdout=theirs, stderr=theirs, env=env) as live:
            os.close(theirs)
            try:
                assert "nothing was moved yet" in read_until(terminal, "nothing was moved yet")
                peer.say(end=True)
                assert peer.end() == 0
                assert "engine brief has ended" in read_until(terminal, "has ended")
                assert live.wait(LIMIT) == 0
            finally:
                live.kill()
                os.close(terminal)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (185, "3m05s"), (7805, "2h10m"), (356_400, "4d03h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_options_that_contradict_each_other_are_refused() -> None:
    assert "goes without" in ask("--prometheus", "--json", status=2)
    assert "name it" in ask("--once", status=2)
