"""Two prefill and two decode servers, each two replicas of two ranks, behind kvik's router."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kvik.demo import client
from kvik.demo.reports import Load
from kvik.roles.processes import HttpServer
from tests.python.emulator import servers
from tests.python.emulator.servers import TINY, Spec, prompt_of, tokens_of
from tests.python.peers import stop

TP, DP = 2, 2
PROMPTS, IN_FLIGHT, TOKENS = 200, 16, 8
PAGE_TOKENS = 16
SIZE = ("--tp", str(TP), "--dp", str(DP), "--no-prefix-cache", "--allow-faults")


@dataclass
class Group:
    """The servers, and one that answers alone."""

    alone: HttpServer
    prefill: list[HttpServer]
    decode: list[HttpServer]
    router: HttpServer
    reports: list[Path]

    def loads(self) -> list[Load]:
        """All lines of the decode servers' reports."""
        return [load for path in self.reports for load in _read(path)]


def _read(path: Path) -> list[Load]:
    lines = [line for line in map(json.loads, path.open()) if line["outcome"] != "sent"]
    return [Load(**{f.name: line[f.name] for f in fields(Load)}) for line in lines]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("fleet")
    reports = [folder / f"loads{number}.jsonl" for number in range(2)]
    specs = [
        Spec("alone", options=("--no-prefix-cache",)),
        *(Spec(f"prefill{number}", "prefill", SIZE) for number in range(2)),
        *(Spec(f"decode{number}", "decode", SIZE, reports[number]) for number in range(2)),
    ]
    with servers.servers(folder, *specs) as (alone, *pairs):
        prefill, decode = pairs[:2], pairs[2:]
        with servers.routed(folder, prefill, decode) as router:
            yield Group(alone, prefill, decode, router, reports)


def _prompts(seed: int, count: int) -> list[list[int]]:
    print(f"seed {seed}")
    return [prompt_of(2 + (seed + number * 37) % 400, seed + number) for number in range(count)]


def test_every_rank_moves_exactly_its_share(group: Group) -> None:
    prompts = _prompts(1_000, PROMPTS)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        truth = list(pool.map(lambda prompt: tokens_of(group.alone, prompt, TOKENS), prompts))
        answers = list(pool.map(lambda prompt: client.complete(group.router.url, prompt, TOKENS), prompts))
    assert [answer.tokens for answer in answers] == truth
    for server in (*group.prefill, *group.decode):
        servers.wait_used(server, 0.0)
    loads = group.loads()
    assert {load.outcome for load in loads} == {"loaded"}
    # One line a rank and request, and each rank's half of the pages' bytes.
    pages = sum(-(-len(prompt) // PAGE_TOKENS) for prompt in prompts)
    for rank in range(TP):
        mine = [load for load in loads if load.rank == rank]
        assert len(mine) == PROMPTS
        assert sum(load.bytes for load in mine) == pages * TINY.page_bytes(PAGE_TOKENS, TP)
    computed = sum(servers.metric(server, servers.COMPUTED) for server in group.decode)
    assert computed == PROMPTS, "decode computes the last token of each prompt, and no other"
    # Spread over replicas by load: each has had about half of its server's, in tokens still to compute.
    for server in (*group.prefill, *group.decode):
        shares = servers.by_engine(server, "vllm:generation_tokens_total")
        assert len(shares) == DP
        assert min(shares.values()) > 0.2 * sum(shares.values()), shares


@pytest.mark.parametrize(("side", "step"), [("decode", 15), ("prefill", 3)])
def test_a_killed_rank(group: Group, side: str, step: int) -> None:
    """One rank of one replica is killed amid the load: every answer is right, and every page comes back."""
    prompts = _prompts(2_000 if side == "decode" else 3_000, 60)
    victim = (group.decode if side == "decode" else group.prefill)[0]
    ranks = servers.ranks_of(victim)
    assert len(ranks) == TP * DP
    status, _ = servers.ask(
        victim.url, "POST", "/fault", {"fault": f"dead:after={step},what=rank,dp=1,rank=1"}
    )
    assert status == 200
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        truth = list(pool.map(lambda prompt: tokens_of(group.alone, prompt, TOKENS), prompts))
        answers = list(pool.map(lambda prompt: client.complete(group.router.url, prompt, TOKENS), prompts))
    assert [answer.tokens for answer in answers] == truth
    last = servers.wait_for(
        lambda: servers.ask(victim.url, "GET", "/health")[0], lambda status: status == 200
    )
    assert last == 200, victim.tail()
    now = servers.ranks_of(victim)
    assert len(now) == TP * DP
    assert len(set(now) & set(ranks)) == TP, "one replica was started again, the other one is as it was"
    for server in (*group.prefill, *group.decode):
        servers.wait_used(server, 0.0)


def test_a_stopped_rank_is_somebody_elses_recomputation(group: Group) -> None:
    """A prefill rank that stands still serves nothing: decode recomputes within its deadline, or before."""
    victim = group.prefill[1]
    prompt = prompt_of(300, seed=7)
    truth = tokens_of(group.alone, prompt, TOKENS)
    params = servers.prefill_by_hand(victim, prompt)
    ranks = servers.ranks_of(victim)
    for pid in ranks:
        stop(pid)
    try:
        answer = tokens_of(group.decode[0], prompt, TOKENS, kv_transfer_params=params)
        assert answer == truth
    finally:
        for pid in ranks:
            servers.kill(pid, signal.SIGCONT)
    servers.wait_used(victim, 0.0)
