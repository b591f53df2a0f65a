"""The load driver against a stub on real sockets: what is sent, when, and what of it is recorded."""

from __future__ import annotations

import asyncio
import datetime
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from kvik_lab import cli
from kvik_lab.errors import LabError
from kvik_lab.load import http, search
from kvik_lab.load.answer import understand
from kvik_lab.load.drive import Driver, Planned, Sent
from kvik_lab.load.http import Exchange
from kvik_lab.load.prompts import Made
from kvik_lab.load.run import run
from kvik_lab.load.spec import parse_spec
from kvik_lab.load.tokens import ByteText, Content
from kvik_lab.records import Client, LoadResult, Request, dump, read_load
from kvik_lab.records.measures import PER_REQUEST, Goals, ttft, ttft_from_send
from tests.lab.load.stub import MODEL, Stub, stub

CLOSED = {"kind": "closed", "concurrency": 2}


async def load(server: Stub | str, **more: Any) -> LoadResult:
    url = server if isinstance(server, str) else server.url
    spec = {"arrival": CLOSED, "requests": 6, "prompt": {"tokens": 40, "output": 5}, **more}
    return await run(parse_spec({"url": url, **spec}))


async def test_what_is_sent_and_what_is_recorded() -> None:
    async with stub() as server:
        result = await load(server, warmup=2, seed=7)
    assert len(server.served) == len(result.requests) == 8
    assert [one.phase for one in result.requests] == ["warmup"] * 2 + ["measure"] * 6
    by_id = {one.headers["x-request-id"]: one for one in server.served}
    for request in result.requests:
        served = by_id[request.id]
        assert len(served.body["prompt"]) == request.prompt_tokens == request.prompt_tokens_counted == 40
        assert served.body["model"] == MODEL
        assert served.body["max_tokens"] == request.output_tokens == request.output_tokens_counted == 5
        assert request.ok
        assert request.cached_tokens == 3
        assert request.timing == {"route": 0.00025, "prefill": 0.012, "total": 0.099}
        seen = [served_at - result.zero / 1e9 for served_at in served.tokens]
        # One process, one clock: a token is read after it was written, and before the next one here.
        assert all(a <= b for a, b in zip(seen, request.tokens, strict=True))
    assert len({tuple(one.body["prompt"][:8]) for one in server.served}) == 8
    assert len({one.prompt_digest for one in result.requests}) == 8


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ('{"choices": [{"text": "a\\ud83d"}]}', None),
        ('{"choices": [{"text": "a", "finish_reason": 5}]}', None),
        ('{"choices": [{"text": "a", "finish_reason": "\\ud83d"}]}', None),
        ('{"choices": [{"text": "a"}], "usage": {"prompt_tokens": true}}', None),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_whatever_a_server_streams_becomes_a_record(message: str, error: str | None) -> None:
    """One strange message costs its own request at most, and not the results of the whole load."""
    stream = f"data: {message}\n\ndata: [DONE]\n\n".encode()
    timing = {"server-timing": f"route;dur={'9' * 400}, total;dur=2"}
    exchange = Exchange(sent=1, status=200, headers=timing, pieces=[(3, stream)], ended=4)
    driver = cast(Driver, SimpleNamespace(zero=0, _mark="m", _since=float, _tokens=lambda _: 1))
    planned = Planned(0, "measure", Made((5,), 1), 1, None)
    request = Driver.record(driver, Sent(planned, 1, exchange))
    assert (error or "") in (request.error or "")
    assert request.ok == (error is None)
    assert request.timing == {"total": 0.002}
    result = LoadResult(began=1, ended=2, client=Client(driver="builtin"), requests=(request,))
    assert LoadResult.model_validate_json(dump(result).encode()).requests == (request,)


def test_a_character_that_comes_in_two_messages_is_one() -> None:
    halves = [json.dumps({"choices": [{"text": half}]}) for half in ("\ud83d", "\ude00")]
    stream = "".join(f"data: {one}\n\n" for one in (*halves, "[DONE]")).encode()
    answer = understand(Exchange(sent=1, status=200, pieces=[(3, stream)], ended=4))
    assert (answer.text, answer.error) == ("\U0001f600", None)


