"""`kvik store stat`, tenants' options, and the page for scrapers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import kvik
from kvik.config import STORE
from kvik.roles.ports import LOOPBACK
from kvik.stat.snapshot import Samples
from kvik.store import scrape
from kvik.store.cli import DEFAULT_ADDRESS, _looking
from kvik.store.cli import store as command
from kvik.store.doctor.survey import _AMOUNTS, _server
from kvik.store.figures import figures, quantile
from kvik.store.show import WIDTH
from tests.python.peers import until
from tests.python.store_rig import BLOCK, NAMESPACE, Rig, Served

BANK = kvik.Namespace(**{**NAMESPACE.__dict__, "salt": b"bank"})


def ask(*arguments: str, status: int = 0) -> str:
    """What `kvik store stat` prints."""
    done = CliRunner().invoke(command, ["stat", *arguments])
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A store that has stored 16 blocks, was asked for 20, and has refused 4 of a tenant."""
    with (
        Served(
            "--memory", "8MiB", "--policy", "lru", "--tenant", f"bank=quota:{12 * BLOCK},apart"
        ) as process,
        kvik.Engine() as engine,
    ):
        rig = Rig(engine, process.address)
        keys = rig.store.keys(range(80))
        rig.put(keys[: 16 * 32])
        assert rig.got(keys) == 16
        bank = rig.store.within(BANK, tenant="bank")
        assert bank.put(bank.keys(range(64)), rig.pages(range(16))).wait().refused == 4
        del rig.bytes
        yield process


def test_the_words_of_an_option_are_in_its_help_and_the_address_has_a_default() -> None:
    told = " ".join(CliRunner().invoke(command, ["serve", "--help"]).output.split())
    assert "One of selector, lru, s3-fifo, s3-fifo-half, s3-fifo-admit. [KVIK_STORE_POLICY" in told
    assert DEFAULT_ADDRESS == "127.0.0.1:7500"
    assert f"[KVIK_STORE_LISTEN; default {DEFAULT_ADDRESS}]" in told


def test_people_are_shown_tenants_that_have_asked_for_something(served: Served) -> None:
    told = ask(served.address, "--once", "--interval", "0.1")
    assert "default, memory" in told
    assert "bank, memory" in told
    assert "0 B being read" in told
    assert "other, memory" not in told


def test_programs_get_all_of_it(served: Served) -> None:
    told = json.loads(ask(served.address, "--json", "--interval", "0.1"))
    ever, now = told["since_start"], told["now"]
    memory = ever["tiers"]["memory"]
    assert (memory["lookups"], memory["hits"], memory["misses"], memory["hit_rate"]) == (20, 16, 4, 0.8)
    assert (memory["in_bytes"], memory["out_bytes"]) == (28 * BLOCK, 16 * BLOCK)
    assert ever["tenants"]["default"]["memory"]["hits"] == 16
    assert ever["tenants"]["bank"]["memory"]["in_bytes"] == 12 * BLOCK
    assert ever["refused_blocks"] == {"quota": 4}
    assert ever["latency"]["put"]["memory"]["count"] == 2
    assert 0 < ever["latency"]["get_first"]["memory"]["p50"] <= ever["latency"]["get_first"]["memory"]["p99"]
    assert ever["reuse_gap"]["count"] == 16
    assert told["interval"]["tiers"]["memory"]["lookups"] == 0
    assert now["memory_bytes"] == {"": 16 * BLOCK, "bank": 12 * BLOCK}
    assert now["quota_bytes"] == {"bank": 12 * BLOCK}
    assert now["policy"] == {"": "lru", "bank": "lru"}
    assert now["log"] is None


def test_people_get_it_in_columns(served: Served) -> None:
    shown = ask(served.address, "--once", "--interval", "0.1")
    assert max(map(len, shown.splitlines())) <= WIDTH
    for text in ("80.0 %", "bank, memory", "get, first block, memory", "reuse gap", "blocks: 4 quota"):
        assert text in shown, shown


def test_the_metrics_themselves(served: Served) -> None:
    names = [family.name for family in text_string_to_metric_families(ask(served.address, "--prometheus"))]
    assert "kvik_store_lookups" in names
    assert "--once" in ask(served.address, "--prometheus", "--once", status=2)


def test_what_is_shown_at_first_names_the_address() -> None:
    shown = io.StringIO()
    Console(file=shown, width=WIDTH).print(_looking("[fd00::1]:7500", 0.5))
    assert shown.getvalue() == "store at [fd00::1]:7500: looking for 0.5 s\n"


def test_what_is_no_number_is_no_interval() -> None:
    assert "'nan' is not a number" in ask(f"{LOOPBACK}:1", "--once", "--interval", "nan", status=2)


def test_who_does_not_answer_is_named() -> None:
    assert f"{LOOPBACK}:1" in ask(f"{LOOPBACK}:1", "--once", status=1)


