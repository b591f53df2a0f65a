"""A store with a log under load, whose clients and server are killed again and again.

    python bench/store_soak.py [--minutes 30] [--clients 8] [--every 10] [--bytes 20GiB] [--memory 1GiB]

Client processes put prompts of random length, each fourth one durably, and get what they or others put. The
bytes of a block are a function of its key, and every block that comes back is compared with them. Every few
seconds one client, at random, or the server gets SIGKILL, and is started again. What was acknowledged as
durable before must be there when the server is back. The keys go round, so that about ``--bytes`` go
through a memory of ``--memory``; the log has room for all of them, so that it drops nothing.

At the end: no wrong block, no lost one; no process has ended by itself; the resident memory of no server was
above 1.05 of the memory and 64 MiB; it has no more files open than when it began, and those of its memory;
and the log's directory has no file that is no segment. Exit status 1 where one of these does not hold. Prints
the seed, and one line of JSON. The transport is tcp: over `local` a server maps the pages of its clients,
which would count as memory of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvik

LAYERS, RUN, TOKENS = 4, 32768, 16
BLOCK = LAYERS * RUN
MOST = 64  # blocks of a prompt
DEADLINE = 20.0  # seconds of one call of a client
STARTS = 60.0  # seconds until a server that was killed serves again
SLACK = 64 << 20  # bytes that a server has besides its blocks
SLABS = 16  # files that are its memory
NAMESPACE = kvik.Namespace(
    model="soak", kv_dtype="bfloat16", layers=(0, LAYERS), model_layers=LAYERS, heads=(0, 1),
    model_heads=1, block_tokens=TOKENS,
)  # fmt: skip
Bytes = npt.NDArray[np.uint8]


def content(key: bytes) -> Bytes:
    """The bytes of a block: words that follow from its key, each another."""
    seed = np.frombuffer(key, dtype=np.uint64)
    words = np.arange(BLOCK // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed: Bytes = ((words ^ seed[0]) * (seed[1] | np.uint64(1)) ^ seed[2] ^ seed[3]).view(np.uint8)
    return mixed.reshape(LAYERS, RUN)


def prompt(number: int) -> tuple[range, int]:
    """The tokens of a prompt, and its blocks: the same of a number each time."""
    blocks = 1 + random.Random(number).randrange(MOST)  # noqa: S311 - a workload
    first = number * MOST * TOKENS
    return range(first, first + blocks * TOKENS), blocks


def killed(process: subprocess.Popen[str]) -> bool:
    """Kill it; False where it had ended by itself."""
    process.kill()
    return process.wait(timeout=STARTS) == -signal.SIGKILL


class Client:
    """What one process does until it is killed: told line by line to the parent."""

    def __init__(self, engine: kvik.Engine, address: str, prompts: int, seed: int) -> None:
        self.layout = kvik.Layout(2 * MOST, RUN, layers=LAYERS, layer_stride=2 * MOST * RUN)
        self.region = engine.allocate(self.layout.nbytes)
        self.bytes: Bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8).reshape(
            LAYERS, 2 * MOST, RUN
        )
        self.store = kvik.Store.connect(engine, address, NAMESPACE, self.layout)
        self.random, self.prompts = random.Random(seed), prompts  # noqa: S311 - a workload

    def _keys(self, number: int) -> list[bytes]:
        keys = self.store.keys(prompt(number)[0])
        return [keys[at : at + 32] for at in range(0, len(keys), 32)]

    def put(self, number: int, *, durable: bool) -> int:
        """Blocks of a prompt that are there for sure."""
        keys = self._keys(number)
        for page, key in enumerate(keys):
            self.bytes[:, page] = content(key)
        pages = self.region.pages(self.layout, range(len(keys)))
        ack: Any = "durable" if durable else "stored"
        stored = self.store.put(b"".join(keys), pages, ack=ack, deadline=DEADLINE).wait()
        return stored.stored + stored.known

    def get(self, number: int) -> tuple[int, int]:
        """Blocks of a prompt that are there, and those of them that are wrong."""
        keys = self._keys(number)
        self.bytes[:, MOST : MOST + len(keys)] = 0xEE
        pages = self.region.pages(self.layout, range(MOST, MOST + len(keys)))
        there = self.store.get(b"".join(keys), pages, deadline=DEADLINE).wait()
        wrong = sum(not np.array_equal(self.bytes[:, MOST + at], content(keys[at])) for at in range(there))
        return there, wrong

    def run(self) -> None:
        while True:
            number = self.random.randrange(self.prompts)
            durable = self.random.randrange(4) == 0
            try:
                if self.random.randrange(2):
                    there, wrong = self.get(number)
                    print("get", number, there, wrong, flush=True)
                else:
                    print("put", number, self.put(number, durable=durable), int(durable), flush=True)
            except kvik.ChecksumMismatch as error:
                print("mismatch", error, flush=True)
            except kvik.KvikError as error:
                print("error", error.code, flush=True)
                # Of a store that is back a client learns by asking: not as fast as it can.
                time.sleep(0.05)


@dataclass
class Counts:
    """What all clients told."""

    puts: int = 0
    gets: int = 0
    blocks_put: int = 0
    blocks_got: int = 0
    wrong: int = 0
    lost: int = 0
    durable_asked: int = 0
    kills_of_clients: int = 0
    kills_of_the_server: int = 0
    died: int = 0  # processes that ended before they were killed
    mismatches: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class Clients:
    """Processes that put and get, and what they told."""

    def __init__(self, arguments: argparse.Namespace, address: str, prompts: int, seed: int) -> None:
        self.counts, self.durable = Counts(), dict[int, int]()
        self._lock, self._seed, self._ended = threading.Lock(), seed, False
        self._command = [sys.executable, __file__, "--client", address, "--prompts", str(prompts)]
        self._processes = dict[int, subprocess.Popen[str]]()
        self._readers = list[threading.Thread]()
        for number in range(arguments.clients):
            self.start(number)

    def start(self, number: int) -> None:
        self._seed += 1
        process = subprocess.Popen(
            [*self._command, "--seed", str(self._seed)], stdout=subprocess.PIPE, text=True
        )
        self._processes[number] = process
        reader = threading.Thread(target=self._read, args=(process,))
        reader.start()
        self._readers.append(reader)

    def kill(self, number: int) -> None:
        self.counts.died += not killed(self._processes[number])
        self.counts.kills_of_clients += 1

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            # A line that the kill cut off says nothing.
            if line.endswith("\n"):
                self._take(line.split())

    def _take(self, line: list[str]) -> None:
        with self._lock:
            match line:
                case ["get", _, there, wrong]:
                    self.counts.gets += 1
                    self.counts.blocks_got += int(there)
                    self.counts.wrong += int(wrong)
                case ["put", number, blocks, durable]:
                    self.counts.puts += 1
                    self.counts.blocks_put += int(blocks)
                    if int(durable) and int(blocks):
                        self.durable[int(number)] = max(self.durable.get(int(number), 0), int(blocks))
                case ["mismatch", *_]:
                    self.counts.mismatches += 1
                case ["error", code]:
                    self.counts.errors[code] = self.counts.errors.get(code, 0) + 1

    def acknowledged(self) -> dict[int, int]:
        """Of each prompt how many blocks were acknowledged as durable by now."""
        with self._lock:
            return dict(self.durable)

    def end(self) -> None:
        for process in self._processes.values():
            self.counts.died += not killed(process)
        for reader in self._readers:
            reader.join()


class Server:
    """The process of the server, and the most memory and files that it had."""

    def __init__(self, log: Path, arguments: argparse.Namespace) -> None:
        self.log = log
        log_size = 2 * arguments.bytes + (1 << 30)
        self._command = [
            sys.executable, "-m", "kvik.cli", "store", "serve", "--memory", str(arguments.memory),
            "--log", str(log), "--log-size", str(log_size), "--log-level", "error", "--transport", "tcp",
        ]  # fmt: skip
        self.address, self.resident, self.opened, self._first = "127.0.0.1:0", 0, list[float](), 0
        self.start()

    def start(self) -> None:
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*self._command, "--listen", self.address], stdout=subprocess.PIPE, text=True
        )
        ready = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not ready:
            raise RuntimeError(f"the server did not start on {self.address}")
        self.address = ready.split()[-1]
        self.opened.append(time.monotonic() - began)

    def look(self) -> None:
        """Takes down how much memory it has had at most."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                self.resident = max(self.resident, int(line.split()[1]) << 10)

    def files(self) -> int:
        """Files that it has open, without segments of the log: the log has a bound of its own for those."""
        names = [self._target(fd) for fd in Path(f"/proc/{self.process.pid}/fd").iterdir()]
        return sum(1 for name in names if name and str(self.log) not in name)

    def leaked(self, first: int) -> int:
        """Files that are still open when all clients have gone, which it notices in its time."""
        until = time.monotonic() + STARTS
        while (left := self.files() - first - SLABS) > 0 and time.monotonic() < until:
            time.sleep(0.2)
        return max(0, left)

    @staticmethod
    def _target(fd: Path) -> str:
        try:
            return str(fd.readlink())
        except OSError:
            return ""

    def kill(self) -> bool:
        """Whether it still ran."""
        ran = killed(self.process)
        self._gone()
        return ran

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self._gone()

    def _gone(self) -> None:
        self.process.wait(timeout=STARTS)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Checker:
    """Asks a server that was started again for what was acknowledged before."""

    def __init__(self, address: str, prompts: int) -> None:
        self.address, self.prompts = address, prompts

    def lost(self, durable: dict[int, int], counts: Counts) -> None:
        """Counts durable blocks that a server without their memory does not have."""
        with kvik.Engine() as engine:
            client = Client(engine, self.address, self.prompts, 0)
            for number, blocks in durable.items():
                keys = b"".join(client._keys(number)[:blocks])
                counts.durable_asked += blocks
                counts.lost += blocks - sum(client.store.contains(keys))
            # Some of them by their bytes too: all of them would be all of the log.
            for number in random.Random(len(durable)).sample(sorted(durable), min(8, len(durable))):  # noqa: S311
                there, wrong = client.get(number)
                counts.wrong += wrong
                counts.lost += max(0, durable[number] - there)
            del client.bytes


