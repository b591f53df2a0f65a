"""`kvik store doctor`: what servers hold, against real ones; and its rules, against what they could say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import kvik
from kvik.roles.ports import LOOPBACK
from kvik.stat.snapshot import Samples
from kvik.store.cli import store as command
from kvik.store.doctor import Amount, Contents, Finding, Namespace, Server, Survey, findings
from kvik.store.doctor.rules import missed
from kvik.store.doctor.show import finding_lines, survey_lines
from kvik.store.figures import Figures, Times, Traffic, figures
from kvik.store.show import WIDTH, view
from tests.busy import Watch
from tests.python.store_load import BLOCKS, PROMPTS, RUN, Client
from tests.python.store_rig import NAMESPACE, Rig, Served

DEADLINE = 6.0


def doctor(*arguments: str, status: int = 0) -> str:
    """What `kvik store doctor` prints. A server that gets no processor has a minute, where nothing else is
    said, and not the ten seconds of users."""
    patience = () if "--deadline" in arguments else ("--deadline", "60")
    done = CliRunner().invoke(command, ["doctor", *arguments, *patience])
    assert done.exit_code == status, done.output
    return done.output


def told(*arguments: str, status: int = 0) -> dict[str, Any]:
    """The same for programs."""
    document: dict[str, Any] = json.loads(doctor(*arguments, "--json", status=status))
    return document


def codes(document: dict[str, Any]) -> dict[str, str]:
    """The codes of findings, each with the servers it is about."""
    return {found["code"]: found["server"] for found in document["findings"]}


@pytest.fixture
def three() -> Iterator[list[Served]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Served("--memory", "64MiB")) for _ in range(3)]


def names(servers: list[Served]) -> list[str]:
    return [server.address for server in servers]


def filled(servers: list[str], copies: int, prompts: int = PROMPTS) -> Client:
    client = Client(servers, copies)
    for prompt in range(prompts):
        assert client.put(prompt).refused == 0
    return client


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {server["name"]: server for server in document["store"]["servers"]}


def test_a_server_with_other_metrics_keeps_no_other_one_from_being_looked_at(
    three: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another version, while the servers of a store are updated."""
    filled(names(three), 1)
    odd = names(three)[1]

    def of_another_version(name: str, before: Samples, after: Samples, seconds: float) -> Figures:
        return figures(name, before, Samples("kvik_store_policy 1\n") if name == odd else after, seconds)

    monkeypatch.setattr("kvik.store.doctor.survey.figures", of_another_version)
    document = told(*names(three), status=1)
    assert codes(document) == {"server-unreadable": odd}
    assert sum(one["contents"]["held"]["blocks"] for one in by_name(document).values()) == PROMPTS * BLOCKS
    assert f"the metrics of the store at {odd} are not as this version" in document["findings"][0]["fact"]


def test_a_healthy_cluster_has_no_findings(three: list[Served], tmp_path: Path) -> None:
    client = filled(names(three), 1)
    listed = tmp_path / "servers"
    listed.write_text("\n".join(names(three)))
    shown = doctor(f"file:{listed}")
    assert "no findings" in shown
    assert f"of {PROMPTS * BLOCKS:,} blocks: {PROMPTS * BLOCKS:,} with 1 (of 1, as most blocks have)" in shown
    document = told(*names(three), "--copies", "1")
    assert document["findings"] == []
    store = document["store"]
    assert (store["blocks"], store["sample"], store["rows"]) == (PROMPTS * BLOCKS, 1, PROMPTS * BLOCKS)
    assert store["segments"] == PROMPTS * 4
    assert store["by_copies"] == [
        {"blocks": 0, "nbytes": 0}, {"blocks": PROMPTS * BLOCKS, "nbytes": PROMPTS * BLOCKS * RUN},
    ]  # fmt: skip
    (namespace,) = store["namespaces"]
    assert (namespace["tenant"], namespace["model"], namespace["block_bytes"]) == ("default", "tiny@", RUN)
    servers = by_name(document)
    assert sorted(servers) == sorted(names(three))
    for server in servers.values():
        contents = server["contents"]
        assert (server["state"], server["version"]) == ("whole", kvik.__version__)
        # Only it has them, and only in memory.
        assert contents["lost"] == contents["held"] == contents["memory"] == contents["owed"]
        assert contents["stray"]["blocks"] == contents["away"]["blocks"] == contents["log"]["blocks"] == 0
        assert server["figures"]["now"]["blocks"] == contents["held"]["blocks"]
    client.close()


