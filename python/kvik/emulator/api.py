"""OpenAI's completions and chat, as vLLM speaks them: requests checked, answers composed.

What vLLM does and an engine without weights cannot mean is refused by name (several choices, log
probabilities); how to sample is ignored, because there is one next token. Unknown fields are ignored, as vLLM
does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvik.emulator import tokens
from kvik.emulator.requests import Event, Request, Sampling

Kind = Literal["completion", "chat"]
DEFAULT_TOKENS = {"completion": 16, "chat": 256}
NOT_HERE = (
    "echo",
    "logprobs",
    "prompt_logprobs",
    "top_logprobs",
    "use_beam_search",
    "prompt_embeds",
    "suffix",
    "tools",
)


class ApiError(Exception):
    """An answer that is an error: HTTP status, text, and the field that is wrong."""

    def __init__(self, status: int, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's form of an error, with vLLM's names of types."""
        kinds = {
            400: "BadRequestError",
            404: "NotFoundError",
            413: "BadRequestError",
            503: "ServiceUnavailableError",
        }
        return error_body(str(self), kinds.get(self.status, "InternalServerError"), self.status, self.param)


def error_body(text: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Ask:
    """A request that was understood."""

    kind: Kind
    prompt: npt.NDArray[np.uint32]
    sampling: Sampling
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None


@dataclass(frozen=True)
class Bounds:
    """What a request may ask for. room: tokens that all pages of a replica hold."""

    model: str
    vocab_size: int
    max_context: int
    room: int


def parse(body: object, kind: Kind, bounds: Bounds) -> Ask:
    """Check a request's body; `ApiError` names the field and what is wrong with it."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "the request body is not a JSON object")
    model = body.get("model")
    if model is not None and model != bounds.model:
        raise ApiError(
            404, f"The model {str(model)[:200]!r} does not exist; this server has {bounds.model!r}.", "model"
        )
    for field in NOT_HERE:
        value = body.get(field)
        # No log probabilities of other tokens still asks for those of the tokens themselves.
        asked = value == 0 and value is not False and field in ("logprobs", "prompt_logprobs")
        if asked or value not in (None, False, []):
            raise ApiError(400, f"`{field}` is not emulated", field)
    for field in ("n", "best_of"):
        if body.get(field) not in (None, 1):
            raise ApiError(400, f"`{field}` is {str(body[field])[:40]}; the emulator gives one answer", field)
    prompt = _prompt(body, bounds) if kind == "completion" else _chat_prompt(body)
    stream = _flag(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping) or (options and not stream):
        raise ApiError(400, "`stream_options` is not an object, or goes without `stream`", "stream_options")
    include_usage = _flag(options, "include_usage")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= 1024):
        raise ApiError(400, "`cache_salt` is not a text of 1 to 1024 characters", "cache_salt")
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise ApiError(400, "`kv_transfer_params` is not an object", "kv_transfer_params")
    return Ask(
        kind=kind,
        prompt=prompt,
        sampling=_sampling(body, kind, prompt.size, bounds),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and _flag(options, "continuous_usage_stats"),
        return_token_ids=_flag(body, "return_token_ids"),
        cache_salt=salt,
        kv_transfer_params=params,
    )


def _prompt(body: Mapping[str, Any], bounds: Bounds) -> npt.NDArray[np.uint32]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokens.encode(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "`prompt` is not a text or a list of token ids with at least one token", "prompt")
    if any(type(token) is not int for token in prompt):
        raise ApiError(
            400,
            "`prompt` is a batch, or has entries that are not token ids; send one prompt a request",
            "prompt",
        )
    if not 0 <= min(prompt) <= max(prompt) < bounds.vocab_size:
        raise ApiError(400, f"`prompt` has token ids outside of 0 to {bounds.vocab_size - 1}", "prompt")
    return np.array(prompt, dtype=np.uint32)


def _chat_prompt(body: Mapping[str, Any]) -> npt.NDArray[np.uint32]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "`messages` is not a list with at least one message", "messages")
    lines = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ApiError(400, "`messages` has an entry without a `role`", "messages")
        lines.append(f"<{message['role']}> {_content(message.get('content'))}\n")
    return tokens.encode("".join(lines) + "<assistant>")


def _content(content: object) -> str:
    """A message's text: as it is, or in parts, which are lines."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "\n".join(part["text"] for part in content)
    raise ApiError(
        400, "a message's `content` is neither text nor parts of text; images are not emulated", "messages"
    )


def _sampling(body: Mapping[str, Any], kind: Kind, prompt: int, bounds: Bounds) -> Sampling:
    room = min(bounds.max_context, bounds.room)
    if prompt >= room:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens; with an answer, at most {room} fit "
            f"(context {bounds.max_context}, KV memory {bounds.room})",
            "prompt" if kind == "completion" else "messages",
        )
    asked = _count(body, "max_completion_tokens", 1) if kind == "chat" else None
    asked = asked if asked is not None else _count(body, "max_tokens", 1)
    if asked is not None and prompt + asked > room:
        raise ApiError(
            400,
            f"`max_tokens` is {asked}, and the prompt has {prompt} tokens; together at most {room} fit "
            f"(context {bounds.max_context}, KV memory {bounds.room})",
            "max_tokens",
        )
    most = asked if asked is not None else min(DEFAULT_TOKENS[kind], room - prompt)
    least = _count(body, "min_tokens", 0) or 0
    if least > most:
        raise ApiError(
            400, f"`min_tokens` is {least}, above the {most} that the answer may have", "min_tokens"
        )
    stops = body.get("stop_token_ids") or []
    if not isinstance(stops, list) or any(type(token) is not int for token in stops):
        raise ApiError(400, "`stop_token_ids` is not a list of token ids", "stop_token_ids")
    if body.get("stop"):
        raise ApiError(400, "`stop` texts are not emulated; `stop_token_ids` are", "stop")
    return Sampling(most, least, _flag(body, "ignore_eos"), frozenset(stops))


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"`{key}` is neither true nor false", key)
    return bool(value)


