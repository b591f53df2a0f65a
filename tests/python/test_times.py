"""Every time that the native module takes: one that is no time is refused with the argument's name."""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvik
from kvik import _native
from tests.python.peers import LIMIT, Pages, empty, engines, owned

# Of a stream of a GPU: `test_gpu_serving_cache.py` has one, and passes none.
NOT_HERE = {"StreamMark.wait timeout"}
ROUTER = dict.fromkeys(
    ("connect_timeout", "prefill_timeout", "decode_timeout", "client_timeout", "release_timeout",
     "drain_timeout"), 1.0,
)  # fmt: skip


def times_of_the_stub() -> set[str]:
    """`Class.method argument` of each argument that is a time."""
    found = set()
    stub = ast.parse((Path(kvik.__file__).parent / "_native.pyi").read_text())
    classes = [one for one in stub.body if isinstance(one, ast.ClassDef)]
    for owner, body in [("", stub.body), *((f"{one.name}.", one.body) for one in classes)]:
        for function in body:
            if isinstance(function, ast.FunctionDef):
                given = function.args
                for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                    if argument.annotation and ast.unparse(argument.annotation).startswith("float"):
                        found.add(f"{owner}{function.name} {argument.arg}")
    return found


@pytest.fixture
def pair() -> Iterator[tuple[Pages, Pages]]:
    with engines() as start:
        yield owned(start()), empty(start())


def calls_of_engines(source: Pages, target: Pages) -> Iterator[tuple[str, Callable[[Any], object]]]:
    there, here = source.region.engine, target.region.engine
    grant = there.grant(source.of(), use="many")
    ticket, pages = grant.ticket, target.of()
    events = here.events()
    reads = [kvik.Read(pages, ticket)]
    yield "Engine.__new__ deadline", lambda wrong: kvik.Engine(deadline=wrong)
    yield "Engine.grant expiry", lambda wrong: there.grant(source.of(), expiry=wrong)
    yield "Engine.grant max_expiry", lambda wrong: there.grant(source.of(), max_expiry=wrong)
    yield "Engine.read deadline", lambda wrong: here.read(pages, ticket, deadline=wrong)
    yield "Engine.read_all deadline", lambda wrong: here.read_all(reads, deadline=wrong)
    yield "Engine.write deadline", lambda wrong: here.write(pages, ticket, deadline=wrong)
    yield "Engine.release deadline", lambda wrong: here.release(ticket, deadline=wrong)
    yield "Engine.extend seconds", lambda wrong: here.extend(ticket, wrong)
    yield "Engine.extend deadline", lambda wrong: here.extend(ticket, 1.0, deadline=wrong)
    yield "Engine.warm_up timeout", lambda wrong: here.warm_up(ticket, timeout=wrong)
    yield "Engine.meet deadline", lambda wrong: here.meet(there.addresses[0], deadline=wrong)
    yield "Engine.notify deadline", lambda wrong: here.notify(ticket, b"", deadline=wrong)
    yield "Engine.close timeout", lambda wrong: here.close(timeout=wrong)
    yield "Region.close timeout", lambda wrong: target.region.close(timeout=wrong)
    yield "Grant.revoke timeout", lambda wrong: grant.revoke(timeout=wrong)
    yield "Grant.extend seconds", grant.extend
    yield "Grant.wait timeout", grant.wait
    yield "Ticket.with_grant expiry", lambda wrong: ticket.with_grant("0" * 32, wrong)
    yield "Transfer.wait timeout", here.read(pages, ticket).wait
    yield "JointRead.wait timeout", here.read_all(reads).wait
    yield "WarmUp.wait timeout", here.warm_up(ticket).wait
    yield "Notice.wait timeout", here.notify(ticket, b"").wait
    yield "Events.next timeout", events.next
    yield "flush_records timeout", kvik.flush_logs
    yield "close_all timeout", _native.close_all


def calls_of_a_store(pages: Pages) -> Iterator[tuple[str, Callable[[Any], object]]]:
    engine = pages.region.engine
    namespace = kvik.Namespace(
        model="m", kv_dtype="float16", layers=(0, 1), model_layers=1, heads=(0, 1), model_heads=1,
        block_tokens=16,
    )  # fmt: skip
    store = kvik.Store.embedded(engine, namespace, pages.layout, memory="16MiB")
    keys, first = store.keys(np.arange(16)), pages.of([0])
    put = store.put(keys, first)
    put.wait(LIMIT)
    connect = partial(kvik.Store.connect, engine, "127.0.0.1:1", namespace, pages.layout)
    yield "StoreClient.connect deadline", lambda wrong: connect(deadline=wrong)
    yield "StoreClient.survey deadline", lambda wrong: store._client.survey(None, 1000, wrong)
    yield "StoreSpace.put deadline", lambda wrong: store.put(keys, first, deadline=wrong)
    yield "StoreSpace.get deadline", lambda wrong: store.get(keys, first, deadline=wrong)
    yield "StoreSpace.choose recompute", lambda wrong: store.choose(1, wrong)
    yield "StoreSpace.pin seconds", lambda wrong: store.pin(keys, wrong)
    yield "StorePutting.acknowledged timeout", put.acknowledged
    yield "StorePutting.wait timeout", put.wait
    yield "StoreGetting.next timeout", store.get(keys, first).next


def serve(given: dict[str, Any], name: str, wrong: Any) -> object:
    return _native.serve_router(**given | {name: wrong})


def calls_of_a_router() -> Iterator[tuple[str, Callable[[Any], object]]]:
    given: dict[str, Any] = {
        "host": "127.0.0.1", "port": 0, "prefill": ["http://127.0.0.1:1"],
        "decode": ["http://127.0.0.1:2"], "max_body": 1, "max_body_memory": 3, "max_inflight": 1, **ROUTER,
    }  # fmt: skip
    for name in ROUTER:
        yield f"serve_router {name}", partial(serve, given, name)
    running = _native.serve_router(**given)
    yield "RunningRouter.wait timeout", running.wait
    running.stop_now()


@pytest.mark.parametrize(
    "wrong", [-1.0, 1e30, float("inf"), float("nan"), 10**400, -(10**400), 10**5000],
    ids=["negative", "long", "inf", "nan", "no float", "negative, no float", "not to be written"],
)  # fmt: skip
def test_a_time_that_cannot_be_is_refused_with_its_name(pair: tuple[Pages, Pages], wrong: Any) -> None:
    source, target = pair
    named = set()
    for calls in (calls_of_engines(source, target), calls_of_a_store(source), calls_of_a_router()):
        for name, call in calls:
            argument = name.split()[1]
            with pytest.raises(kvik.InvalidArgument, match=rf"^{argument}=.+ is no usable time: it takes "):
                call(wrong)
            named.add(name)
    assert named | NOT_HERE == {name.replace("pin time", "pin seconds") for name in times_of_the_stub()}