@pytest.mark.parametrize(
    "metrics",
    ["<html>", "kvik_store_blocks nan\n", "kvik_store_blocks +Inf\n", 'kvik_store_policy{a="b"} 1\n'],
)
def test_metrics_that_are_no_stores_are_told_in_words(metrics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = SimpleNamespace(metrics=lambda: metrics, members=list)
    native = SimpleNamespace(StoreClient=SimpleNamespace(connect=lambda *_: foreign))
    monkeypatch.setattr("kvik.store.cli._native", native)
    assert "metrics" in ask("--once", "--interval", "0.1", status=1)
    nothing = dict.fromkeys(_AMOUNTS, (0, 0))
    told = {"name": "a:1", "state": "whole", "why": "", "version": "9", "metrics": metrics, **nothing}
    server = _server(told)
    assert server.figures is None
    assert "metrics" in server.unread


def test_a_quantile_is_that_of_prometheus() -> None:
    infinity = float("inf")
    buckets = [(1.0, 10.0), (2.0, 10.0), (5.0, 40.0), (infinity, 40.0)]
    assert quantile(0.25, buckets) == 1.0
    assert quantile(0.5, buckets) == 2.0 + 3.0 * 10 / 30
    assert quantile(0.99, [(1.0, 0.0), (2.0, 0.0), (infinity, 7.0)]) == 2.0


def asked(hits: int, misses: int, member: str = "") -> str:
    """What a server of a store says that gets found, and did not."""
    labels = f'member="{member}",tenant="a",tier="memory"'
    counts = {"lookups_total": hits + misses, "hits_total": hits, "misses_total": misses}
    counts |= {"in_bytes_total": 0, "out_bytes_total": 0}
    return "".join(f"kvik_store_{name}{{{labels}}} {count}\n" for name, count in counts.items())


def test_a_store_that_began_anew_has_done_what_it_says() -> None:
    for before, after in ((asked(50, 0), asked(7, 1)), (asked(0, 50), asked(55, 5))):
        between = figures("x", Samples(before), Samples(after), 1.0).interval
        ever = figures("x", Samples(""), Samples(after), 1.0).since_start
        assert between.tiers == ever.tiers
        assert between.tenants == ever.tenants


def test_a_server_that_began_anew_hides_nothing_of_the_others() -> None:
    before, after = asked(100, 0, "a:1") + asked(10, 0, "b:1"), asked(5, 0, "a:1") + asked(30, 0, "b:1")
    told = figures("x", Samples(before), Samples(after), 1.0, {"a:1": True, "b:1": True})
    assert told.interval.tiers["memory"].hits == 25
    assert {name: server.hits for name, server in told.servers.items()} == {"a:1": 5, "b:1": 20}


def test_what_a_server_did_before_it_answered_is_none_of_the_interval() -> None:
    """It did not answer at the first look: stopped, say, and not started again."""
    before, after = asked(10, 0, "b:1"), asked(1_000_000, 0, "a:1") + asked(30, 0, "b:1")
    told = figures("x", Samples(before), Samples(after), 1.0, {"a:1": True, "b:1": True})
    assert told.interval.tiers["memory"].lookups == 20
    assert told.since_start.tiers["memory"].lookups == 1_000_030
    assert told.servers["a:1"].lookups == 0


def test_every_figure_of_a_tier_is_one_that_a_store_tells(tmp_path: Path) -> None:
    with kvik.Engine() as engine:
        kept = kvik.Store.embedded(
            engine,
            BANK,
            Rig(engine, None).layout,
            log=tmp_path / "log",
            log_size="8MiB",
            object=f"file://{tmp_path}/objects",
        )
        text = re.sub(r"^(kvik_store_(?:log|object).*) \d+$", r"\1 7", kept.metrics(), flags=re.MULTILINE)
        del kept
    now = figures("x", Samples(""), Samples(text), 1.0).now
    for tier in (now.log, now.object):
        assert tier is not None
        assert [name for name, value in tier.items() if value < 7] == []


def test_tenants_have_what_they_were_given() -> None:
    with kvik.Engine() as engine:
        rig = Rig(engine, None)
        tenants = [kvik.Tenant("bank", quota="64KiB"), kvik.Tenant("other one", apart=True)]
        one = kvik.Store.embedded(
            engine, BANK, rig.layout, memory="4MiB", policy="lru", tenants=tenants, tenant="bank"
        )
        assert one.put(one.keys(range(32)), rig.pages(range(8))).wait() == kvik.Stored(4, 0, 4)
        with pytest.raises(kvik.InvalidArgument, match="named twice"):
            kvik.Store.embedded(engine, BANK, rig.layout, tenants=[tenants[0], tenants[0]])
        with pytest.raises(kvik.InvalidArgument, match="no eviction policy"):
            kvik.Store.embedded(engine, BANK, rig.layout, policy="best")  # type: ignore[arg-type]
        del rig.bytes


def test_every_policy_of_the_options_is_one() -> None:
    with kvik.Engine() as engine:
        rig = Rig(engine, None)
        for policy in STORE["policy"].kind.words:  # type: ignore[attr-defined]
            made = kvik.Store.embedded(engine, BANK, rig.layout, memory="1MiB", policy=policy)
            decides = "s3-fifo" if policy == "selector" else policy  # It has seen nothing yet.
            assert f'kvik_store_policy{{tenant="",policy="{decides}"}} 1' in made.metrics()
        del rig.bytes


def test_a_tenant_that_is_apart_has_regions_of_its_own() -> None:
    """A region is opened by one key: blocks of others do not lie in it."""
    with kvik.Engine() as engine:
        rig = Rig(engine, None)
        regions = []
        for apart in (False, True):
            tenants = [kvik.Tenant("bank", apart=apart)]
            shared = kvik.Store.embedded(engine, NAMESPACE, rig.layout, memory="4MiB", tenants=tenants)
            before = engine_regions(engine)
            rig.fill(keys := shared.keys(range(8)))
            shared.put(keys, rig.pages(range(2))).wait()
            bank = shared.within(BANK, tenant="bank")
            bank.put(bank.keys(range(8)), rig.pages(range(2))).wait()
            regions.append(engine_regions(engine) - before)
            del shared, bank
        assert regions == [1, 2]
        del rig.bytes


def engine_regions(engine: kvik.Engine) -> int:
    return int(Samples(engine.metrics()).total("kvik_regions"))


@pytest.mark.parametrize(
    ("text", "tenant"),
    [
        ("a", kvik.Tenant("a")),
        ("a=quota:2GiB", kvik.Tenant("a", "2GiB")),
        ("a=apart", kvik.Tenant("a", None, True)),
        ("a b=quota:64KiB, apart", kvik.Tenant("a b", "64KiB", True)),
    ],
)
def test_tenants_are_read(text: str, tenant: kvik.Tenant) -> None:
    assert kvik.Tenant.parse(text) == tenant
    read = STORE["tenant"].kind.from_text(f"{text};z=apart")
    assert [kvik.Tenant.parse(one) for one in read] == [tenant, kvik.Tenant("z", None, True)]


@pytest.mark.parametrize(
    "text",
    ["", "=apart", "a=", "a=quota", "a=quota:", "a=quota:much", "a=apart,apart", "a=near", "a=apart:1"],
)
def test_what_is_no_tenant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$|NAME=quota"):
        STORE["tenant"].kind.from_text(text)
    done = CliRunner().invoke(command, ["serve", "--tenant", text])
    assert done.exit_code == 2
    assert "NAME=quota" in done.output


def test_who_does_not_speak_http_keeps_nobody_waiting() -> None:
    with scrape.serving([f"{LOOPBACK}:0", "[::1]:0"], lambda: "a 7\n") as bound:
        assert bound[1].startswith("[::1]:")
        host, _, port = bound[0].rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=60) for _ in range(8)]
        silent[0].sendall(b"GET /metrics HTTP/1.1\r\n")
        silent[1].sendall(b"\0" * 9000)
        for address in bound:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                assert answer.read() == b"a 7\n"
        post = urllib.request.Request(f"http://{bound[0]}/metrics", data=b"x")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(post, timeout=60)  # noqa: S310 - the scheme is above
        # More than it takes: the others are closed at once.
        many = [socket.create_connection((host, int(port)), timeout=60) for _ in range(16)]
        assert any(one.recv(1) == b"" for one in many[-2:])
        for one in silent + many:
            one.close()


