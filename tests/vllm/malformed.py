"""Bytes that are no request for a completion, or one with something in it that makes no sense."""

import json
import random
import socket
from http.client import BadStatusLine

from kvik.demo import client

PATH = "/v1/completions"
# Method, path, body, and the length that is claimed where it is not the body's.
Bytes = tuple[str, str, bytes, int | None]
WRONG: list[dict[str, object]] = [
    {"prompt": 7}, {"prompt": {"a": 1}}, {"prompt": [10**9]}, {"prompt": [-5, 3]}, {"prompt": [[], [1]]},
    {"prompt": [3] * 5000}, {"max_tokens": -1}, {"max_tokens": "many"}, {"max_tokens": 10**7},
    {"temperature": "hot"}, {"temperature": -2}, {"n": -1}, {"n": 0}, {"model": "nobody's"},
    {"stop": {"a": 1}}, {"logit_bias": {"x": 1}}, {"top_p": 7}, {"stream": "perhaps"},
]  # fmt: skip
NONSENSE: list[object] = [
    7, "x", [1], {"do_remote_prefill": True}, {"do_remote_decode": "perhaps"}, {"do_remote_decode": [1]},
    {"do_remote_prefill": True, "do_remote_decode": True, "remote_block_ids": "x"},
    {"do_remote_prefill": True, "kvik": {"version": 3, "tickets": {}}}, {"kvik": [[[[]]]]},
]  # fmt: skip
WRONG += [{"kv_transfer_params": params} for params in NONSENSE]


def malformed(rng: random.Random, prompt: list[int]) -> Bytes:
    """One of them, made of a good request for a prompt."""
    good = client.body(prompt, 4)
    whole = json.dumps(good).encode()
    cut = whole[: rng.randrange(len(whole))]
    kinds: list[Bytes] = [("POST", PATH, json.dumps({**good, **change}).encode(), None) for change in WRONG]
    kinds += [
        ("POST", PATH, cut, None), ("POST", PATH, cut, len(whole)), ("POST", PATH, b"", None),
        ("POST", PATH, b"null", None), ("POST", PATH, b"[" * 20_000, None),
        ("POST", PATH, rng.randbytes(300), None), ("POST", "/v1/nothing", whole, None),
        ("GET", PATH, b"", None),
    ]  # fmt: skip
    return rng.choice(kinds)


def send(url: str, sent: Bytes, timeout: float) -> int:
    """Send this, and nothing more; the status, or 400 where the server hung up on a body that is cut off."""
    method, path, data, claimed = sent
    host, port = url.removeprefix("http://").split(":")
    length = len(data) if claimed is None else claimed
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=timeout) as stream:
        stream.sendall(head.encode() + data)
        if length > len(data):
            stream.shutdown(socket.SHUT_WR)
        answer = b""
        while b"\r\n" not in answer and (piece := stream.recv(4096)):
            answer += piece
    if not answer and length > len(data):
        return 400
    if not answer.startswith(b"HTTP/1.1 "):
        raise BadStatusLine(repr(answer[:80]))
    return int(answer.split()[1])