async def test_a_seed_gives_the_same_prompts_and_another_one_others() -> None:
    async with stub() as server:
        first, same, other = [await load(server, seed=seed) for seed in (1, 1, 2)]
    digests = [[one.prompt_digest for one in result.requests] for result in (first, same, other)]
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def take(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the requests take so long for the rule, one after another, and the last of these from then on: by
    the clock, a few that wait for a processor make another series of them."""

    def stated(request: Request) -> float | None:
        at = request.iteration
        if ttft(request) is None:
            return None
        return seconds[min(at, len(seconds) - 1)] + 1e-6 * (at * 7 % 5)  # as no two times are the same

    monkeypatch.setitem(cast("dict[str, Any]", PER_REQUEST), "ttft", stated)


async def test_a_warm_up_goes_on_until_its_times_keep_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the slow ones, and as long again as a level has to last. What is measured is that of any other
    length of the warm-up."""
    warmup = {"until": "changepoint", "min": 10, "max": 60}
    results = []
    for slow in (0, 8):
        take(monkeypatch, *[0.1] * slow, 0.01)
        async with stub(gap=0) as server:
            results.append(await load(server, warmup=warmup, seed=7))
        assert len(server.served) == len(results[-1].requests)
    steady, longer = results
    for result in results:
        warmed = result.client.warmup
        assert warmed is not None
        assert (warmed.rule, warmed.metric) == ("changepoint", "ttft")
        assert warmed.level_from is not None
        assert 10 <= warmed.requests - warmed.level_from <= warmed.requests < 60
        assert sum(one.phase == "warmup" for one in result.requests) == warmed.requests
        assert warmed.seconds >= sum(ttft(one) or 0 for one in result.requests[: warmed.requests])
    assert longer.client.warmup is not None
    assert (longer.client.warmup.level_from or 0) >= 8
    measured = [[(one.iteration, one.prompt_digest) for one in result.requests[-6:]] for result in results]
    assert measured[0] == measured[1]
    assert steady.requests[-6].phase == "measure"


@pytest.mark.parametrize("refused", [range(0), range(12)], ids=["slower and slower", "nothing answered"])
async def test_a_warm_up_ends_at_its_bound_without_a_level(
    refused: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, *(0.01 * at for at in range(1, 20)))
    async with stub(refused=refused, gap=0) as server:
        result = await load(server, warmup={"until": "changepoint", "min": 8, "max": 12}, requests=2)
    assert result.client.warmup is not None
    assert (result.client.warmup.requests, result.client.warmup.level_from) == (12, None)
    assert [one.phase for one in result.requests] == ["warmup"] * 12 + ["measure"] * 2


async def test_a_warm_up_by_count_is_in_the_record() -> None:
    async with stub() as server:
        result = await load(server, warmup=3)
    assert result.client.warmup is not None
    assert (result.client.warmup.rule, result.client.warmup.requests) == ("count", 3)


@pytest.mark.parametrize(
    ("warmup", "said"),
    [
        ({"until": "changepoint", "min": 4}, "warmup.changepoint.min: Input should be greater than"),
        ({"until": "changepoint", "min": 20, "max": 10}, "write max: 20 or more"),
        ({"until": "changepoint", "metric": "tftt"}, "no request has the metric 'tftt'; there are: ttft"),
        (-1, "warmup.count: Input should be greater than or equal to 0"),
        ({"until": "quiet"}, "warmup.changepoint.until: Input should be 'changepoint'"),
    ],
)
def test_a_warm_up_that_is_none(warmup: int | dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        parse_spec({"url": "http://127.0.0.1:1", "arrival": CLOSED, "warmup": warmup})


async def test_latency_counts_from_when_a_request_was_due() -> None:
    """A server that stalls makes an open load late; who measures from sending sees none of it."""
    async with stub(first=0.05, gap=0, busy=True) as server:
        result = await load(
            server, arrival={"kind": "constant", "rate": 100.0}, requests=20, most_in_flight=2
        )
    waits = [ttft(one) or 0 for one in result.requests]
    # The last was due after 0.2 s; 20 requests one after another take 1 s.
    assert waits[-1] > 0.7
    assert waits[-1] > waits[0]
    # Only two are under way at once, so the last one was sent when 18 had been served, after 0.9 s.
    assert waits[-1] - (ttft_from_send(result.requests[-1]) or 0) > 0.6
    assert all((one.sent or 0) >= (one.due or 0) for one in result.requests)


async def test_rounds_begin_together_and_wait_for_each_other() -> None:
    async with stub(first=0.02) as server:
        result = await load(server, arrival={"kind": "rounds", "concurrency": 3, "pause": 0.03})
    dues = sorted({one.due for one in result.requests if one.due is not None})
    assert len(dues) == 2
    first_ends = [one.end or 0 for one in result.requests if one.due == dues[0]]
    assert len(first_ends) == 3
    assert dues[1] >= max(first_ends) + 0.03


async def test_closed_holds_its_concurrency_and_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FRESH_SECONDS", 3600.0)  # none has been idle for too long
    async with stub(first=0.03) as server:
        result = await load(server, arrival={"kind": "closed", "concurrency": 2, "pause": 0.02})
    edges = sorted(
        [(one.sent or 0, 1) for one in result.requests] + [(one.end or 0, -1) for one in result.requests]
    )
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    assert most == 2
    assert server.connections <= 3  # those two, and the one that asked for the model


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refused", "HTTP 503: "),
        ("gone", "the connection ended before the answer did"),
        ("cut", "the connection ended before the answer did"),
        ("error", "in the stream: "),
        ("silent", "no end within 1 s"),
    ],
)
async def test_what_fails_is_recorded_and_sent_once(fault: str, said: str) -> None:
    async with stub(fault=fault) as server:
        # What answers has more time than a busy machine takes.
        result = await load(server, requests=3, timeout=1.0 if fault == "silent" else 30.0)
    assert len(server.served) == 3
    for request in result.requests:
        assert not request.ok
        assert said in (request.error or "")
        assert request.end is not None


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LabError, match=r"no connection to 127\.0\.0\.1:1: .*is the server up"):
        await load("http://127.0.0.1:1")
    result = await load("http://127.0.0.1:1", model="named", requests=1)
    assert "no connection" in (result.requests[0].error or "")
    assert result.requests[0].sent is None