def _count(body: Mapping[str, Any], key: str, least: int) -> int | None:
    value = body.get(key)
    if value is not None and (type(value) is not int or value < least):
        raise ApiError(400, f"`{key}` is {str(value)[:40]!r}; it is a whole number from {least}", key)
    return value


class Answer:
    """The answer to one request: whole, or as chunks of a stream."""

    def __init__(self, ask: Ask, request: Request, answer_id: str, model: str) -> None:
        self._ask = ask
        self._request = request
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._text = tokens.Detokenizer()
        self._chat = ask.kind == "chat"
        self._first = True

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """Everything at once; the last event has the end."""
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._piece(events, kind, delta=False), "usage": self._usage(),
            "kv_transfer_params": events[-1].params,
        }  # fmt: skip

    def chunk(self, events: list[Event]) -> dict[str, Any]:
        """The next piece of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        piece = self._piece(events, kind, delta=True)
        if self._ask.continuous_usage:
            piece["usage"] = self._usage()
        if events[-1].params is not None:  # of the last one, as vLLM does from 0.33 on
            piece["kv_transfer_params"] = events[-1].params
        return piece

    def _piece(self, events: list[Event], kind: str, *, delta: bool) -> dict[str, Any]:
        """What these events say; the prompt's token ids are in the first one's."""
        out = [event.token for event in events if event.token is not None]
        end = events[-1]
        # A token that the client named as the end is none of the text.
        shown = out if end.stop_reason is None else out[:-1]
        last = end.finish_reason is not None
        choice: dict[str, Any] = {
            "index": 0, **self._body(shown, last=last, delta=delta),
            "finish_reason": end.finish_reason, "stop_reason": end.stop_reason,
        }  # fmt: skip
        piece: dict[str, Any] = {**self._head, "object": kind, "choices": [choice]}
        if self._ask.return_token_ids:
            choice["token_ids"] = out
            if self._first:
                ids = self._request.prompt_token_ids.tolist()
                (piece if self._chat else choice)["prompt_token_ids"] = ids
        self._first = False
        return piece

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last piece of a stream, where it was asked for."""
        if not self._ask.include_usage:
            return None
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": self._usage()}

    def _body(self, out: list[int], *, last: bool, delta: bool) -> dict[str, Any]:
        text = self._text.add(out, last=last)
        if not self._chat:
            return {"text": text, "logprobs": None}
        message = {"content": text} if delta and not self._first else {"role": "assistant", "content": text}
        return {"delta" if delta else "message": message, "logprobs": None}

    def _usage(self) -> dict[str, Any]:
        prompt, answer = self._request.num_prompt_tokens, len(self._request.outputs)
        cached = min(self._request.local_tokens + self._request.external_tokens, prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
