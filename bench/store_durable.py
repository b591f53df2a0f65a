"""Durable puts, and gets from a disk, through a whole store server, beside fio in the same directory.

    python bench/store_durable.py DIR [--rounds 9] [--block 1MiB] [--blocks 512] [--depth 4] [--sync 64MiB]

DIR is on the disk that is measured; a tmpfs says nothing. In each round fio writes a new file and reads it
(O_DIRECT, io_uring; sequential, with a sync after so many bytes), and one client puts as many blocks of the
same size with ``ack="durable"``; then it gets those of the round before, which had to leave the server's
memory, from the disk. The page cache is dropped before, where this process may do that. Block size,
requests at once and bytes between syncs are the same: 4 threads of the server write, and its log syncs
after 64 MiB. Every block that comes back is compared. A first round, in which memory is touched for the
first time, does not count. On a machine that does something else at the same time, run it as ``chrt -r 1
python ...``: that holds for fio, the server and the client, and no other process then comes before them.

Prints a table, and one line of JSON: medians in MiB/s, the ratio of each round, and the slowest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvik

MIB = 1 << 20
LAYERS, TOKENS = 16, 16
LIMIT = 120.0  # seconds for one put or get
Bytes = npt.NDArray[np.uint8]


def _fio(directory: Path, how: str, arguments: argparse.Namespace) -> float:
    """MiB/s of one run of fio over one file, which a write makes anew."""
    file = directory / "fio.dat"
    if how == "write":
        file.unlink(missing_ok=True)
    total = arguments.blocks * arguments.block
    command = [
        "fio", "--name=beside", f"--filename={file}", f"--rw={how}", f"--bs={arguments.block}",
        f"--size={total}", "--ioengine=io_uring", f"--iodepth={arguments.depth}", "--direct=1",
        f"--fdatasync={arguments.sync // arguments.block}" if how == "write" else "--invalidate=1",
        "--end_fsync=1", "--output-format=json",
    ]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(told[told.index("{") :])["jobs"][0]
    return float(job["write" if how == "write" else "read"]["bw_bytes"]) / MIB


class Served:
    """A server with a log, and memory for the blocks of one round."""

    def __init__(self, log: Path, arguments: argparse.Namespace) -> None:
        total = arguments.blocks * arguments.block
        command = [
            sys.executable, "-m", "kvik.cli", "store", "serve", "--listen", "127.0.0.1:0",
            "--log-level", "warning", "--memory", str(total), "--log", str(log),
            "--log-size", str((arguments.rounds + 6) * total),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ready = self.process.stdout.readline() if self.process.stdout is not None else ""
        self.address = ready.split()[-1]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


class Client:
    """An engine with pages to put and to get, each with the bytes of its block."""

    def __init__(self, engine: kvik.Engine, arguments: argparse.Namespace) -> None:
        self.engine, self.blocks = engine, arguments.blocks
        run = arguments.block // LAYERS
        self.layout = kvik.Layout(
            self.blocks, run, page_stride=arguments.block, layers=LAYERS, layer_stride=run
        )
        self.region = engine.allocate(self.layout.nbytes)
        self.bytes: Bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8).reshape(
            self.blocks, arguments.block
        )
        self.namespace = kvik.Namespace(
            model="bench durable", kv_dtype="bfloat16", layers=(0, LAYERS), model_layers=LAYERS,
            heads=(0, 1), model_heads=1, block_tokens=TOKENS,
        )  # fmt: skip

    def _store(self, served: Served) -> kvik.Store:
        return kvik.Store.connect(self.engine, served.address, self.namespace, self.layout)

    def put(self, served: Served, number: int) -> float:
        """Seconds of a durable put of the blocks of a round."""
        store = self._store(served)
        self.bytes[:] = self._content(number)
        keys = self._keys(store, number)
        pages = self.region.pages(self.layout, range(self.blocks))
        began = time.perf_counter()
        stored = store.put(keys, pages, ack="durable", deadline=LIMIT).wait()
        took = time.perf_counter() - began
        if stored.stored != self.blocks:
            raise RuntimeError(f"of {self.blocks} blocks {stored.stored} were stored")
        return took

    def get(self, served: Served, number: int) -> float:
        """MiB/s of a get of what was put in a round, as much of it as is on the disk only."""
        store = self._store(served)
        self.bytes[:] = 0
        keys = self._keys(store, number)
        pages = self.region.pages(self.layout, range(self.blocks))
        before = store.stat()["loaded"]
        began = time.perf_counter()
        there = store.get(keys, pages, deadline=LIMIT).wait()
        took = time.perf_counter() - began
        loaded = store.stat()["loaded"] - before
        if there != self.blocks or loaded < 0.9 * self.blocks:
            raise RuntimeError(f"{there} of {self.blocks} blocks came back, {loaded} of them from the disk")
        if not np.array_equal(self.bytes, self._content(number)):
            raise RuntimeError("what came back is not what was put")
        return float(loaded * self.bytes.shape[1]) / MIB / took

    def _content(self, number: int) -> Bytes:
        content: Bytes = np.random.default_rng(number).integers(0, 256, self.bytes.shape, dtype=np.uint8)
        return content

    def _keys(self, store: kvik.Store, number: int) -> bytes:
        first = number * self.blocks * TOKENS
        return store.keys(range(first, first + self.blocks * TOKENS))


def _drop_page_cache() -> bool:
    """Whether nothing of a file is cached now. Direct reads and writes leave nothing there anyway."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError:
        return False
    return True