def test_what_would_be_lost_with_two_copies(three: list[Served]) -> None:
    client = filled(names(three), 2)
    document = told(*names(three), "--copies", "2")
    assert document["findings"] == []
    assert all(server["contents"]["lost"]["blocks"] == 0 for server in by_name(document).values())
    # What one has put that keeps a single copy would be gone with its server.
    careless = Client(names(three), 1)
    assert careless.put(PROMPTS).refused == 0
    document = told(*names(three), "--copies", "2", status=1)
    assert codes(document) == {"copies-missing": "all servers"}
    assert document["store"]["short"]["blocks"] == BLOCKS
    lost = sum(server["contents"]["lost"]["blocks"] for server in by_name(document).values())
    assert lost == document["store"]["by_copies"][1]["blocks"] == BLOCKS
    shown = doctor(*names(three), "--copies", "2", status=1)
    assert f"{BLOCKS} of {(PROMPTS + 1) * BLOCKS:,} blocks (4 %," in shown, shown
    # Where nobody has said how many there should be, fewer are no finding, and places are judged by most.
    assert told(*names(three))["store"]["copies"] == 2
    three[0].kill()
    document = told(*names(three), "--copies", "2", status=1)
    assert codes(document)["server-down"] == three[0].address
    assert document["findings"][0]["fails"]
    assert document["findings"][0]["share"] == 0
    short, unseen = document["store"]["short"]["blocks"], document["store"]["short_unseen"]["blocks"]
    assert BLOCKS * PROMPTS > short >= unseen > BLOCKS
    careless.close()
    client.close()


def test_one_that_stops_costs_one_deadline_and_one_that_is_dead_none(three: list[Served]) -> None:
    client = filled(names(three), 1)
    three[0].kill()
    with three[1].stopped():
        watch = Watch()
        document = told(*names(three), "--deadline", str(DEADLINE), status=1)
        took = watch.seconds()
        print(f"it took {took:.2f} s")
    assert took < 2 * DEADLINE
    servers = by_name(document)
    assert [servers[name]["state"] for name in names(three)] == ["down", "down", "whole"]
    assert {found["server"] for found in document["findings"] if found["code"] == "server-down"} == {
        three[0].address,
        three[1].address,
    }
    assert servers[three[2].address]["contents"]["held"]["blocks"] > 0
    # Two of three servers, and no second copies: two of three blocks are misses.
    assert document["findings"][0]["share"] == pytest.approx(2 / 3)
    three[1].kill()
    three[2].kill()
    assert "none of the store's 3 servers answers" in doctor(*names(three), "--deadline", "2", status=1)
    client.close()


def test_one_that_was_started_again_has_too_little(three: list[Served]) -> None:
    client = filled(names(three), 1, 2 * PROMPTS)
    three[2].kill()
    three[2].again()
    document = told(*names(three), status=1)
    # Those that have what is left may be too far above the even share, too.
    assert set(codes(document)) == {"uneven"}
    assert document["findings"][0]["server"] == three[2].address
    fact = document["findings"][0]["fact"]
    assert fact.startswith("it has 0 blocks where clients look, 0.0 % of all; an even share is 33.3 %")
    client.close()


def test_after_a_server_has_joined_some_blocks_lie_elsewhere(three: list[Served]) -> None:
    client = filled(names(three[:2]), 1, 2 * PROMPTS)
    assert told(*names(three[:2]))["findings"] == []
    document = told(*names(three), status=1)
    assert {"blocks-elsewhere", "uneven"} == set(codes(document))
    contents = [by_name(document)[name]["contents"] for name in names(three)]
    stray = sum(one["stray"]["blocks"] for one in contents)
    # Whatever lies elsewhere is what clients look for at the new one.
    assert stray == contents[2]["lacking"]["blocks"] == contents[2]["owed"]["blocks"] > 0
    assert contents[2]["held"]["blocks"] == 0
    # As clients miss these blocks they put them again, and only the old places have some that nobody reads.
    joined = Client(names(three), 1)
    for prompt in range(2 * PROMPTS):
        assert joined.put(prompt).refused == 0
    document = told(*names(three), "--copies", "1", status=1)
    assert codes(document) == {"blocks-elsewhere": "all servers"}
    assert document["store"]["short"]["blocks"] == 0
    joined.close()
    client.close()


def test_servers_that_are_not_alike_are_named(tmp_path: Path) -> None:
    log = ("--log", str(tmp_path / "log"), "--log-size", "16MiB")
    with Served("--memory", "8MiB") as one, Served("--memory", "16MiB", *log) as two:
        shown = doctor(one.address, two.address, status=1)
        assert f"memory: 16.0 MiB at {two.address}; 8.0 MiB at {one.address}" in shown
        assert f"log: 16.0 MiB at {two.address}; none at {one.address}" in shown


