"""What an engine counts: in the right format, right on both sides, and as it is documented."""

import functools
import os
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import kvik
from kvik._native import engine_metrics
from kvik.stat.page import page
from tests.python.peers import LIMIT, Peer, empty, engines, never_issued, owned, owner, until

ROOT = Path(__file__).resolve().parents[2]


def families(engine: kvik.Engine) -> dict[str, Metric]:
    """What a scraper sees, by the name that its type lines have."""
    found = text_string_to_metric_families(engine.metrics())
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}


def value(engine: kvik.Engine, name: str, **labels: str) -> float:
    """The sum of the samples with this name and these labels."""
    samples = (sample for family in families(engine).values() for sample in family.samples)
    return sum(
        sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_every_metric_is_there_as_the_table_says() -> None:
    with engines() as start:
        here, there = start(name='a "quoted" \\ name'), start()
        here.read(empty(here).of(), there.grant(owned(there).of()).ticket).wait(LIMIT)
        with pytest.raises(kvik.KvikError):
            here.read(empty(here).of(), never_issued(there, empty(here).layout), deadline=0.3).wait(LIMIT)
        found = families(here)
        assert list(found) == [name for name, *_ in engine_metrics()]
        for name, kind, labels, text in engine_metrics():
            assert (found[name].type, found[name].documentation) == (kind, text)
            assert name.startswith("kvik_")
            assert name.endswith("_total") == (kind == "counter"), name
            for sample in found[name].samples:
                assert set(sample.labels) - {"le"} == set(labels), sample
        info = found["kvik_engine_info"].samples[0].labels
        assert info["engine_name"] == 'a "quoted" \\ name'
        assert (info["engine"], info["version"]) == (here.id, kvik.__version__)


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_both_sides_count_bytes_in_their_direction(transport: kvik.TransportName) -> None:
    with engines() as start:
        here, there = start(name="here"), start(name="there")
        source, target = owned(there), empty(here)
        read = here.read(target.of(), there.grant(source.of()).ticket, transport=transport).wait(LIMIT)
        sink = empty(there)
        grant = there.grant(sink.of([0, 1]), right="write")
        written = here.write(target.of([3, 4]), grant.ticket, transport=transport).wait(LIMIT)
        bytes_of = "kvik_transfer_bytes_total"
        for engine, role, peer, way in (
            (here, "initiator", there, ("in", "out")),
            (there, "owner", here, ("out", "in")),
        ):
            labels = {"role": role, "peer": peer.id, "peer_name": peer.name, "transport": transport}

            def counted(engine: kvik.Engine = engine, labels: dict[str, str] = labels) -> bool:
                return value(engine, "kvik_transfers_total", outcome="ok", **labels) == 2

            assert until(counted)
            assert value(engine, bytes_of, direction=way[0], outcome="ok", **labels) == read.bytes
            assert value(engine, bytes_of, direction=way[1], outcome="ok", **labels) == written.bytes
            assert value(engine, bytes_of) == read.bytes + written.bytes
        times = value(here, "kvik_transfer_phase_seconds_total", op="read", phase="wire")
        assert 0 < times <= value(here, "kvik_transfer_seconds_sum", op="read", transport=transport)
        assert value(here, "kvik_transfer_pages_total", op="read") == read.pages
        assert value(here, "kvik_transfer_extents_total", op="write") == written.extents


def counts(engine: kvik.Engine, family: str, count: float, **labels: str) -> bool:
    """Whether a family's samples with these labels come to so many."""
    return value(engine, family, **labels) == count


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_both_sides_count_by_class(transport: kvik.TransportName) -> None:
    with engines() as start:
        here, there = start(), start()
        target, grant = empty(here), there.grant(owned(there).of(), use="many")
        classes: list[kvik.TrafficClassName] = ["bulk", "handover", "bulk"]
        for one in classes:
            read = here.read(target.of(), grant.ticket, transport=transport, traffic_class=one).wait(LIMIT)
        for engine, direction in ((here, "in"), (there, "out")):
            for traffic_class, count in (("bulk", 2), ("handover", 1)):
                of_class = {"class": traffic_class, "transport": transport}
                assert until(functools.partial(counts, engine, "kvik_transfers_total", count, **of_class))
                moved = value(engine, "kvik_transfer_bytes_total", direction=direction, **of_class)
                assert moved == count * read.bytes
        assert value(here, "kvik_transfer_seconds_count", **{"class": "bulk"}) == 2


def test_refusals_are_counted_by_their_cause() -> None:
    with engines() as start:
        here, there = start(), start()
        source, target = owned(there), empty(here)
        some = there.grant(source.of([0, 1]), use="many")
        gone = there.grant(source.of())
        gone.revoke()
        for ticket, positions, code in (
            (some.ticket, [5], "page_not_granted"),
            (gone.ticket, None, "grant_revoked"),
            (gone.ticket, None, "grant_revoked"),
        ):
            with pytest.raises(kvik.KvikError) as refused:
                here.read(target.of([0] if positions else None), ticket, positions).wait(LIMIT)
            assert refused.value.code == code
        assert until(lambda: value(there, "kvik_refusals_total", peer=here.id, code="grant_revoked") == 2)
        assert value(there, "kvik_refusals_total", code="page_not_granted") == 1
        assert value(there, "kvik_grants_ended_total", state="revoked") == 1
        assert value(there, "kvik_grants_live") == 1
        assert value(here, "kvik_transfers_total", outcome="grant_revoked") == 2


def test_a_peer_that_is_killed_ends_its_session_and_may_come_again() -> None:
    with engines() as start:
        here = start()
        target = empty(here)
        with Peer(owner, right="read") as peer:
            told = peer.hear()
            here.read(target.of(), told["ticket"]).wait(LIMIT)
            assert value(here, "kvik_sessions_open") == 1
        assert until(lambda: value(here, "kvik_sessions_ended_total", code="peer_lost") == 1)
        assert value(here, "kvik_sessions_open") == 0
        assert value(here, "kvik_reconnects_total") == 0
        # What was counted for it stays.
        assert value(here, "kvik_transfers_total", peer=told["id"], outcome="ok") == 1


def test_memory_threads_and_the_end() -> None:
    with engines() as start:
        engine = start(memory_cap="64MiB", io_threads=1)
        region = engine.allocate(1 << 20)
        assert value(engine, "kvik_registered_bytes") == 1 << 20
        assert value(engine, "kvik_memory_cap_bytes") == 64 << 20
        threads = {
            sample.labels["thread"] for sample in families(engine)["kvik_thread_cpu_seconds_total"].samples
        }
        assert threads == {"kvik-ctl", "kvik-io-0", "kvik-copy-0", "kvik-map", "kvik-stat"}
        region.close()
        assert value(engine, "kvik_regions") == 0
        engine.close()
        # The last figures can still be read.
        used = value(engine, "kvik_thread_cpu_seconds_total")
        assert used > 0
        assert value(engine, "kvik_thread_cpu_seconds_total") == used


def test_a_forked_child_is_refused() -> None:
    with engines() as start:
        engine = start()
        pid = os.fork()
        if pid == 0:
            try:
                engine.metrics()
            except kvik.EngineForked:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert committed == page(), "run: python -m kvik.stat.page > docs/reference/metrics.md"
