"""Whole lives of requests through the connector, for each supported vLLM: good, refused and broken ones."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import (
    Server,
    Status,
    admit,
    allocated,
    grant_of,
    offer,
    prompt,
    request,
)
from tests.python.vllm_images import image, pixels

BLOCK = 4  # tokens a KV block in these tests


# Lives of requests.


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 2])
def test_handover(pair: tuple[Server, Server], native: FakeNative, tokens: int) -> None:
    p, d = pair
    count = -(-tokens // BLOCK)
    theirs, ours = [3, 9, 4, 7][:count], [5, 6, 20, 2][:count]
    params = offer(p, prompt(tokens), theirs)
    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == tokens
    assert params["remote_block_ids"] == [theirs]
    p.step()  # carries the grant
    wanted = request("d-1", prompt(tokens), params)
    external = admit(d, wanted, ours)
    if tokens == 1:  # the last token is computed anyway: nothing to load, so the offer is given back
        assert external == 0
        d.step()
    else:
        assert external == tokens
        native.held = True
        assert d.step().received == set()
        native.held = False
        result = d.step()
        assert result.received == {"d-1"}
        assert not result.invalid
        d.scheduler.update_state_after_alloc(wanted, allocated([*ours, 8]), 0)
        assert [d.values(block) for block in ours] == [{block} for block in theirs]
    d.step()
    assert p.step().sent == {"p-1"}
    assert p.pool.used() == set()
    wanted.status = Status.FINISHED_STOPPED
    kept, note = d.scheduler.request_finished_all_groups(wanted, (ours,))
    assert not kept
    assert note is not None
    assert note.keys() == {"kvik"}
    if tokens == 1:
        assert note["kvik"] == {"outcome": "not_needed"}
    else:  # the router shows how long the request waited
        assert note["kvik"].keys() == {"outcome", "kv_wait_ms"}
        assert note["kvik"]["outcome"] == "loaded"
        assert 0 <= note["kvik"]["kv_wait_ms"] < 60_000
    assert d.plan().plan.cancels == []
    native.now += 10
    assert p.plan().plan.parks == []
    for server in pair:
        result = server.step()
        assert not (result.sent | result.received | result.invalid)
        assert server.pool.used() == set()


@pytest.mark.parametrize("tp", [1, 2])
def test_hellos_come_with_the_first_step_where_the_handshake_is_another_connectors(
    kvik_vllm: ModuleType, native: FakeNative, tp: int
) -> None:
    """As under `MultiConnector`, which carries the handshake of one of its connectors."""
    p = Server(kvik_vllm, native, "kv_producer", tp=tp, handshake=False)
    d = Server(kvik_vllm, native, "kv_consumer", tp=tp, handshake=False)
    params = offer(p, prompt(BLOCK), [3])
    p.step()
    early = request("d-0", prompt(BLOCK), params)
    assert admit(d, early, [4]) == 0  # nothing is known of this server's own ranks yet: it is computed here
    d.step()
    assert d.total("recomputed_not_ready") == 1
    wanted = request("d-1", prompt(BLOCK), params)
    assert admit(d, wanted, [5]) == BLOCK
    assert d.step().received == {"d-1"}
    assert d.values(5) == {3}
    assert not d.plan().asks
    d.step()
    assert p.step().sent == {"p-1"}


def test_two_ranks(kvik_vllm: ModuleType, native: FakeNative) -> None:
    p, d = (Server(kvik_vllm, native, role, tp=2) for role in ("kv_producer", "kv_consumer"))
    params = offer(p, prompt(8), [1, 2])
    tickets = params["kvik"]["tickets"]
    assert [(t["tp"], t["pp"], t["dp"]) for t in tickets] == [(0, 0, 0), (1, 0, 0)]
    assert len({native.Ticket(t["ticket"]).grant_id for t in tickets}) == 2
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [4, 5]) == 8
    assert d.step().received == {"d-1"}
    assert d.values(4) == {1}
    assert d.values(5) == {2}
    assert p.step().sent == {"p-1"}


LAYERS = 6


def staged(kvik_vllm: ModuleType, native: FakeNative, role: str, stages: int) -> Server:
    return Server(kvik_vllm, native, role, pp=stages, dims={"layers": LAYERS // stages})


@pytest.mark.parametrize(("theirs", "ours"), [(2, 2), (2, 1), (1, 2), (3, 2)])
def test_pipeline_stages(kvik_vllm: ModuleType, native: FakeNative, theirs: int, ours: int) -> None:
    p, d = staged(kvik_vllm, native, "kv_producer", theirs), staged(kvik_vllm, native, "kv_consumer", ours)
    params = offer(p, prompt(8), [1, 2])
    assert params["pp_size"] == theirs
    tickets = params["kvik"]["tickets"]
    assert [(t["tp"], t["pp"], t["dp"]) for t in tickets] == [(0, stage, 0) for stage in range(theirs)]
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [4, 5]) == 8
    assert d.step().received == {"d-1"}
    assert d.values(4) == {1}
    assert d.values(5) == {2}
    d.step()
    assert p.step().sent == {"p-1"}


@pytest.mark.parametrize("stages", [[2, 4], [4, 2]])
def test_stages_that_prefill_has_not_lead_to_nothing(
    kvik_vllm: ModuleType, native: FakeNative, stages: list[int]
) -> None:
    """The owner knows which layers its pages are."""
    p, d = staged(kvik_vllm, native, "kv_producer", 2), staged(kvik_vllm, native, "kv_consumer", 1)
    params = offer(p, prompt(8), [1, 2])
    p.step()
    params["kvik"]["shapes"][0]["stages"] = stages
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().invalid == {5, 6}
    assert d.total("loads_failed_content_mismatch") == 1


def test_prefix_hit_loads_only_what_is_missing(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(14), [1, 2, 3, 4])
    p.step()
    d.fill(10, 99)
    assert admit(d, request("d-1", prompt(14), params), [10, 11, 12, 13], local_tokens=BLOCK) == 10
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (10, 11, 12, 13)] == [{99}, {2}, {3}, {4}]
    assert p.step().sent == {"p-1"}


def test_full_local_hit_gives_the_offer_back(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(2 * BLOCK + 1), [1, 2, 3])
    p.step()
    assert admit(d, request("d-1", prompt(2 * BLOCK + 1), params), [5, 6, 7], local_tokens=2 * BLOCK) == 0
    assert not d.step().received
    assert p.step().sent == {"p-1"}
    assert d.total("not_needed") == 1
    assert d.total("loads") == 0


def test_a_prompt_that_is_to_be_computed_whole_gives_the_offer_back(pair: tuple[Server, Server]) -> None:
    """As for log probabilities of its tokens. vLLM passes over what is offered itself from 0.32 on only."""
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params, skip_reading_prefix_cache=True), [5, 6]) == 0
    d.step()
    assert p.step().sent == {"p-1"}


def test_longer_prompt_takes_whole_blocks(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(10), [1, 2, 3])
    p.step()
    assert admit(d, request("d-1", prompt(20), params), [5, 6, 7, 8, 9]) == 8
    assert d.step().received == {"d-1"}
    assert d.values(6) == {2}
    d.step()  # the offer's last block was not read: the release states all of its content
    assert d.total("releases") == 1
    assert p.step().sent == {"p-1"}


def test_a_reader_may_be_faster_than_the_grant(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert not d.step().received
    p.step()
    assert d.step().received == {"d-1"}
    assert p.step().sent == {"p-1"}


def wrong_tokens(params: dict[str, Any]) -> Any:
    return request("d-1", prompt(8, first=7), params)


def other_salt(params: dict[str, Any]) -> Any:
    return request("d-1", prompt(8), params, cache_salt="b")


def unknown_lora(params: dict[str, Any]) -> Any:
    nowhere = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/nowhere")
    return request("d-1", prompt(8), params, lora_request=nowhere)


def other_image(params: dict[str, Any]) -> Any:
    return request("d-1", prompt(8), params, mm_features=[image(pixels(3), "i", offset=2)])


def shorter_prompt(params: dict[str, Any]) -> Any:
    return request("d-1", prompt(7), params)


def embeddings(params: dict[str, Any]) -> Any:
    return request("d-1", prompt(8), params, prompt_token_ids=None, prompt_embeds=object())


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (wrong_tokens, "digest_mismatch"),
        (other_salt, "digest_mismatch"),
        (unknown_lora, "adapter_uncertain"),
        (other_image, "digest_mismatch"),
        (shorter_prompt, "digest_mismatch"),
        (embeddings, "prompt_embeds"),
    ],
)
def test_other_content_is_recomputed(
    pair: tuple[Server, Server], caplog: pytest.LogCaptureFixture, make: Any, code: str
) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = make(params)
    assert admit(d, wanted, [5, 6]) == 0
    d.step()
    wanted.status = Status.FINISHED_STOPPED
    told = {"kvik": {"outcome": "recomputed", "reason": code}}
    assert d.scheduler.request_finished_all_groups(wanted, ([5, 6],)) == (False, told)
    assert d.values(5) == {0}
    assert d.total("loads") == 0
    assert d.total(f"recomputed_{code}") == 1
    assert code in caplog.text
    assert p.step().sent == set()  # not this request's to give back
    assert admit(d, request("d-2", prompt(8), params), [7, 8]) == 8
    assert d.step().received == {"d-2"}
    assert [d.values(block) for block in (7, 8)] == [{1}, {2}]
    assert p.step().sent == {"p-1"}


def test_an_image_is_compared_by_its_data(pair: tuple[Server, Server]) -> None:
    """Its name may be what a client has chosen; where one side has not got the data, nothing is loaded."""
    p, d = pair
    params = offer(p, prompt(8), [1, 2], mm_features=[image(pixels(3), "same", offset=2)])
    p.step()
    for number, data in enumerate((pixels(4), None)):
        other = request(f"d-{number}", prompt(8), params, mm_features=[image(data, "same", offset=2)])
        assert admit(d, other, [5, 6]) == 0
        d.step()
        assert d.total("recomputed_digest_mismatch") == number + 1
    same = request("d-3", prompt(8), params, mm_features=[image(pixels(3), "another", offset=2)])
    assert admit(d, same, [7, 8]) == 8
    assert d.step().received == {"d-3"}
    assert p.step().sent == {"p-1"}


def test_without_its_data_an_image_goes_by_its_name(pair: tuple[Server, Server]) -> None:
    """Embeddings that a request leaves out, since KV comes from where they were: on both sides."""
    p, d = pair
    params = offer(p, prompt(8), [1, 2], mm_features=[image(None, "same", offset=2)])
    p.step()
    for name, tokens in (("other", 0), ("same", 8)):
        wanted = request(f"d-{name}", prompt(8), params, mm_features=[image(None, name, offset=2)])
        assert admit(d, wanted, [5, 6]) == tokens
    assert d.step().received == {"d-same"}


def test_an_image_that_is_not_certain_is_not_handed_over(
    pair: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have computed it with what it knew of the other one of the same name."""
    p, _ = pair
    offer(p, prompt(8), [1, 2], mm_features=[image(pixels(3), "same", offset=2)])
    assert p.prefill("p-2", prompt(8), [3, 4], mm_features=[image(pixels(4), "same", offset=2)]) is None
    assert "request p-2 is not handed over: image 'same' was not always the same here" in caplog.text