def test_a_store_of_one_server_is_looked_at_too() -> None:
    with Served("--memory", "8MiB") as one, kvik.Engine() as engine:
        rig = Rig(engine, one.address)
        rig.put(rig.store.keys(range(64)))
        assert "no findings" in doctor(one.address)
        document = told(one.address, "--copies", "2", status=1)
        assert codes(document) == {"servers-too-few": "all servers"}
        assert document["store"]["servers"][0]["contents"]["lost"]["blocks"] == 16
        del rig.bytes
    assert f"{LOOPBACK}:1" in doctor(f"{LOOPBACK}:1", "--deadline", "2", status=1)
    doctor(f"{LOOPBACK}:1", "--copies", "17", status=2)


# ---- rules ----


def server(name: str, held: int, **given: Any) -> Server:
    contents = Contents(held=Amount(held, held * RUN))
    values: dict[str, Any] = {
        "state": "whole",
        "why": "",
        "version": "0.1",
        "contents": contents,
        "figures": None,
    }
    return Server(name, **{**values, **given})


def survey(*servers: Server, segments: int = 100, size: int = 64, **given: Any) -> Survey:
    blocks = segments * size
    values: dict[str, Any] = {
        "namespaces": (), "wanted": None, "copies": 1, "by_copies": (Amount(), Amount(blocks, blocks * RUN)),
        "short": Amount(), "short_unseen": Amount(), "sample": 1, "rows": blocks, "segments": segments,
        "segment_blocks": blocks, "segment_squares": float(segments * size * size), "largest_segment": size,
    }  # fmt: skip
    return Survey(servers, **{**values, **given})


def found(of: Survey) -> list[str]:
    return [one.code for one in findings(of)]


def test_chance_is_no_fault_and_more_is_one() -> None:
    # 100 segments on two servers: 50 each, with a standard deviation of 5. Four of them are 20 segments.
    assert found(survey(server("a", 69 * 64), server("b", 31 * 64))) == []
    told = findings(survey(server("a", 71 * 64), server("b", 29 * 64)))
    assert [(one.code, one.server) for one in told] == [("uneven", "a"), ("uneven", "b")]
    assert (
        "an even share is 50.0 %, and for 100 segments hashing alone makes that 30.0 % to 70.0 %"
        in told[0].fact
    )
    # Of many segments the same is none, and less than a tenth costs nothing.
    many = {"segments": 100_000, "size": 64}
    assert found(survey(server("a", 56_000 * 64), server("b", 44_000 * 64), **many)) == ["uneven", "uneven"]
    assert found(survey(server("a", 54_000 * 64), server("b", 46_000 * 64), **many)) == []
    # One segment that many prompts share is chance too, however large.
    assert found(survey(server("a", 6000), server("b", 400), segment_squares=5600.0**2 + 50 * 64 * 64)) == []
    # What was not all looked at is not compared.
    assert found(survey(server("a", 71 * 64), server("b", 0, state="part"))) == ["server-incomplete"]


def test_blocks_that_moved_lately_are_none_until_there_are_many() -> None:
    def moved(stray: int, copies: int | None = None) -> Survey:
        held, lie = Amount(1000, 1000 * RUN), Amount(stray, stray * RUN)
        one = server("a", 0, contents=Contents(held=held, stray=lie))
        return survey(one, wanted=copies)

    assert found(moved(10)) == []
    (few,) = findings(moved(11))
    assert (few.code, few.share) == ("blocks-elsewhere", 0.011)
    assert "taken: 1 copies, as most blocks have" in few.fact
    (many,) = findings(moved(501, 1))
    assert "as clients have them" in many.advice
    assert "taken" not in many.fact


def test_older_and_different_servers_are_named() -> None:
    told = findings(
        survey(server("a", 3200), server("b", 0, state="older", version="", why="no such request"),
               server("c", 3200, version="0.2"))
    )  # fmt: skip
    assert [(one.code, one.server) for one in told] == [
        ("server-older", "b"),
        ("versions-differ", "all servers"),
    ]
    assert told[1].fact == "0.1 at a; 0.2 at c"


