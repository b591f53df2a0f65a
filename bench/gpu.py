"""Pages between two processes where one side, or both, lie on a GPU: kvik's transports, NIXL, and one copy.

    python bench/gpu.py [--mib 256] [--rounds 7] [--pages 4,16,64,256] [--out FILE]

It takes torch with CUDA, and NIXL if it is there. All contenders are up at once and take turns: a round moves
half of the owner's pages, drawn anew, by each. The bytes are compared in the first round and in the last one.
One copy of as many bytes by torch (page-locked where the host has a side) is the limit of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import torch

import kvik

LIMIT_S = 60.0
SEED = 7
SAYS = "owner: "
WAYS = (("gpu", "gpu"), ("gpu", "host"), ("host", "gpu"))
VERIFY: tuple[kvik.VerifyName, ...] = ("full", "off")


def memory(side: str, nbytes: int) -> torch.Tensor:
    """Bytes on either side, zeros: what lies on the host is a program's own, and not page-locked."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if side == "gpu" else "cpu")


@functools.cache
def given(nbytes: int) -> torch.Tensor:
    """The owner's bytes, in every process the same."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))


def nixl() -> Any:
    """NIXL's Python module, if one is installed."""
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{name}._api")
    return None


def say(text: str) -> None:
    """A line to the mover, whatever libraries print."""
    print(f"{SAYS}{text}", flush=True)


