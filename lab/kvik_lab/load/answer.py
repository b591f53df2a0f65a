"""What an answer says: its tokens with their times, how it ended, and what the server counted."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvik_lab.load.http import Exchange

_KEPT_HEADERS = ("server", "via", "x-request-id", "x-kvik-router", "x-served-by", "x-upstream")
_TIMING = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*(?:;[^,]*?dur=([0-9.]+))?[^,]*")
_LONGEST_ERROR = 500


@dataclass
class Answer:
    """One answer. `tokens` has the time in ns at which each token came; those of one message have one
    time."""

    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    timing: dict[str, float] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str | None:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest() if self.text else None


def understand(exchange: Exchange) -> Answer:
    """Read a streamed answer, or an error. Whatever a server sends, this returns; what is wrong is in
    `error`."""
    answer = Answer(error=exchange.error)
    answer.timing = server_timing(exchange.headers.get("server-timing", ""))
    answer.headers = {name: exchange.headers[name] for name in _KEPT_HEADERS if name in exchange.headers}
    if exchange.status is not None and exchange.status >= 400:
        body = b"".join(piece for _, piece in exchange.pieces)
        said = body[:_LONGEST_ERROR].decode(errors="replace").strip()
        answer.error = f"HTTP {exchange.status}: {said or 'nothing said'}"
        return answer
    done = False
    for when, data in _events(exchange.pieces):
        if data == b"[DONE]":
            done = True
            break
        _add(answer, when, data)
    answer.text = _whole(answer.text)
    if answer.error is None and not done:
        answer.error = "the stream ended without [DONE]"
    if answer.error is None and not answer.tokens:
        answer.error = "the answer has no token"
    return answer


def _events(pieces: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The data of each server-sent event, with the time of the piece that completed it."""
    rest = b""
    for when, piece in pieces:
        rest = rest + piece if rest else piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield when, b"\n".join(lines)


def _add(answer: Answer, when: int, data: bytes) -> None:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        answer.error = f"a message of the stream is not JSON: {data[:80]!r}"
        return
    if not isinstance(event, dict):
        answer.error = f"a message of the stream is no object: {data[:80]!r}"
        return
    if event.get("error"):
        answer.error = f"in the stream: {json.dumps(event['error'])[:_LONGEST_ERROR]}"
        return
    _count_usage(answer, event.get("usage"))
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return
    choice = choices[0]
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason:
        answer.finish_reason = _whole(reason)
    ids, text = choice.get("token_ids"), _text(choice)
    answer.text += text
    if isinstance(ids, list):
        answer.ids += [one for one in ids if isinstance(one, int)]
        answer.tokens += [when] * len(ids)
    elif text:
        answer.tokens.append(when)


def _text(choice: dict[str, Any]) -> str:
    """What a message adds, of an answer or of the reasoning before it."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return text if isinstance(text, str) else ""
    parts = (delta.get(key) for key in ("reasoning", "reasoning_content", "content"))
    return "".join(part for part in parts if isinstance(part, str))


def _whole(text: str) -> str:
    """Text that can be written as UTF-8: halves of a character that came in two messages become it, and a
    half alone the sign for what is none (U+FFFD)."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count_usage(answer: Answer, usage: object) -> None:
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details")
    found = (
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        details.get("cached_tokens") if isinstance(details, dict) else None,
    )
    whole = [one if type(one) is int and one >= 0 else None for one in found]
    answer.prompt_tokens, answer.output_tokens, answer.cached_tokens = whole


def server_timing(header: str) -> dict[str, float]:
    """`Server-Timing` as seconds by name; metrics without a duration are left out (W3C Server Timing)."""
    found: dict[str, float] = {}
    for match in _TIMING.finditer(header):
        if match.group(2):
            try:
                seconds = float(match.group(2)) / 1000.0
            except ValueError:
                continue
            if math.isfinite(seconds):
                found[match.group(1)] = seconds
    return found