def test_what_is_missed_when_servers_are_down() -> None:
    assert missed(3, 1, 1) == pytest.approx(1 / 3)
    assert missed(3, 1, 2) == 0
    assert missed(4, 2, 2) == pytest.approx(1 / 6)
    assert missed(2, 2, 3) == 1


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All figures of a store with a log and an object store."""
    folder = tmp_path_factory.mktemp("tiers")
    with kvik.Engine() as engine:
        layout = kvik.Layout(8, 4096)
        store = kvik.Store.embedded(
            engine, NAMESPACE, layout, memory="4MiB", log=folder / "log", log_size="16MiB",
            object=f"file://{folder / 'objects'}", object_size="16MiB", object_batch="1MiB",
        )  # fmt: skip
        return store.metrics()


def changed(metrics: str, **values: float) -> Figures:
    """The figures of a store that counts this: metrics by name, with their labels behind two underscores."""
    for name, value in values.items():
        metric, _, label = name.partition("__")
        pattern = rf"^(kvik_store_{metric}(\{{[^}}]*{label}[^}}]*\}})?) .*$"
        metrics, count = re.subn(pattern, rf"\g<1> {value}", metrics, flags=re.MULTILINE)
        assert count, f"there is no {name}"
    return figures("a", Samples(""), Samples(metrics), 0.0)


@pytest.mark.parametrize(
    ("code", "fails", "values"),
    [
        ("disk-failing", True, {"log_failures_total": 1}),
        ("object-store-away", True, {"object_shut": 1}),
        ("object-store-failing", False, {"object_failures_total": 7, "object_requests_total__get": 500}),
        ("corrupt-blocks", True, {"corrupt_blocks_total": 1}),
        ("corrupt-blocks", True, {"log_quarantined_records_total": 1}),
        ("corrupt-blocks", True, {"object_quarantined_records_total": 1}),
        ("blocks-refused", False, {"blocks": 1000, "refused_blocks_total__quota": 11}),
        ("log-behind", False, {"blocks": 1000, "log_unwritten_blocks_total": 11}),
        ("object-store-behind", False, {"blocks": 1000, "object_unwritten_blocks_total": 11}),
    ],
)
def test_what_a_server_says_of_itself(metrics: str, code: str, fails: bool, values: dict[str, float]) -> None:
    assert found(survey(server("a", 6400, figures=changed(metrics)))) == []
    (one,) = findings(survey(server("a", 6400, figures=changed(metrics, **values))))
    assert (one.code, one.fails, one.server) == (code, fails, "a")


def test_a_few_that_were_refused_are_chance(metrics: str) -> None:
    few = changed(metrics, blocks=1000, refused_blocks_total__quota=9, log_unwritten_blocks_total=9)
    assert found(survey(server("a", 6400, figures=few))) == []


def test_memory_that_loses_blocks_before_they_come_back(metrics: str) -> None:
    now = changed(metrics)
    tiers = {"memory": Traffic(100, 70, 30, 0.7, 0, 0)}

    def ages(idle: float, gap: float, count: int) -> Figures:
        period = dataclasses.replace(
            now.since_start, idle=Times(count, idle, idle), reuse_gap=Times(count, gap, gap), tiers=tiers
        )
        return dataclasses.replace(now, since_start=period)

    (one,) = findings(survey(server("a", 6400, figures=ages(10, 60, 100))))
    assert (one.code, one.share) == ("evicted-too-soon", 0.3)
    assert found(survey(server("a", 6400, figures=ages(60, 10, 100)))) == []
    assert found(survey(server("a", 6400, figures=ages(10, 60, 99)))) == []


def test_what_servers_say_of_themselves_gives_a_terminal_no_orders(metrics: str) -> None:
    odd = "\x1b[2J\x07\r\n\u202e"
    policy = figures("store", Samples(""), Samples(metrics.replace('policy="', f'policy="{odd[:5]}')), 0.0)
    one = server(f"a{odd}", 71 * 64, version=f"0.1{odd}", figures=policy)
    other = server(f"b{odd}", 29 * 64, version=f"0.2{odd}", figures=policy)
    gone = server(f"c{odd}", 0, state="down", why=f"gone{odd}")
    spaces = (Namespace("1", f"t{odd}", f"m{odd}", RUN, Amount(1, RUN), Amount(1, RUN)),)
    looked = survey(one, other, gone, namespaces=spaces)
    lines = [*survey_lines(looked), *finding_lines(findings(looked))]
    text = "\n".join(lines)
    assert all(line.isprintable() for line in lines), text
    assert all(f"{name}?[2J" in text for name in ("a", "0.1", "0.2", "gone", "t", "m")), text
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as shown:
        console.print(view(policy))
    assert all(line.isprintable() for line in shown.get().splitlines()), shown.get()
    assert "?[2J" in shown.get()


def test_what_fails_is_said_first_and_all_of_it_in_words(metrics: str) -> None:
    broken = server("a", 100, figures=changed(metrics, log_failures_total=1))
    told = findings(survey(broken, server("b", 6000), server("c", 0, state="down", why="it is away")))
    assert [one.code for one in told[:2]] == ["server-down", "disk-failing"]
    lines = list(finding_lines(told))
    assert lines[0] == "1. server-down: c"
    assert [line.split()[0] for line in lines[1:4]] == ["fact", "cost", "advice"]
    sampled = survey(broken, server("b", 6000), sample=8)
    text = "\n".join(survey_lines(sampled))
    assert "1 block in 8 was looked at" in text
    assert "memory" not in text.splitlines()[0]
    assert all(isinstance(one, Finding) and one.advice.endswith(".") for one in told)
