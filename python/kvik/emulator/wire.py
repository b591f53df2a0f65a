"""What the front and its ranks say to each other: length-prefixed messages, one JSON object and some arrays.

::

    u32 bytes of JSON | u32 bytes of arrays | JSON | arrays, one after the other

The JSON's `kind` says what it is, its `arrays` how long each array is. Numbers are little-endian, as the
machine's own; both ends are processes of one machine and one installation. Nothing is unpickled, and a
message is at most `LONGEST` bytes.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import socket
import struct
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST = 256 << 20
_HEAD = struct.Struct("<II")


class WireError(Exception):
    """The other side sent something that is not a message, or one that is too long."""


@dataclass(frozen=True)
class Message:
    """`fields` is JSON; `arrays` are bytes, to be seen as what the kind of message says."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: list[npt.NDArray[Any]] = field(default_factory=list)

    def encode(self) -> list[memoryview]:
        """The pieces to send."""
        sizes = [array.nbytes for array in self.arrays]
        text = json.dumps({"kind": self.kind, "arrays": sizes, **self.fields}, default=_as_text).encode()
        if len(text) + sum(sizes) > LONGEST:
            raise WireError(f"a message {self.kind!r} of {len(text) + sum(sizes)} bytes; most are {LONGEST}")
        head = _HEAD.pack(len(text), sum(sizes)) + text
        return [memoryview(head), *(array.data.cast("B") for array in self.arrays if array.nbytes)]


def _as_text(value: Any) -> str:
    """Bytes within the JSON."""
    if isinstance(value, bytes):
        return base64.b85encode(value).decode()
    raise TypeError(f"{type(value).__name__} in a message")


def _decode(text: bytes, body: bytes) -> Message:
    fields = json.loads(text)
    arrays, at = [], 0
    for size in fields.pop("arrays"):
        arrays.append(np.frombuffer(body, dtype=np.uint8, count=size, offset=at))
        at += size
    return Message(str(fields.pop("kind")), fields, arrays)


def _lengths(head: bytes) -> tuple[int, int]:
    text, body = _HEAD.unpack(head)
    if text + body > LONGEST:
        raise WireError(f"a message of {text + body} bytes was announced; most are {LONGEST}")
    return text, body


# A rank: blocking.


def send(sock: socket.socket, message: Message) -> None:
    """Send one message; `OSError` when the other side is gone."""
    for piece in message.encode():
        sock.sendall(piece)


def receive(sock: socket.socket) -> Message | None:
    """The next message, or None when the other side has closed."""
    head = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    text_size, body_size = _lengths(head)
    text, body = _exactly(sock, text_size), _exactly(sock, body_size)
    return None if text is None or body is None else _decode(text, body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        more = sock.recv_into(view[got:])
        if more == 0:
            return None
        got += more
    return bytes(data)


# The front: asyncio.


async def receive_async(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None when the other side has closed or died."""
    try:
        text_size, body_size = _lengths(await reader.readexactly(_HEAD.size))
        text = await reader.readexactly(text_size)
        return _decode(text, await reader.readexactly(body_size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_async(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queue one message."""
    writer.writelines(message.encode())


# Dataclasses as JSON: plans and hellos of `kvik.handover`, whatever fields they have.


def plain(value: Any) -> Any:
    """A dataclass as what JSON can say."""
    return dataclasses.asdict(value)


def build(wanted: Any, raw: Any) -> Any:
    """The value of a type from what JSON said: dataclasses, lists, tuples, dicts with int or str keys, bytes,
    optional and plain values."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        kinds = typing.get_type_hints(wanted)
        return typing.cast(Any, wanted)(**{key: build(kinds[key], value) for key, value in raw.items()})
    if wanted is bytes:
        return base64.b85decode(raw)
    if origin in (typing.Union, types.UnionType):
        return None if raw is None else build(next(kind for kind in inner if kind is not type(None)), raw)
    if origin is dict:
        return {inner[0](key): build(inner[1], value) for key, value in raw.items()}
    if origin is list:
        return _items(inner[0], raw)
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(build(kind, item) for kind, item in zip(inner, raw, strict=True))
    if origin is tuple:
        return tuple(_items(inner[0], raw))
    return raw


def _items(kind: Any, raw: Iterable[Any]) -> list[Any]:
    return list(raw) if kind in (int, str, float, bool) else [build(kind, item) for item in raw]