def _turns(arguments: argparse.Namespace, seed: int) -> Iterator[int | None]:
    """When something is killed: the number of a client, or None for the server."""
    choice = random.Random(seed)  # noqa: S311 - a schedule
    until = time.monotonic() + arguments.minutes * 60
    number = 0
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(arguments.every, left))
        number += 1
        # The server is one of those who may be killed, and the second one: so a short run kills it too.
        turn = choice.randrange(arguments.clients + 1)
        yield None if number == 2 or turn == arguments.clients else turn


def soak(arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Everything that the module's text says; its results."""
    prompts = max(1, arguments.bytes // (BLOCK * MOST // 2))
    server = Server(log, arguments)
    first = server.files()
    clients = Clients(arguments, server.address, prompts, arguments.seed)
    checker = Checker(server.address, prompts)
    try:
        for turn in _turns(arguments, arguments.seed):
            server.look()
            if turn is not None:
                clients.kill(turn)
                clients.start(turn)
                continue
            durable = clients.acknowledged()
            clients.counts.died += not server.kill()
            clients.counts.kills_of_the_server += 1
            server.start()
            checker.lost(durable, clients.counts)
        server.look()
    finally:
        clients.end()
    try:
        checker.lost(clients.acknowledged(), clients.counts)
        with kvik.Engine() as engine:
            stat = kvik.Store.connect(
                engine, server.address, NAMESPACE, kvik.Layout(1, RUN, layers=LAYERS)
            ).stat()
        leaked = server.leaked(first)
    finally:
        server.stop()
    foreign = sorted(path.name for path in log.iterdir() if path.suffix != ".kvik" and path.name != "LOCK")
    return vars(clients.counts) | {
        "dropped": stat["dropped"], "corrupt": stat["corrupt"], "resident": server.resident,
        "resident_bound": int(1.05 * arguments.memory) + SLACK, "files_leaked": leaked,
        "files_that_are_no_segments": foreign, "log_bytes": sum(f.stat().st_size for f in log.iterdir()),
        "durable_prompts": len(clients.durable), "slowest_start_s": round(max(server.opened), 2),
        "seed": arguments.seed, "minutes": arguments.minutes,
    }  # fmt: skip


def failures(result: dict[str, Any]) -> list[str]:
    """What does not hold."""
    names = ["wrong", "lost", "died", "mismatches", "dropped", "corrupt", "files_leaked"]
    found = [f"{name}: {result[name]}" for name in names if result[name]]
    if result["resident"] > result["resident_bound"]:
        found.append(f"resident memory {result['resident']} is above {result['resident_bound']}")
    if result["files_that_are_no_segments"]:
        found.append(f"in the log's directory: {result['files_that_are_no_segments']}")
    nothing = [name for name in ("puts", "gets", "blocks_got", "durable_asked") if not result[name]]
    return found + [f"no {name} at all: the run says nothing" for name in nothing]


def _connected(engine: kvik.Engine, arguments: argparse.Namespace) -> Client:
    """A client as soon as the server is there: it may have been killed since this process was started."""
    until = time.monotonic() + STARTS
    while True:
        try:
            return Client(engine, arguments.client, arguments.prompts, arguments.seed)
        except kvik.KvikError:  # whatever the kill has cut off
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _size(text: str) -> int:
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    return int(text[:-3]) * units[text[-3:]] if text[-3:] in units else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=10, help="seconds between kills")
    parser.add_argument("--bytes", type=_size, default=20 << 30, help="bytes of all blocks")
    parser.add_argument("--memory", type=_size, default=1 << 30)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--dir", type=Path, help="where the log is made; default: a temporary directory")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        with kvik.Engine() as engine:
            _connected(engine, arguments).run()
        return
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="kvik-soak-") as folder:
        result = soak(arguments, Path(folder) / "log")
    print(json.dumps(result))
    if found := failures(result):
        sys.exit("; ".join(found))


if __name__ == "__main__":
    main()
