"""A server that streams tokens at stated times and misbehaves on order. It keeps when it did what, on the
same clock as its client, so that what a client measures can be compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "stub"


@dataclass
class Behaviour:
    """What it does. Times in seconds. `busy`: requests are served one after another, each `first` long.
    `refused`: the numbers of those that are refused."""

    first: float = 0.01
    gap: float = 0.002
    busy: bool = False
    fault: str | None = None
    refused: range = range(0)
    a_message: int = 1
    added: int = 0


@dataclass
class Served:
    """One request as the server saw it: its body, and when each token was written, on the monotonic clock."""

    body: dict[str, Any]
    headers: dict[str, str]
    tokens: list[float] = field(default_factory=list)


class Stub:
    """The server."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.served: list[Served] = []
        self.connections = 0
        self.url = ""
        self._turn = asyncio.Lock()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].split()[1] == "/v1/models":
            self._json(writer, 200, {"data": [{"id": MODEL}]})
            return True
        served = Served(json.loads(body), headers)
        number, behaviour = len(self.served), self.behaviour
        self.served.append(served)
        if behaviour.fault == "refused" or number in behaviour.refused:
            self._json(writer, 503, {"error": {"message": "no room"}})
            return True
        if behaviour.fault == "gone":
            return False
        if behaviour.fault == "silent":
            await asyncio.sleep(60)
        async with self._turn if behaviour.busy else contextlib.AsyncExitStack():
            await asyncio.sleep(behaviour.first)
        return await self._stream(writer, served)

    async def _stream(self, writer: asyncio.StreamWriter, served: Served) -> bool:
        behaviour = self.behaviour
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n"
            b"Server-Timing: route;dur=0.25, prefill;desc=x;dur=12\r\nTrailer: server-timing\r\n\r\n"
        )
        asked = served.body.get("max_tokens") or served.body["max_completion_tokens"]
        for at in range(0, asked, behaviour.a_message):
            count = min(behaviour.a_message, asked - at)
            self._event(writer, self._piece(served.body, [5] * count))
            served.tokens += [time.monotonic()] * count
            await writer.drain()
            if behaviour.fault == "cut" and at:
                return False
            if behaviour.fault == "error" and at:
                self._event(writer, {"error": {"message": "rank died"}})
                break
            await asyncio.sleep(behaviour.gap)
        self._event(writer, {"choices": [], "usage": self._usage(served.body, asked)})
        self._chunk(writer, b"data: [DONE]\r\n\r\n")
        writer.write(b"0\r\nServer-Timing: total;dur=99\r\n\r\n")
        await writer.drain()
        return True

    def _piece(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        text = "x" * len(ids)
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        return {"choices": [choice]}

    def _usage(self, body: dict[str, Any], answered: int) -> dict[str, Any]:
        if "messages" in body:
            prompt = sum(len(one["content"]) for one in body["messages"])
        else:
            prompt = len(body["prompt"])
        return {"prompt_tokens": prompt + self.behaviour.added, "completion_tokens": answered,
                "prompt_tokens_details": {"cached_tokens": 3}}  # fmt: skip

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    @staticmethod
    def _json(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))


@contextlib.asynccontextmanager
async def stub(**behaviour: Any) -> AsyncIterator[Stub]:
    """A stub on a port of its own, in this loop."""
    served = Stub(Behaviour(**behaviour))
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