async def test_tokens_are_counted_and_not_messages() -> None:
    async with stub(a_message=3) as server:
        with_ids, without = [await load(server, token_ids=on, requests=2) for on in (True, False)]
    assert [len(one.tokens) for one in with_ids.requests] == [5, 5]
    assert [len(one.tokens) for one in without.requests] == [2, 2]
    assert len(set(with_ids.requests[0].tokens)) == 2


async def test_chat_prompts_are_exact_with_what_the_template_adds() -> None:
    async with stub(added=11) as server:
        prompt = {"tokens": 60, "output": 3, "by": {"kind": "bytes"}, "system": "Be brief."}
        result = await load(server, endpoint="chat", prompt=prompt, requests=4)
    assert result.requests[0].phase == "warmup"
    assert {one.prompt_tokens_counted for one in result.requests[1:]} == {60}
    assert {one.prompt_tokens for one in result.requests[1:]} == {60}
    assert server.served[-1].body["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("by", [{"kind": "ids"}, {"kind": "bytes"}])
async def test_turns_send_all_that_was_said(by: dict[str, Any]) -> None:
    prompt = {"tokens": 40, "output": 5, "by": by}
    async with stub() as server:
        result = await load(server, prompt=prompt, turns={"turns": 3, "new_tokens": 7}, requests=2)
    assert len(result.requests) == 6
    for number in range(2):
        turns = sorted(
            (one for one in result.requests if one.conversation == number), key=lambda one: one.turn or 0
        )
        assert [one.prompt_tokens_counted for one in turns] == [40, 52, 64]
        assert [one.prompt_tokens for one in turns] == [40, 52, 64]
        assert all((later.sent or 0) >= (one.end or 0) for one, later in pairwise(turns))
    share = next(one.value for one in result.figures if one.metric == "repeated_prompt_share")
    assert share == pytest.approx((45 + 57) / (40 + 52 + 64))


async def test_turns_of_chat_begin_with_all_that_was_said_before() -> None:
    """The third one with the second, too: what the server counted of the turn before, and its answer."""
    prompt = {"tokens": 40, "output": 5, "by": {"kind": "bytes"}, "overhead": 0}
    turns = {"turns": 3, "new_tokens": 7}
    async with stub() as server:
        result = await load(server, endpoint="chat", prompt=prompt, turns=turns, requests=1)
    assert [one.prompt_tokens_counted for one in result.requests] == [40, 52, 64]
    share = next(one.value for one in result.figures if one.metric == "repeated_prompt_share")
    assert share == pytest.approx((45 + 57) / (40 + 52 + 64))


@pytest.mark.parametrize("pause", [0.0, 0.2])
async def test_a_later_turn_is_due_when_it_can_be_sent(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its making takes the client's own time, which is in no latency: neither before the pause nor after."""
    counted: list[int] = []
    count = ByteText.count

    def noted(self: ByteText, content: Content) -> int:
        tokens = count(self, content)
        counted.append(time.monotonic_ns())
        return tokens

    monkeypatch.setattr(ByteText, "count", noted)
    prompt = {"tokens": 40, "output": 5, "by": {"kind": "bytes"}}
    turns = {"turns": 3, "new_tokens": 7, "pause": pause}
    async with stub(first=0, gap=0) as server:
        result = await load(server, prompt=prompt, turns=turns, requests=1)
    assert len(counted) == 4  # two for each turn that is made of an answer
    first, *later = result.requests
    for number, (before, one) in enumerate(pairwise((first, *later))):
        made = (counted[2 * number + 1] - result.zero) / 1e9
        assert (one.due or 0) >= max(made, (before.end or 0) + pause - 1e-9)
        assert (one.sent or 0) >= (one.due or 0)


@pytest.mark.parametrize("arrival", [CLOSED, {"kind": "poisson", "rate": 50.0}])
async def test_turns_by_ids_need_the_answers_ids(arrival: dict[str, Any]) -> None:
    async with stub() as server:
        with pytest.raises(LabError, match="turns by ids need the ids of the answers"):
            await load(server, arrival=arrival, turns={"turns": 2, "new_tokens": 3}, token_ids=False)


async def test_shared_beginnings_have_the_stated_share() -> None:
    prompt = {"tokens": 40, "output": 2, "shared": {"share": 0.5, "groups": 2}}
    async with stub() as server:
        result = await load(server, prompt=prompt, requests=10)
    beginnings = [tuple(one.body["prompt"][:20]) for one in server.served]
    assert len(set(beginnings)) == 2
    assert len({tuple(one.body["prompt"]) for one in server.served}) == 10
    share = next(one.value for one in result.figures if one.metric == "repeated_prompt_share")
    assert share == pytest.approx(0.5 * 8 / 10)


async def test_a_search_finds_the_rate_that_holds() -> None:
    """Goals that the slowest machine holds, and a server that refuses what comes at the second rate."""
    async with stub(refused=range(25, 50)) as server:
        result = await load(
            server,
            arrival={"kind": "constant", "rate": 1.0},
            prompt={"tokens": 8, "output": 1},
            requests=25,
            goals={"ttft": 30.0},
            search={"low": 50.0, "precision": 0.3, "attainment": 0.9},
        )
    assert len(server.served) == 5 * 25
    tried = [(one.levels["rate"], one.value) for one in result.figures if one.metric == "attainment"]
    assert [attained for _, attained in tried] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert [rate for rate, _ in tried] == pytest.approx([50, 100, 70.7, 84.1, 84.1], rel=1e-3)
    figures = {one.metric: one for one in result.figures}
    assert figures["rate_held"].levels["measured"] == 2
    assert figures["rate_held"].value == tried[-1][0]
    assert figures["rate_missed"].value == 100


async def test_a_search_narrows_the_interval_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a server that holds up to 50 requests a second: twofold, then by halves, then once more."""
    rates = []

    async def attained(_driver: Driver, rate: float, _goals: Goals) -> float:
        rates.append(rate)
        return float(rate <= 50)

    monkeypatch.setattr(search, "_attained", attained)
    spec = parse_spec(
        {
            "url": "http://127.0.0.1:1", "arrival": {"kind": "constant", "rate": 1.0}, "goals": {"ttft": 0.1},
            "prompt": {"tokens": 8, "output": 1}, "search": {"low": 5.0, "precision": 0.3},
        }
    )  # fmt: skip
    found = await search.search(cast("Driver", SimpleNamespace(spec=spec)))
    figures = {one.metric: one for one in found}
    held, missed = figures["rate_held"], figures["rate_missed"]
    assert rates[:5] == [5, 10, 20, 40, 80]
    assert held.value <= 50 < missed.value <= held.value * 1.3
    assert held.levels["measured"] == 2


async def test_a_search_whose_lowest_rate_misses_says_so() -> None:
    async with stub(first=0.05) as server:
        with pytest.raises(LabError, match=r"the lowest rate, do not hold the goals: 0\.0% of requests"):
            await load(
                server, arrival={"kind": "poisson", "rate": 1.0}, requests=5, goals={"ttft": 0.001},
                search={"low": 50.0},
            )  # fmt: skip


async def _command(folder: Path, spec: dict[str, Any]) -> asyncio.subprocess.Process:
    source = folder / "load.json"
    source.write_text(json.dumps(spec))
    command = [
        sys.executable,
        "-m",
        "kvik.cli",
        "lab",
        "load",
        "--spec",
        str(source),
        "--out",
        str(folder / "out"),
    ]
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


async def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    async with stub() as server:
        spec = {"url": server.url, "arrival": CLOSED, "requests": 3, "prompt": {"tokens": 9, "output": 2}}
        process = await _command(tmp_path, spec)
        out, err = await process.communicate()
    assert process.returncode == 0, err
    assert b"ttft" in out
    result = read_load(tmp_path / "out")
    assert len(result.requests) == 3
    assert result.client.driver == "builtin"
    assert result.client.load["requests"] == 3


async def test_told_to_stop_it_ends_and_writes_nothing(tmp_path: Path) -> None:
    async with stub(fault="silent") as server:
        process = await _command(tmp_path, {"url": server.url, "arrival": CLOSED})
        while not server.served:
            assert process.returncode is None
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert b"nothing was written" in err
    assert not (tmp_path / "out").exists()
    assert [one.name for one in tmp_path.iterdir()] == ["load.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requsts": 3}, "requsts: Extra inputs are not permitted"),
        ({"url": "127.0.0.1:80"}, "url: .*begins with http"),
        ({"url": "http://127.0.0.1:99999"}, "url: .*Port out of range"),
        ({"url": "http://127.0.0.1:80/\u5bae"}, "url: .*ASCII"),
        ({"headers": {"X-Who": "\u5bae"}}, "headers: .*X-Who: .*is no header"),
        ({"headers": {"X-Who": "a\r\nX-More: b"}}, "headers: .*X-Who: .*is no header"),
        ({"body": {"since": datetime.date(2026, 1, 1)}}, "body.since: .*JSON"),
        ({"arrival": {"kind": "poisson"}}, "arrival.poisson.rate: Field required"),
        ({"endpoint": "chat"}, "chat takes no token ids"),
        ({"search": {"low": 1.0}}, "a search needs goals"),
        ({"goals": {}}, "goals has none of"),
        (
            {"turns": {"turns": 2, "new_tokens": 3}, "arrival": {"kind": "rounds", "concurrency": 1}},
            "turns go with",
        ),
        ({"prompt": {"tokens": 3, "unique": "none", "shared": {"share": 0.5}}}, "leave prompt.unique out"),
    ],
)
def test_a_specification_with_a_mistake_names_it(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        parse_spec({"url": "http://127.0.0.1:1", "arrival": CLOSED, **change}, "load.yaml")


@pytest.mark.parametrize("text", ["url: 2026-13-45", "[" * 5000], ids=["a date that there is not", "deep"])
def test_a_file_that_yaml_cannot_say_is_refused(tmp_path: Path, text: str) -> None:
    source = tmp_path / "load.yaml"
    source.write_text(text)
    done = CliRunner().invoke(cli.lab, ["load", "--spec", str(source), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert f"error: {source}: is neither YAML nor JSON" in done.output


def test_a_host_that_none_can_be_is_no_connection(tmp_path: Path) -> None:
    source = tmp_path / "load.json"
    source.write_text(json.dumps({"url": "http://a..b:80", "arrival": CLOSED}))
    done = CliRunner().invoke(cli.lab, ["load", "--spec", str(source), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert "no connection to a..b:80: " in done.output


def test_a_url_that_is_none_ends_with_2(tmp_path: Path) -> None:
    source, out = tmp_path / "load.json", tmp_path / "out"
    source.write_text(json.dumps({"url": "http://127.0.0.1:1", "arrival": CLOSED}))
    done = CliRunner().invoke(
        cli.lab, ["load", "--spec", str(source), "--out", str(out), "--url", "localhost:8100"]
    )
    assert done.exit_code == 2, done.output
    assert "error: --url: url: " in done.output
    assert "begins with http" in done.output
    assert not out.exists()
