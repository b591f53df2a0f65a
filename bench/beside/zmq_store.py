"""The article's own design: a server in Python with a dict of blocks, and a client, over ZeroMQ and TCP.

A put is acknowledged when its blocks are in the dict; blocks are sent without a copy by the client, and
copied out of the message by who receives them. A get answers with all blocks at once, or streams them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np
import side
import zmq

_WAIT = 60_000  # milliseconds


def _serve(ready: Connection) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    ready.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    kept: dict[bytes, bytes] = {}
    while True:
        who, word, *parts = socket.recv_multipart(copy=False)
        frames = [part.buffer for part in parts]
        if bytes(word.buffer) == b"put":
            # One round's blocks at a time, as a store with room for no more would have it.
            kept = {bytes(frames[at]): bytes(frames[at + 1]) for at in range(0, len(frames), 2)}
            socket.send_multipart([who.bytes, b"stored"])
        elif bytes(word.buffer) == b"get":
            socket.send_multipart([who.bytes, *(kept[bytes(name)] for name in frames)], copy=False)
        else:
            for name in frames:
                socket.send_multipart([who.bytes, kept[bytes(name)]], copy=False)


class ZmqStore:
    """The client."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, _WAIT)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def put(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """All blocks in one message."""
        frames: list[bytes | memoryview] = [b"put"]
        for name, at in zip(names, order, strict=True):
            frames += [name.encode(), memoryview(blocks[at])]
        self._socket.send_multipart(frames, copy=False)
        self._socket.recv()

    def get(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """All blocks in one answer."""
        self._socket.send_multipart([b"get", *(name.encode() for name in names)])
        for at, frame in zip(order, self._socket.recv_multipart(copy=False), strict=True):
            blocks[at] = np.frombuffer(frame.buffer, dtype=np.uint8)

    def stream(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> Iterator[int]:
        """A message a block."""
        self._socket.send_multipart([b"stream", *(name.encode() for name in names)])
        for at in order:
            blocks[at] = np.frombuffer(self._socket.recv(copy=False).buffer, dtype=np.uint8)
            yield at


def main() -> None:
    """Run the server beside the client."""
    given = side.arguments()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    side.serve("zmq", side.Side(given.blocks, given.block_bytes, given.seed), ZmqStore(here.recv()))
    server.kill()


if __name__ == "__main__":
    main()