def tickets_of(params: dict[str, Any], other: dict[str, Any]) -> None:
    params["kvik"]["tickets"] = other["kvik"]["tickets"]


def tickets_and_blocks_of(params: dict[str, Any], other: dict[str, Any]) -> None:
    tickets_of(params, other)
    params["remote_block_ids"] = other["remote_block_ids"]


def all_but_digest_of(params: dict[str, Any], other: dict[str, Any]) -> None:
    digest = params["kvik"]["digest"]
    params.update(json.loads(json.dumps(other)))
    params["kvik"]["digest"] = digest


@pytest.mark.parametrize("swap", [tickets_of, tickets_and_blocks_of, all_but_digest_of])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tickets_of_another_prompt_lead_to_nothing(
    kvik_vllm: ModuleType, native: FakeNative, swap: Any, ranks: int
) -> None:
    """The owner refuses, decode computes, and the prompt whose tickets they are still finds its KV."""
    p, d = (Server(kvik_vllm, native, role, tp=ranks) for role in ("kv_producer", "kv_consumer"))
    other = offer(p, prompt(8, first=50), [3, 4], request_id="p-2")
    params = offer(p, prompt(8), [1, 2])
    p.step()
    swapped = json.loads(json.dumps(params))
    swap(swapped, other)
    assert admit(d, request("d-1", prompt(8), swapped), [5, 6]) == 8
    result = d.step()
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}
    assert d.values(5) == {0}
    assert d.total("loads_failed_content_mismatch") == ranks
    d.step()
    assert p.step().sent == set()
    for number, (tokens, own, blocks) in enumerate(
        [(prompt(8), params, [5, 6]), (prompt(8, first=50), other, [7, 8])]
    ):
        assert admit(d, request(f"d-{number + 2}", tokens, own), blocks) == 8
        assert d.step().received == {f"d-{number + 2}"}
    assert [d.values(block) for block in (5, 6, 7, 8)] == [{1}, {2}, {3}, {4}]
    assert p.step().sent == {"p-1", "p-2"}