def own(role: str, side: str, nbytes: int) -> None:
    """The owner's process: answers requests, a line each, until its input ends."""
    tensor = memory(side, nbytes)
    tensor.copy_(given(nbytes))
    torch.cuda.synchronize()
    if role == "nixl":
        api = nixl()
        agent = api.nixl_agent("owner", api.nixl_agent_config(backends=["UCX"]))
        agent.register_memory(tensor)
        say(json.dumps([agent.get_agent_metadata().hex(), tensor.data_ptr()]))
        sys.stdin.read()
        return
    with kvik.Engine(transport=cast(kvik.TransportName, role)) as engine:
        region = engine.register(tensor)
        say("up")
        for line in sys.stdin:
            page, ids = json.loads(line)
            grant = engine.grant(region.pages(kvik.Layout(nbytes // page, page), ids))
            say(str(grant.ticket))


class Owner:
    """A process that owns pages, for one contender."""

    def __init__(self, role: str, side: str, nbytes: int) -> None:
        argv = [sys.executable, __file__, "--own", role, side, str(nbytes)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.given, self.said = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)

    def line(self) -> str:
        for line in self.said:
            if line.startswith(SAYS):
                return line.removeprefix(SAYS).strip()
        raise SystemExit("an owner's process has ended; its error is above")

    def ask(self, page: int, ids: list[int]) -> str:
        self.given.write(json.dumps([page, ids]) + "\n")
        self.given.flush()
        return self.line()

    def close(self) -> None:
        self.given.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT_S)
        self.process.kill()


Ids = npt.NDArray[np.uint32]
Move = Callable[[Ids], float]


class Kvik:
    """A reader over one transport."""

    def __init__(
        self, stack: contextlib.ExitStack, transport: Any, way: tuple[str, str], nbytes: int
    ) -> None:
        self.owner, self.tensor, self.path = Owner(transport, way[0], nbytes), memory(way[1], nbytes), ""
        stack.callback(self.owner.close)
        self.engine = stack.enter_context(kvik.Engine(transport=transport))
        self.region = self.engine.register(self.tensor)
        self.owner.line()

    def move(self, page: int, verify: kvik.VerifyName) -> Move:
        """Seconds of a read, from the page ids on."""
        layout = kvik.Layout(self.tensor.numel() // page, page)

        def move(ids: Ids) -> float:
            ticket = kvik.Ticket(self.owner.ask(page, ids.tolist()))
            begun = time.perf_counter()
            report = self.engine.read(self.region.pages(layout, ids), ticket, verify=verify).wait(LIMIT_S)
            took = time.perf_counter() - begun
            self.path = f"{report.transport}, {report.mechanism}"
            return took

        return move


class Nixl:
    """A reader of prepared descriptors over UCX, as vLLM's connector for NIXL does it."""

    path = ""

    def __init__(self, stack: contextlib.ExitStack, way: tuple[str, str], nbytes: int) -> None:
        api, self.tensor = nixl(), memory(way[1], nbytes)
        self.owner = Owner("nixl", way[0], nbytes)
        stack.callback(self.owner.close)
        self.agent = api.nixl_agent("mover", api.nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory(self.tensor)
        self.kinds = ["cuda" if side == "gpu" else "cpu" for side in way]
        told, self.base = json.loads(self.owner.line())
        self.remote = self.agent.add_remote_agent(bytes.fromhex(told))

    def move(self, page: int) -> Move:
        """Seconds of a read, from the page ids on."""
        agent, count = self.agent, self.tensor.numel() // page

        def listed(at: int) -> Any:
            starts = at + np.arange(count, dtype=np.int64) * page
            return np.stack([starts, np.full_like(starts, page), np.zeros_like(starts)], axis=1)

        theirs = agent.prep_xfer_dlist(self.remote, listed(self.base), self.kinds[0])
        ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", listed(self.tensor.data_ptr()), self.kinds[1])

        def move(ids: Ids) -> float:
            numbers = ids.astype(np.int32)
            begun = time.perf_counter()
            handle = agent.make_prepped_xfer("READ", ours, numbers, theirs, numbers)
            state = agent.transfer(handle)
            while state == "PROC":
                if time.perf_counter() - begun > LIMIT_S:
                    raise SystemExit(f"NIXL has not ended after {LIMIT_S:g} s")
                state = agent.check_xfer_state(handle)
            took = time.perf_counter() - begun
            if state != "DONE":
                raise SystemExit(f"NIXL says {state}")
            agent.release_xfer_handle(handle)
            return took

        return move


def by_one_copy(way: tuple[str, str], nbytes: int) -> Move:
    """Seconds of one copy of half of the bytes, by torch."""
    source, target = (memory(side, nbytes // 2) for side in way)
    source, target = (t if t.is_cuda else t.pin_memory() for t in (source, target))

    def move(_: Ids) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    return move


def check(tensor: torch.Tensor, page: int, ids: Ids, name: str) -> None:
    """Whether these pages are the owner's; then they are no more."""
    pages = torch.from_numpy(ids.astype(np.int64))
    have, want = (t.cpu().view(-1, page)[pages] for t in (tensor, given(tensor.numel())))
    if not torch.equal(have, want):
        raise SystemExit(f"{name}: bytes are wrong")
    tensor.zero_()
    torch.cuda.synchronize()


Contender = tuple[str, Move, "Kvik | Nixl | None"]


def contenders(
    readers: dict[str, Kvik], other: Nixl | None, page: int, one_copy: Move
) -> Iterator[Contender]:
    """Who takes turns with pages of this size."""
    yield "one copy", one_copy, None
    for name, reader in readers.items():
        for verify in VERIFY:
            yield f"kvik {name}, verify {verify}", reader.move(page, verify), reader
    if other is not None:
        yield "NIXL, UCX", other.move(page), other


def rows(way: tuple[str, str], pages: list[int], nbytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What each contender came to."""
    with contextlib.ExitStack() as stack:
        readers = {transport: Kvik(stack, transport, way, nbytes) for transport in ("local", "tcp")}
        other = Nixl(stack, way, nbytes) if nixl() is not None else None
        for page in pages:
            all_of_them = list(contenders(readers, other, page, by_one_copy(way, nbytes)))
            took: list[list[float]] = [[] for _ in all_of_them]
            for number in range(rounds + 1):
                drawn = np.random.default_rng(number).permutation(nbytes // page)
                ids = drawn[: nbytes // 2 // page].astype(np.uint32)
                for (name, move, reader), seconds in zip(all_of_them, took, strict=True):
                    seconds.append(move(ids))
                    if reader is not None and number in (0, rounds):
                        check(reader.tensor, page, ids, name)
            for (name, _, reader), seconds in zip(all_of_them, took, strict=True):
                # The first round pays for what is made at first use.
                rates = [nbytes / 2 / each / 1e9 for each in seconds[1:]]
                yield {
                    "way": "-".join(way), "page": page, "contender": name, "gbs": statistics.median(rates),
                    "least": min(rates), "most": max(rates), "path": reader.path if reader else "",
                }  # fmt: skip


def main() -> None:
    """Print a table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="moved in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", default="4,16,64,256", help="KiB")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    found, nbytes = [], asked.mib << 21
    print(f"{torch.cuda.get_device_name()}, {asked.mib} MiB a round, medians of {asked.rounds}, seed {SEED}")
    pages = [int(kib) << 10 for kib in asked.pages.split(",")]
    for way in WAYS:
        for row in rows(way, pages, nbytes, asked.rounds):
            if row["contender"] == "one copy":
                print(f"{way[0]} to {way[1]}, pages of {row['page'] >> 10} KiB", flush=True)
            found.append(row)
            text = f"{row['gbs']:8.2f} GB/s ({row['least']:.2f} to {row['most']:.2f})"
            print(f"  {row['contender']:<26}{text}  {row['path']}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--own"]:
        own(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
