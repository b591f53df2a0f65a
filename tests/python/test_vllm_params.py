"""`kv_transfer_params` that a client has made up: they harm no server, and lead to nobody else's KV."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.peers import random_seed
from tests.python.vllm_harness import (
    VERSIONS,
    FullAttentionSpec,
    Server,
    SlidingWindowSpec,
    Status,
    admit,
    offer,
    prompt,
    request,
)

STRANGERS = ["203.0.113.9:7400", "[2001:db8::9]:7400"]


@pytest.fixture
def elsewhere(kvik_vllm: ModuleType, native: FakeNative, request: pytest.FixtureRequest) -> Any:
    """A decode server of these options, and an offer whose tickets have another address."""
    address, extra = request.param
    p = Server(kvik_vllm, native, "kv_producer", extra={"secret": "a long secret"})
    d = Server(kvik_vllm, native, "kv_consumer", extra=extra)
    params = offer(p, prompt(8), [1, 2])
    p.step()
    for entry in params["kvik"]["tickets"]:
        ticket = native.Ticket(entry["ticket"])
        ticket.addresses = [address]
        entry["ticket"] = str(ticket)
    return p, d, params


@pytest.mark.parametrize("elsewhere", [(address, {}) for address in STRANGERS], indirect=True)
def test_without_a_secret_no_offer_leads_beyond_the_host(
    elsewhere: tuple[Server, Server, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever listens there would be believed, and could give any KV under the right name."""
    p, d, params = elsewhere
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    result = d.step()
    assert (result.received, result.invalid) == ({"d-1"}, {5, 6})
    assert d.total("loads_failed_secret_required") == 1
    assert "beyond this host" in caplog.text
    assert admit(d, request("d-2", prompt(8), params), [5, 6], local_tokens=8) == 0  # gives it back
    d.step()
    assert d.total("releases_failed") == 1
    assert not p.step().sent


@pytest.mark.parametrize(
    "elsewhere",
    [
        (STRANGERS[0], {"secret": "a long secret"}),
        (STRANGERS[1], {"tls": "/certificates"}),
        ("127.0.0.2:7400", {}),
        ("[::1]:7400", {}),
    ],
    indirect=True,
)
def test_who_proves_itself_or_is_on_this_host_is_asked(
    elsewhere: tuple[Server, Server, dict[str, Any]],
) -> None:
    p, d, params = elsewhere
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().received == {"d-1"}
    assert d.values(5) == {1}
    assert p.step().sent == {"p-1"}


@pytest.mark.parametrize("params", ["do_remote_prefill", 7, 0.5, ["kvik"]])
def test_what_is_no_object_is_no_parameters(kvik_vllm: ModuleType, native: FakeNative, params: Any) -> None:
    """vLLM merges a request's `vllm_xargs` into what connectors get. An error here ends its server."""
    server = Server(kvik_vllm, native, "kv_both")
    done = request("r-1", prompt(8), params)
    assert admit(server, done, [1, 2]) == 0
    server.step()
    done.num_computed_tokens, done.status = 8, Status.FINISHED_LENGTH_CAPPED
    assert server.scheduler.request_finished_all_groups(done, ([1, 2],)) == (False, None)


@pytest.mark.parametrize("field", ["namespace", "digest", "dtype"])
def test_a_refusal_is_one_line_of_the_log(
    pair: tuple[Server, Server], caplog: pytest.LogCaptureFixture, field: str
) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    ours = params["kvik"] if field in params["kvik"] else params["kvik"]["shapes"][0]
    ours[field] = "x\nkvik: forged"
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 0
    (said,) = {text for record in caplog.records if "is recomputed" in (text := record.getMessage())}
    assert "forged" in said
    assert "\n" not in said


ROUNDS = 400
MIXED = (FullAttentionSpec, SlidingWindowSpec)
THEIRS, OURS = ([1, 2, 3, 4], [9, 10, 11, 12]), ([5, 6, 7, 8], [0, 0, 13, 14])
NUMBERS = ("layers", "kv_heads", "content", "tp", "heads", "block_tokens", "block_bytes", "window")
STAGES = ([1, 2], [2, 1], [1, 1, 1], [2, 2], [3])


def twist(params: dict[str, Any], die: random.Random) -> dict[str, Any]:
    """An offer with up to three changes of what it says of ranks, layers and blocks."""
    ours = params["kvik"]
    for _ in range(die.randint(1, 3)):
        shape, ticket = die.choice(ours["shapes"]), die.choice(ours["tickets"])
        number, place = die.choice(NUMBERS), die.choice(("group", "tp", "pp"))
        match die.randrange(8):
            case 0:
                shape[number] = die.choice((shape[number] * 2, shape[number] // 2, shape[number] + 1))
            case 1:
                shape["stages"] = die.choice(STAGES)
            case 2:
                shape |= {"tp": 2, "heads": 1, "block_bytes": shape["block_bytes"] // 2}
            case 3:
                ours["tickets"].append(ticket | {place: die.randrange(3)})
            case 4:
                ticket[place] = die.randrange(3)
            case 5:
                ticket["ticket"] = die.choice(ours["tickets"])["ticket"]
            case 6:
                ours["firsts"] = [die.randrange(4) for _ in ours["firsts"]]
            case 7:
                params["remote_num_tokens"] = die.randint(1, 15)
    return params


@pytest.mark.parametrize("kvik_vllm", VERSIONS[-1:], indirect=True)
@pytest.mark.parametrize("kinds", [MIXED[:1], MIXED], ids=["one group", "two groups"])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_twisted_brings_the_right_kv_or_none(
    kvik_vllm: ModuleType, native: FakeNative, kinds: tuple[type, ...], asked: bool
) -> None:
    """asked: vLLM asks for a load of the request; it may as well have been aborted before."""
    die, came = random.Random(random_seed()), 0
    p, d = (Server(kvik_vllm, native, role, kinds=kinds) for role in ("kv_producer", "kv_consumer"))
    theirs, ours = THEIRS[: len(kinds)], OURS[: len(kinds)]
    right = dict(
        zip((5, 6, 7, 8, 13, 14)[: 2 + 2 * len(kinds)], ({1}, {2}, {3}, {4}, {11}, {12}), strict=False)
    )
    for number in range(ROUNDS):
        params = twist(offer(p, prompt(14), theirs, request_id=f"p-{number}"), die)
        p.step()
        for block in right:
            d.fill(block, 255)
        wanted = request(f"d-{number}", prompt(14), params)
        d.arrive(wanted)
        external = admit(d, wanted, ours) if asked else 0
        first = d.step()
        native.now += 1000  # what waits for a grant that there is not, or for its reader, has waited for it
        second = d.step()
        bad = first.invalid | second.invalid | first.failed | second.failed
        assert first.received | second.received == ({wanted.request_id} if external else set())
        if external == 14 and not bad:
            came += 1
            assert {block: d.values(block) for block in right} == right
        wanted.status = Status.FINISHED_ABORTED
        assert not d.scheduler.request_finished_all_groups(wanted, ours)[0]
        for server in (d, p, p):
            server.step()
        assert not p.pool.used()
    assert not asked or came > ROUNDS // 50, f"{came} have come: the changes leave nothing whole"
