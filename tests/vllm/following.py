"""What a router knows of a vLLM server's KV blocks: a subscriber of its KV events."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec
import zmq

from kvik.roles.ports import free_ports


@dataclass
class Medium:
    """Of one medium: the hashes of its blocks, in the order of their coming, and the tokens of each."""

    blocks: dict[bytes, list[int]] = field(default_factory=dict)
    parents: dict[bytes, bytes | None] = field(default_factory=dict)

    def prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """The hashes of the longest run of blocks that begins a prompt."""
        found: list[bytes] = []
        before: bytes | None = None
        rest = list(tokens)
        while True:
            for name, own in self.blocks.items():
                if self.parents[name] == before and own == rest[: len(own)]:
                    break
            else:
                return found
            found.append(name)
            before, rest = name, rest[len(own) :]


class Follower:
    """Follows the events of a server that is started with `arguments`, until the `with` block ends."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self.media = {"GPU": Medium(), "CPU": Medium(), "STORAGE": Medium()}
        self.removed: list[tuple[str, bytes]] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://127.0.0.1:{self.port}")

    @property
    def arguments(self) -> list[str]:
        """For the command line of the server."""
        config = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.port}",
        }  # fmt: skip
        return ["--kv-events-config", json.dumps(config)]

    def until(self, good: Callable[[], bool], within: float) -> None:
        """Follow until this is so; fails when it is not in time."""
        end = time.monotonic() + within
        while not good():
            left = end - time.monotonic()
            assert left > 0, {name: len(medium.blocks) for name, medium in self.media.items()}
            if self._socket.poll(int(left * 1000) + 1):
                self._take(self._socket.recv_multipart()[2])

    def now(self) -> None:
        """Follow what has come by now."""
        while self._socket.poll(0):
            self._take(self._socket.recv_multipart()[2])

    def _take(self, payload: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            getattr(self, f"_{event['type']}")(event)

    def _BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802 - vLLM's name of it
        medium, before = self.media[event["medium"]], event.get("parent_block_hash")
        tokens, size = event["token_ids"], event["block_size"]
        assert len(tokens) == size * len(event["block_hashes"])
        for place, name in enumerate(event["block_hashes"]):
            medium.blocks[name] = tokens[place * size :][:size]
            medium.parents[name] = before
            before = name

    def _BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802 - vLLM's name of it
        for name in event["block_hashes"]:
            self.media[event["medium"]].blocks.pop(name, None)
            self.removed.append((event["medium"], name))

    def _AllBlocksCleared(self, _: dict[str, Any]) -> None:  # noqa: N802 - vLLM's name of it
        self.media["GPU"] = Medium()  # of vLLM's own prefix cache

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
