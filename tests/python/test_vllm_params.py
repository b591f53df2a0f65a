"""`kv_transfer_params` that a client has made up: they harm no server, and lead to nobody else's KV."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import Server, Status, admit, offer, prompt, request

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
