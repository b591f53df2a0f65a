"""What a load driver adds to the times that it measures, and how much it can send: ours beside `vllm bench
serve`.

    python bench/load_driver.py [--vllm PYTHON] [--rounds 7] [--requests 200] [--seed N] [--json FILE]

Both send the same load to one stub, in turns of random order within each round. The stub is a process of its
own; where there are two CPUs, it has the first and the driver the second. It notes when it had read a
request and when it wrote each token, on the clock that both processes share.

Added latency of a request is its time to first token, as the driver says it, less what the stub took from
having read it to writing that token; so it holds the driver's sending, its reading and its waiting, and the
loopback's way. The same is done for the last token, from sending. Percentiles are taken within a run; what
is compared is their median over rounds, and its spread is shown.

The highest rate is that of a closed load of 64 users on a stub that answers at once: requests a second, from
the first that is sent to the last answer's end.

--vllm names the Python of an environment that has vLLM; its `vllm bench serve` makes the load of the second
column. Without it only ours is measured. Its tokenizer is that of the demo's checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvik.roles.ports import free_ports

USERS, TOKENS, PROMPT = 8, 16, 64
FIRST_S, GAP_S = 0.02, 0.005
RATE_USERS = 64
PERCENTILES = (50, 99)
LIMIT = 300.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()


class Stub(asyncio.Protocol):
    """One connection of the stub: as little work a request as can be, so that the driver is what is measured.

    Each token's text begins with the times that the stub has noted: of the first token, when the request had
    been read and when the token was written; of the others, when they were written.
    """

    instant = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  (the type's narrowing)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        if head.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
        elif self.instant:
            read = time.monotonic_ns()
            parts = [ANSWER, self.token(read), *(self.token() for _ in range(TOKENS - 1)), self.end()]
            self.transport.write(b"".join(parts))
        else:
            asyncio.get_running_loop().call_later(FIRST_S, self.first, time.monotonic_ns())

    def first(self, read: int) -> None:
        self.transport.write(ANSWER + self.token(read))
        asyncio.get_running_loop().call_later(GAP_S, self.next, TOKENS - 1)

    def next(self, left: int) -> None:
        if left == 0:
            self.transport.write(self.end())
            return
        self.transport.write(self.token())
        asyncio.get_running_loop().call_later(GAP_S, self.next, left - 1)

    def token(self, read: int | None = None) -> bytes:
        now = time.monotonic_ns()
        text = f"{now} " if read is None else f"{read} {now} "
        return chunk(b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % text.encode())

    def end(self) -> bytes:
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
            PROMPT,
            TOKENS,
            PROMPT + TOKENS,
        )
        return (
            chunk(b'data: {"choices":[],"usage":%s}\n\n' % usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        )


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(port: int, *, instant: bool) -> None:
    """The stub's process."""
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {0})
    Stub.instant = instant
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=1024)
    print("serving", flush=True)
    await server.serve_forever()


@dataclass(frozen=True)
class Run:
    """One run of a driver: added latency of the first and of the last token in s, and requests a second."""

    first: list[float]
    last: list[float]
    rate: float


Driver = Callable[[str, Path, int, int, int], Run]
"""URL, folder, number of requests, users, seed."""


def ours(url: str, folder: Path, requests: int, users: int, seed: int) -> Run:
    """Our driver, in a process of its own as `kvik lab load` is. What the stub noted is in the answers'
    texts, of which a record has digests only; so `send` keeps the texts for this measurement."""
    spec = {
        "url": url,
        "model": "stub",
        "arrival": {"kind": "closed", "concurrency": users},
        "requests": requests,
        "seed": seed,
        "warmup": 5,
        "prompt": {"tokens": PROMPT, "output": TOKENS},
        "token_ids": False,
    }
    (folder / "load.json").write_text(json.dumps(spec))
    command = [sys.executable, __file__, "--send", str(folder / "load.json"), str(folder / "out.json")]
    pinned(command, folder)
    found = json.loads((folder / "out.json").read_text())
    return run_of(found)


def send(spec: Path, out: Path) -> None:
    """Our driver in its own process, with the texts that it has read beside the times."""
    from kvik_lab.load.drive import opened, read
    from kvik_lab.load.spec import read_spec

    async def run() -> None:
        async with opened(read_spec(spec)) as (driver, _):
            await driver.warm_up()
            await driver.run()
            sent = [one for one in driver.sent if one.planned.phase == "measure"]
            requests = []
            for one in sent:
                answer = read(one)
                said = {"tokens": answer.tokens, "text": answer.text, "error": answer.error}
                requests.append({"sent": one.exchange.sent, **said})
            out.write_text(json.dumps(requests))

    asyncio.run(run())


