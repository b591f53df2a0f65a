"""HTTP: vLLM's paths, on starlette and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvik.emulator import api
from kvik.emulator.api import Answer, ApiError, Ask, Bounds, Kind
from kvik.emulator.front import Front, UnavailableError
from kvik.emulator.requests import Event, Request
from kvik.errors import InvalidArgument

LONGEST_BODY = 64 << 20
_ID = re.compile(r"[^A-Za-z0-9_.:-]")
_SURROGATE = re.compile(rb"\\u[dD]")  # where JSON may have one
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Web:
    """The handlers of one server."""

    def __init__(self, front: Front, bounds: Bounds, *, allow_faults: bool) -> None:
        self._front = front
        self._bounds = bounds
        self._allow_faults = allow_faults

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._handler("completion"), methods=["POST"]),
                Route("/v1/chat/completions", self._handler("chat"), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/metrics", self._metrics),
                Route("/fault", self._fault, methods=["POST"]),
            ]
        )

    def _handler(self, kind: Kind) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def handle(http: HttpRequest) -> Response:
            try:
                ask = api.parse(await _json(http), kind, self._bounds)
                request, answer_id = self._request(http, ask)
                self._front.submit(request)
            except UnavailableError as error:
                return _error(ApiError(503, str(error)))
            except ApiError as error:
                return _error(error)
            return Generation(self._front, ask, request, Answer(ask, request, answer_id, self._bounds.model))

        return handle

    def _request(self, http: HttpRequest, ask: Ask) -> tuple[Request, str]:
        """The request, and its id in the answer. Its own id is unique also where a client sends one twice."""
        given = _ID.sub("_", http.headers.get("x-request-id", ""))[:200] or secrets.token_hex(16)
        answer_id = f"{'chatcmpl' if ask.kind == 'chat' else 'cmpl'}-{given}"
        request = Request(
            f"{answer_id}-{secrets.token_hex(4)}",
            ask.prompt,
            ask.sampling,
            self._bounds.model,
            ask.cache_salt,
            ask.kv_transfer_params,
        )
        return request, answer_id

    async def _models(self, _http: HttpRequest) -> Response:
        card = {
            "id": self._bounds.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvik-emulator",
            "root": self._bounds.model,
            "parent": None,
            "max_model_len": self._bounds.max_context,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, _http: HttpRequest) -> Response:
        """200 when every replica serves; 503 when one does not, also while the others do."""
        replicas = self._front.health()
        whole = all(state == "ok" for state in replicas.values())
        return JSONResponse(
            {"status": "ok" if whole else "degraded", "replicas": replicas}, 200 if whole else 503
        )

    async def _metrics(self, _http: HttpRequest) -> Response:
        return Response(self._front.metrics.text(), media_type=METRICS_TYPE)

    async def _fault(self, http: HttpRequest) -> Response:
        """Order a fault: the body is `{"fault": SPEC}`."""
        if not self._allow_faults:
            return _error(
                ApiError(404, "faults cannot be ordered here: start the server with --allow-faults")
            )
        try:
            body = await _json(http)
            spec = body.get("fault") if isinstance(body, dict) else None
            if not isinstance(spec, str):
                raise ApiError(400, '`fault` is not a text; send {"fault": "slow:factor=3"}', "fault")
            self._front.order_fault(spec)
        except InvalidArgument as error:
            return _error(ApiError(400, str(error), "fault"))
        except ApiError as error:
            return _error(error)
        return JSONResponse({"ordered": spec})


class Generation(Response):
    """The answer to a request that is being computed; a client that leaves aborts it.

    The head of a streamed answer waits for the first token: so what fails before it has its own status, and
    the wait for KV is in a header.
    """

    def __init__(self, front: Front, ask: Ask, request: Request, answer: Answer) -> None:
        super().__init__()
        self._front = front
        self._ask = ask
        self._request = request
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer, unless the client leaves first."""
        answering = asyncio.create_task(self._respond(scope, receive, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._front.leave(self._request)
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._news()
        if first[-1].error is not None:
            await _error(ApiError(500, first[-1].error))(scope, receive, send)
        elif self._ask.stream:
            await self._stream(first, send)
        else:
            events = first
            while events[-1].finish_reason is None and events[-1].error is None:
                events += await self._news()
            text = events[-1].error
            whole = _error(ApiError(500, text)) if text else JSONResponse(self._answer.whole(events))
            await whole(scope, receive, send)

    async def _stream(self, events: list[Event], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        wait = self._request.times.kv_wait
        if wait is not None:
            headers.append((b"server-timing", b"kv_wait;dur=%.3f" % (wait * 1e3)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in self._pieces(events):
            await send(_body_part(b"data: " + piece + b"\n\n", more=True))
        await send(_body_part(b"", more=False))

    async def _pieces(self, events: list[Event]) -> AsyncIterator[bytes]:
        while True:
            if (text := events[-1].error) is not None:
                yield json.dumps(api.error_body(text, "InternalServerError", 500)).encode()
                break
            yield json.dumps(self._answer.chunk(events)).encode()
            if events[-1].finish_reason is not None:
                if (usage := self._answer.usage_chunk()) is not None:
                    yield json.dumps(usage).encode()
                break
            events = await self._news()
        yield b"[DONE]"

    async def _news(self) -> list[Event]:
        """The next event, and those that have come with it."""
        events = [await self._request.events.get()]
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                events.append(self._request.events.get_nowait())
        return events


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body_part(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _json(http: HttpRequest) -> Any:
    """The body, whatever its content type says; `ApiError` when it is too long, cut or not JSON."""
    data = bytearray()
    try:
        async for piece in http.stream():
            data += piece
            if len(data) > LONGEST_BODY:
                raise ApiError(413, f"the request body is longer than {LONGEST_BODY} bytes")
    except ClientDisconnect:
        raise ApiError(400, "the client has left before its request was whole") from None
    try:
        body = json.loads(data.decode("utf-8-sig"))  # UTF-16, too, would have surrogates
        if _SURROGATE.search(data):
            # Half of a character, which no text of an answer, a digest or a token may have.
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from error


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)
