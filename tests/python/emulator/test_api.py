"""Requests' bodies and answers by themselves, as vLLM's API has them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvik.emulator import api
from kvik.emulator.api import Answer, ApiError, Bounds, Kind
from kvik.emulator.requests import Event, Request

BOUNDS = Bounds("tiny", 512, 4096, 4096)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_long_text_does_not_hold_up_the_server(kind: Kind) -> None:
    """It is looked at in the thread that all requests and engine steps share."""
    text = "x" * (8 << 20)
    body: dict[str, Any] = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    began = time.process_time()
    with pytest.raises(ApiError, match="the prompt has 83886"):
        api.parse(body, kind, BOUNDS)
    assert time.process_time() - began < 0.25


def _answer(kind: Kind, **more: object) -> tuple[Answer, Request]:
    """The answer to "a", of which nothing is known yet."""
    said = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "return_token_ids": True}
    ask = api.parse({**said, **more}, kind, BOUNDS)
    request = Request("one", ask.prompt, ask.sampling, BOUNDS.model)
    return Answer(ask, request, "cmpl-1", BOUNDS.model), request


def _events(request: Request, *tokens: int, **end: Any) -> list[Event]:
    for token in tokens:
        request.add(token)
    return [*map(Event, tokens[:-1]), Event(tokens[-1], **end)]


def test_parts_of_a_message_are_lines() -> None:
    """As vLLM gives them to a template that takes text."""
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    ask = api.parse({"messages": [{"role": "user", "content": parts}]}, "chat", BOUNDS)
    assert bytes(token - 3 for token in ask.prompt.tolist()) == b"<user> a\nb\n<assistant>"


def test_a_token_that_the_client_named_as_the_end_is_none_of_the_text() -> None:
    """As in vLLM; among the token ids it is."""
    for stream in (False, True):
        answer, request = _answer("completion", stream=stream, stop_token_ids=[100])
        events = _events(request, 101, 100, finish_reason="stop", stop_reason=100)
        (choice,) = (answer.chunk(events) if stream else answer.whole(events))["choices"]
        assert (choice["text"], choice["token_ids"]) == ("b", [101, 100])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 100)


def test_token_ids_are_where_vllm_has_them() -> None:
    """Those of a chat's prompt are beside its choices, of a completion's within; of a stream, in its first
    piece."""
    answer, request = _answer("completion")
    (choice,) = answer.whole(_events(request, 101, finish_reason="length"))["choices"]
    assert choice["prompt_token_ids"] == [100]
    answer, request = _answer("chat", stream=True)
    first, second = (answer.chunk(_events(request, token)) for token in (101, 102))
    assert bytes(token - 3 for token in first["prompt_token_ids"]) == b"<user> a\n<assistant>"
    assert "prompt_token_ids" not in second
    assert [piece["choices"][0]["token_ids"] for piece in (first, second)] == [[101], [102]]


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_is_told_as_often_as_it_was_asked_for(continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    answer, request = _answer("completion", stream=True, stream_options=options)
    pieces = [answer.chunk(_events(request, token)) for token in (101, 102)]
    said = [piece["usage"]["completion_tokens"] for piece in pieces if "usage" in piece]
    assert said == ([1, 2] if continuous else [])
    assert (answer.usage_chunk() or {})["usage"]["total_tokens"] == 3