@pytest.mark.parametrize(
    ("first", "second", "failed"),
    # Rank 0 comes first and may read its own ticket, which is used up then.
    [(1, 0, {"content_mismatch": 2}), (0, 0, {"grant_consumed": 1}), (1, 1, {"content_mismatch": 1})],
)
def test_tickets_of_another_rank_lead_to_nothing(
    kvik_vllm: ModuleType, native: FakeNative, first: int, second: int, failed: dict[str, int]
) -> None:
    p, d = (Server(kvik_vllm, native, role, tp=2) for role in ("kv_producer", "kv_consumer"))
    params = offer(p, prompt(8), [1, 2])
    p.step()
    tickets = params["kvik"]["tickets"]
    tickets[0]["ticket"], tickets[1]["ticket"] = (tickets[rank]["ticket"] for rank in (first, second))
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().invalid == {5, 6}
    for code in ("content_mismatch", "grant_consumed"):
        assert d.total(f"loads_failed_{code}") == failed.get(code, 0)


def test_the_same_length_of_a_shared_beginning_is_another_prompt(pair: tuple[Server, Server]) -> None:
    """Tickets of a prompt that begins alike: its first block would even be right."""
    p, d = pair
    other = offer(p, [*prompt(4), *prompt(4, first=50)], [3, 4], request_id="p-2")
    params = offer(p, prompt(8), [1, 2])
    p.step()
    tickets_of(params, other)
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().invalid == {5, 6}
    assert d.total("loads_failed_content_mismatch") == 1