def _round(number: int, client: Client, served: Served, arguments: argparse.Namespace) -> dict[str, float]:
    total = arguments.blocks * arguments.block / MIB
    rates = {"fio write": _fio(arguments.dir, "write", arguments)}
    rates["durable put"] = total / client.put(served, number)
    _drop_page_cache()
    rates["fio read"] = _fio(arguments.dir, "read", arguments)
    rates["get from disk"] = client.get(served, number - 1)
    return rates


def _told(rounds: list[dict[str, float]], arguments: argparse.Namespace) -> dict[str, Any]:
    told: dict[str, Any] = {
        "block": arguments.block, "blocks": arguments.blocks, "depth": arguments.depth,
        "sync": arguments.sync, "rounds": len(rounds),
    }  # fmt: skip
    for ours, theirs in (("durable put", "fio write"), ("get from disk", "fio read")):
        ratios = [each[ours] / each[theirs] for each in rounds]
        medians = [round(statistics.median(each[name] for each in rounds)) for name in (ours, theirs)]
        told[ours] = {"mib_s": medians[0], "fio_mib_s": medians[1]}
        told[ours] |= {"ratio": round(statistics.median(ratios), 3), "lowest": round(min(ratios), 3)}
        print(
            f"{ours:14} {medians[0]:6} MiB/s, fio {medians[1]:6} MiB/s, ratio {told[ours]['ratio']:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return told


def _size(text: str) -> int:
    units = {"KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}
    return int(text[:-3]) * units[text[-3:]] if text[-3:] in units else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=_size, default=MIB)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4, help="requests of fio at once")
    parser.add_argument("--sync", type=_size, default=64 * MIB, help="bytes of fio between syncs")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed: it is what the store is compared with")
    log = arguments.dir / "store-log"
    log.mkdir(parents=True)
    rounds = []
    try:
        served = Served(log, arguments)
        try:
            with kvik.Engine() as engine:
                client = Client(engine, arguments)
                client.put(served, 0)
                client.put(served, 1)
                client.get(served, 0)
                for number in range(2, 2 + arguments.rounds):
                    rounds.append(_round(number, client, served, arguments))
                    print(" ".join(f"{name} {rate:.0f}" for name, rate in rounds[-1].items()), flush=True)
                del client.bytes
        finally:
            served.stop()
        print(json.dumps(_told(rounds, arguments)))
    finally:
        shutil.rmtree(log)
        (arguments.dir / "fio.dat").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