def test_who_never_reads_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_SECONDS", 0.2)
    page = "a 7\n" * (4 << 20)  # More than sockets hold.

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with scrape.serving([f"{LOOPBACK}:0"], lambda: page) as bound:
        host, _, port = bound[0].rpartition(":")

        def answered() -> bool:
            """Whether it asked in time; it is let go of in any case."""
            before, first = descriptors(), b""
            with socket.create_connection((host, int(port)), timeout=60) as silent:
                with contextlib.suppress(ConnectionError):
                    silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                    first = silent.recv(1)
                assert until(lambda: descriptors() <= before + 1)
            return first == b"H"

        assert any(answered() for _ in range(5))


def test_a_connection_that_is_open_at_the_end_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with scrape.serving([f"{LOOPBACK}:0"], lambda: "a 7\n") as bound:
        host, _, port = bound[0].rpartition(":")
        waiting = socket.create_connection((host, int(port)), timeout=60)
        waiting.sendall(b"GET /metrics HTTP/1.1\r\n")
        # One that is answered after it: by then the exporter serves the one that waits.
        with urllib.request.urlopen(f"http://{bound[0]}/metrics", timeout=60) as answer:
            assert answer.read() == b"a 7\n"
    assert waiting.recv(1) == b""
    waiting.close()
    assert caplog.records == []


def test_a_name_that_is_none_is_an_error() -> None:
    with (
        pytest.raises(OSError, match=r"metrics cannot be served at a\.\.b:80"),
        scrape.serving(["a..b:80"], str),
    ):
        pass


def test_an_address_that_is_taken_is_an_error() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        address = f"{LOOPBACK}:{taken.getsockname()[1]}"
        done = CliRunner().invoke(command, ["serve", "--listen", f"{LOOPBACK}:0", "--metrics", address])
    assert done.exit_code == 1
    assert f"metrics cannot be served at {address}" in done.output