def test_who_shares_a_beginning_does_not_use_the_offer_up(pair: tuple[Server, Server]) -> None:
    """The offer of the own first block, with the tickets of a longer prompt that begins with it: its KV is
    right, but the longer prompt's offer is not this request's to end."""
    p, d = pair
    longer = offer(p, [*prompt(4), *prompt(4, first=50)], [3, 4], request_id="p-2")
    params = offer(p, prompt(4), [1])
    p.step()
    tickets_of(params, longer)
    assert admit(d, request("d-1", [*prompt(4), *prompt(4, first=70)], params), [5, 6]) == 4
    assert d.step().invalid == {5}
    d.step()
    assert p.step().sent == set()
    assert admit(d, request("d-2", [*prompt(4), *prompt(4, first=50)], longer), [7, 8]) == 8
    assert d.step().received == {"d-2"}
    assert p.step().sent == {"p-2"}


def test_an_aborted_request_gives_back_only_what_is_its_own(pair: tuple[Server, Server]) -> None:
    """It came with the offer of another prompt, and nobody ever compared the two."""
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8, first=50), params, status=Status.FINISHED_ABORTED)
    d.arrive(wanted)
    d.scheduler.request_finished_all_groups(wanted, ([],))
    d.step()
    assert d.total("releases") == d.total("releases_failed") == 0
    assert p.step().sent == set()


def test_used_parameters_do_not_serve_another_prompt(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().received == {"d-1"}
    assert admit(d, request("d-2", prompt(8), dict(params)), [7, 8]) == 8  # same content, but consumed
    assert d.step().invalid == {7, 8}
    assert admit(d, request("d-3", prompt(8, first=50), dict(params)), [9, 10]) == 0


@pytest.mark.parametrize("dims", [{"heads": 4}, {"layers": 2}, {"slots": 8}, {"content": 16}])
def test_other_shape_is_refused_naming_both(
    kvik_vllm: ModuleType, native: FakeNative, caplog: pytest.LogCaptureFixture, dims: dict[str, int]
) -> None:
    p, d = Server(kvik_vllm, native, "kv_producer"), Server(kvik_vllm, native, "kv_consumer", dims=dims)
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 0
    d.step()
    for server, shape in (("prefill", p), ("decode", d)):
        assert f"{server} has [{shape.workers[0].get_handshake_metadata().hello.shapes[0]}]" in caplog.text
    assert d.total("recomputed_shape_mismatch") == 1
    # Other blocks of the same model's KV: the content is this request's, so that it may give the offer back.
    assert p.step().sent == ({"p-1"} if "slots" in dims else set())


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2), (4, 2)])
def test_unequal_ranks(kvik_vllm: ModuleType, native: FakeNative, p_ranks: int, d_ranks: int) -> None:
    p, d = (
        Server(kvik_vllm, native, role, tp=ranks, dims={"heads": 4 // ranks})
        for role, ranks in (("kv_producer", p_ranks), ("kv_consumer", d_ranks))
    )
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (5, 6)] == [{1}, {2}]
    assert d.total("bytes") == 2 * 3 * (4 * 4 * 8) * 2  # blocks, layers, a block of all heads, bytes
    assert p.step().sent == {"p-1"}


@pytest.mark.parametrize("heads", [None, 1])
def test_mla(kvik_vllm: ModuleType, native: FakeNative, heads: int | None) -> None:
    """Every rank has the whole latent; one prefill rank serves each decode rank."""
    kind = type("MLAAttentionSpec", (), {})
    p, d = (
        Server(kvik_vllm, native, role, tp=ranks, dims={"heads": heads}, kind=kind)
        for role, ranks in (("kv_producer", 4), ("kv_consumer", 2))
    )
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (5, 6)] == [{1}, {2}]
    assert d.total("bytes") == 2 * 2 * 3 * (4 * 8) * 2
    assert p.step().sent == {"p-1"}


