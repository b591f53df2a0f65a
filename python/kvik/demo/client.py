"""Requests to an OpenAI-style completion server: token ids in, token ids out, and when the first one came."""

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvik.demo.engines import MODEL

# Of a metric, whole and its name; a value in quotes may have anything in it.
LABEL = re.compile(r'((\w+)="(?:[^"\\]|\\.)*")')


class RequestError(Exception):
    """The server did not answer 200, or its stream was cut."""

    def __init__(self, status: int, text: str) -> None:
        """Keep status and body."""
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status
        self.text = text


@dataclass
class Completion:
    """What came back."""

    tokens: list[int] = field(default_factory=list)
    ttft: float = 0.0  # seconds from sending to the first token
    arrivals: list[float] = field(default_factory=list)  # the same for each event with tokens
    total: float = 0.0
    finish_reason: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def body(prompt: Sequence[int], tokens: int, **more: object) -> dict[str, object]:
    """A greedy request for exactly `tokens` tokens, unless `more` says otherwise."""
    return {
        "model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip


def post(
    url: str, payload: dict[str, object], timeout: float = 120.0, path: str = "/v1/completions"
) -> dict[str, object]:
    """Send a request and return the decoded answer; raises `RequestError` on any other status than 200."""
    connection, response = _send(url + path, payload, timeout, {})
    try:
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise RequestError(response.status, text)
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise RequestError(response.status, text)
    return answer


def tokens_of(answer: dict[str, object]) -> list[int]:
    """The token ids of an answer that was not streamed."""
    choices = answer["choices"]
    if not isinstance(choices, list) or not choices:
        raise RequestError(200, f"no choices in the answer: {answer}")
    return [int(token) for token in choices[0]["token_ids"]]


def complete(
    url: str, prompt: Sequence[int], tokens: int, *, timeout: float = 120.0, request_id: str | None = None,
    **more: object,
) -> Completion:  # fmt: skip
    """Stream a completion. `request_id` travels as `X-Request-Id`."""
    payload = body(prompt, tokens, stream=True, **more)
    headers = {"X-Request-Id": request_id} if request_id else {}
    start = time.monotonic()
    connection, response = _send(f"{url}/v1/completions", payload, timeout, headers)
    try:
        if response.status != 200:
            raise RequestError(response.status, response.read().decode(errors="replace"))
        result = Completion(headers=_joined(response.getheaders()))
        read_stream(response, result, start)
        result.total = time.monotonic() - start
        return result
    finally:
        connection.close()


def read_stream(response: http.client.HTTPResponse, result: Completion, start: float) -> None:
    """Add the tokens of a streamed answer to `result` as they come, up to its end. `start` (monotonic) is
    when it was asked for; raises `RequestError` where the stream has an error in it or is cut."""
    for event in _events(response):
        _add(result, event, time.monotonic() - start)


def _joined(headers: list[tuple[str, str]]) -> dict[str, str]:
    """By name in lower case; a header that came more than once as one list (RFC 9110, section 5.2)."""
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.lower()
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found


def _add(result: Completion, event: dict[str, object], now: float) -> None:
    if "error" in event:
        raise RequestError(200, json.dumps(event["error"]))
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return
    new = choices[0].get("token_ids") or []
    if new:
        result.ttft = result.ttft if result.tokens else now
        result.arrivals.append(now)
    result.tokens.extend(int(token) for token in new)
    result.finish_reason = choices[0].get("finish_reason") or result.finish_reason


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    """The JSON objects of a server-sent event stream, up to its `[DONE]`."""
    with contextlib.suppress(http.client.IncompleteRead):
        for line in response:
            if not line.endswith(b"\n"):
                break  # cut within it
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                yield json.loads(text.removeprefix("data: "))
    raise RequestError(response.status, "the stream ended without [DONE]")


def _send(
    url: str, payload: dict[str, object], timeout: float, headers: dict[str, str]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = json.dumps(payload).encode()
        connection.request("POST", parts.path, data, {"Content-Type": "application/json", **headers})
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def metrics(url: str, timeout: float = 60.0) -> dict[str, float]:
    """A server's `/metrics`: each sample's name with its labels (engine and model left out) to its value."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return samples(text)


def samples(text: str) -> dict[str, float]:
    """As `metrics`, of its text."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        sample, value = line.rsplit(" ", 1)
        name, _, labels = sample.partition("{")
        kept = [whole for whole, label in LABEL.findall(labels) if label not in ("engine", "model_name")]
        key = f"{name}{{{','.join(kept)}}}" if kept else name
        found[key] = found.get(key, 0.0) + float(value)
    return found