def vllm(python: str) -> Driver:
    """`vllm bench serve`."""

    def run(url: str, folder: Path, requests: int, users: int, seed: int) -> Run:
        model = folder / "model"
        if not model.exists():
            model.mkdir()
            subprocess.run([python, "-m", "kvik.demo.checkpoint", str(model), "1"], check=True, timeout=LIMIT)
        load = {
            "backend": "openai",
            "base-url": url,
            "endpoint": "/v1/completions",
            "model": "stub",
            "tokenizer": model,
            "dataset-name": "random",
            "random-input-len": PROMPT,
            "random-output-len": TOKENS,
            "num-prompts": requests,
            "max-concurrency": users,
            "num-warmups": 5,
            "seed": seed,
            "result-dir": folder,
            "result-filename": "vllm.json",
        }
        command = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += [word for name, value in load.items() for word in (f"--{name}", str(value))]
        command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
        pinned(command, folder)
        found = json.loads((folder / "vllm.json").read_text())
        seen = []
        lists = ("start_times", "ttfts", "latencies", "generated_texts", "errors")
        for start, ttft, latency, text, error in zip(*(found[name] for name in lists), strict=True):
            tokens = [start + ttft, start + latency]
            seen.append(
                {"sent": start * 1e9, "tokens": [at * 1e9 for at in tokens], "text": text, "error": error}
            )
        return run_of(seen)

    return run


def run_of(requests: Sequence[dict[str, Any]]) -> Run:
    """What comes of requests. Of both drivers, the time is from the first that was sent to the last token:
    what one does before, such as making its prompts, is not what it can send.
    """
    first, last = added(requests)
    began, ended = min(one["sent"] for one in requests), max(one["tokens"][-1] for one in requests)
    return Run(first, last, rate=len(requests) / ((ended - began) / 1e9))


def added(requests: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Of each request, its time to the first and to the last token less the stub's own, in s."""
    first, last = [], []
    for one in requests:
        if one["error"]:
            raise SystemExit(f"a request failed: {one['error']}")
        noted = [int(word) for word in one["text"].split()]
        read, tokens = noted[0], noted[1:]
        if len(tokens) != TOKENS:
            raise SystemExit(f"an answer has {len(tokens)} of {TOKENS} tokens")
        first.append((one["tokens"][0] - one["sent"] - (tokens[0] - read)) / 1e9)
        last.append((one["tokens"][-1] - one["sent"] - (tokens[-1] - read)) / 1e9)
    return first, last


def pinned(command: list[str], folder: Path) -> None:
    """Run a driver on the second CPU, where there is one."""
    pin = ["taskset", "-c", "1"] if (os.cpu_count() or 1) > 1 else []
    with (folder / "driver.log").open("w") as log:
        done = subprocess.run([*pin, *command], stdout=log, stderr=log, timeout=LIMIT, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"{command[:6]} ended with {done.returncode}\n{(folder / 'driver.log').read_text()[-3000:]}"
        )


def measure(asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """All rounds: by driver and figure, one value a round."""
    drivers: dict[str, Driver] = {"kvik lab load": ours}
    if asked.vllm:
        drivers["vllm bench serve"] = vllm(asked.vllm)
    draw = random.Random(asked.seed)  # noqa: S311  (an order, no secret)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in drivers}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.rounds):
            for instant in (False, True):
                order = list(drivers)
                draw.shuffle(order)
                for name in order:
                    run = one(
                        drivers[name], Path(folder), asked.requests, draw.randrange(2**31), instant=instant
                    )
                    note(found[name], run, instant=instant)
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr, flush=True)
    return found


def one(driver: Driver, folder: Path, requests: int, seed: int, *, instant: bool) -> Run:
    """One run on a stub of its own."""
    (port,) = free_ports(1)
    command = [sys.executable, __file__, "--serve", str(port), *(["--instant"] if instant else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stub:
        try:
            if stub.stdout is not None:
                stub.stdout.readline()
            users = RATE_USERS if instant else USERS
            return driver(f"http://127.0.0.1:{port}", folder, requests * (10 if instant else 1), users, seed)
        finally:
            stub.terminate()


def note(found: dict[str, list[float]], run: Run, *, instant: bool) -> None:
    if instant:
        found.setdefault("highest rate, requests/s", []).append(run.rate)
        return
    for what, values in (("first", run.first), ("last", run.last)):
        cut = statistics.quantiles(values, n=100)
        for at in PERCENTILES:
            found.setdefault(f"added to the {what} token, p{at}, ms", []).append(cut[at - 1] * 1e3)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--instant", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        asyncio.run(serve(asked.serve, instant=asked.instant))
    elif asked.send is not None:
        send(*asked.send)
    else:
        print(f"seed {asked.seed}; medians over {asked.rounds} rounds [lowest, highest]")
        found = measure(asked)
        for name, figures in found.items():
            print(name)
            for what, values in figures.items():
                print(
                    f"  {what:<36} {statistics.median(values):10.3f}  [{min(values):.3f}, {max(values):.3f}]"
                )
        if asked.json is not None:
            asked.json.write_text(
                json.dumps({"seed": asked.seed, "rounds": asked.rounds, "figures": found}, indent=1)
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