def test_a_refused_offer_of_other_ranks_is_released_by_all(kvik_vllm: ModuleType, native: FakeNative) -> None:
    for p_ranks, d_ranks in ((2, 1), (1, 2)):
        p, d = (
            Server(kvik_vllm, native, role, tp=ranks, dims={"heads": 4 // ranks, "slots": slots})
            for role, ranks, slots in (("kv_producer", p_ranks, 4), ("kv_consumer", d_ranks, 8))
        )
        params = offer(p, prompt(8), [1, 2])
        p.step()
        assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 0
        d.step()
        assert d.total("recomputed_shape_mismatch") == 1
        assert p.step().sent == {"p-1"}


def test_other_model_is_refused(kvik_vllm: ModuleType, native: FakeNative) -> None:
    p, d = (
        Server(kvik_vllm, native, "kv_producer", model="a"),
        Server(kvik_vllm, native, "kv_consumer", model="b"),
    )
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 0
    d.step()
    assert d.total("recomputed_namespace_mismatch") == 1
    assert p.step().sent == set()  # another model's request ends no offer
    native.now += 121
    p.step()
    assert p.step().sent | {"p-1"} == {"p-1"}
    assert grant_of(native, params).state == "expired"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda params: params.pop("kvik"),
        lambda params: params["kvik"].update(version=1),
        lambda params: params["kvik"].update(tickets=[]),
        lambda params: params["kvik"].update(tickets=[{"tp": 0, "pp": 0, "dp": 0, "ticket": "x" * 300}]),
        lambda params: params["kvik"].update(shapes=[{"tp": 1}]),
        lambda params: params["kvik"].update(digest=None),
        lambda params: params.update(remote_num_tokens=2**40),
        lambda params: params.update(remote_num_tokens="8"),
    ],
)
def test_spoiled_parameters_are_recomputed(pair: tuple[Server, Server], spoil: Any) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    spoil(params)
    wanted = request("d-1", prompt(8), params)
    assert admit(d, wanted, [5, 6]) == 0
    d.step()
    assert (
        sum(stats.get(name, 0) for stats in d.stats for name in stats if name.startswith("recomputed_")) == 1
    )
    kept, told = d.scheduler.request_finished_all_groups(wanted, ([5, 6],))
    assert not kept
    assert told["kvik"]["outcome"] == "recomputed"


@pytest.mark.parametrize("ids", [[[2, 1]], [[1, 1]], [[1]], [[1, 2, 3]], [[1, 2], [3]], [[1, -2]], [], None])
def test_block_ids_are_not_read(pair: tuple[Server, Server], ids: Any) -> None:
    """They stay in the parameters for proxies that look whether there are any."""
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    params["remote_block_ids"] = ids
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (5, 6)] == [{1}, {2}]
    assert p.step().sent == {"p-1"}


def test_without_parameters_nothing_happens(pair: tuple[Server, Server]) -> None:
    p, d = pair
    for server in (p, d):
        for params in (None, {}, {"do_remote_prefill": False}):
            plain = request(f"r-{params}", prompt(8), params)
            assert admit(server, plain, [1, 2]) == 0
            plain.status = Status.FINISHED_STOPPED
            plain.num_computed_tokens = 8
            assert server.scheduler.request_finished_all_groups(plain, ([1, 2],)) == (False, None)
        result = server.step()
        assert not (result.sent | result.received | result.invalid)


def test_a_producer_loads_nothing_and_a_consumer_offers_nothing(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    assert admit(p, request("x", prompt(8), params), [5, 6]) == 0
    done = request("y", prompt(8), {"do_remote_decode": True}, status=Status.FINISHED_LENGTH_CAPPED)
    done.num_computed_tokens = 8
    assert d.scheduler.request_finished_all_groups(done, ([1, 2],)) == (False, None)
