"""How fast kvik is over verbs beside the tools of perftest: the same devices, messages and depth, in turns.

    cargo build --release -p kvik-engine --example nics
    python -m tests.rdma.rates

A round has a turn of kvik and one of `ib_read_bw` or `ib_write_bw`, each in a job of two processes with a
device each; which one comes first alternates. Both move as many bytes in messages of the same size. kvik's
messages are pages that are no neighbours, walking through buffers of 32 MiB, and every byte is compared
before; the tool moves the same message again and again. The processor is emulated: the ratio says what kvik
adds, and the rates nothing.

The guest's clock counts instructions, of both sides and of the kernel, so a ratio is the same within a few
hundredths each time. By the machine's own clock (`--clock machine`) the same turn takes from once to twice as
long, by what else the machine's owners run and by what lies in its caches: there the tool, which moves one
message at a time through few pages, has an advantage over all that has more under way, which comes of
emulation and of soft-RoCE's copies. A counted guest has one processor. The other has two, and the side that
posts runs on one and the other side on the other, of kvik as of the tool: soft-RoCE sends on the processor
that posts, so packets of a thread that changes processors overtake each other, and the driver takes that for
loss and sends them again.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.faults.tables import print_table
from tests.rdma.devices import LEFT, RIGHT, V4_GID
from tests.rdma.guest import Guest, Job, booted
from tests.rdma.inside import BOOT, add_kernel, kernel_of
from tests.rdma.perftest import bandwidths
from tests.rdma.programs import ROOT, two

KIB, MIB = 1 << 10, 1 << 20
BUFFER = 32  # MiB on either side
OPEN = 2  # transfers of kvik at a time; each moves all pages of a buffer that are no neighbours, half of it
# By clock, the processors of the side that posts and of the other one.
CPUS = {"instructions": (0, 0), "machine": (1, 0)}
LIMIT = 180.0  # seconds of a turn
TOOL_TRIES = 4  # of a turn of the tool
ENOUGH = 0.9  # of the tool's rate


@dataclass(frozen=True)
class Cell:
    """What is compared: a direction, bytes of a message, and the processors of both sides."""

    op: str
    size: int
    cpus: tuple[int, int]

    def kvik(self, program: Path, amount: int, depth: int, verify: str) -> Job:
        """A turn of kvik."""
        count = BUFFER * MIB // 2 // self.size
        options = {
            "nics": f"verbs:{RIGHT.name}",
            "theirs": f"verbs:{LEFT.name}",
            "buffer": BUFFER,
            "depth": depth,
            "verify": verify,
            "op": self.op,
            "size": self.size,
            "count": count,
            "open": OPEN,
            "transfers": amount // (count * self.size),
            "cpu": self.cpus[0],
            "their_cpu": self.cpus[1],
        }
        words = [f"{name}={value}" for name, value in options.items()]
        return Job(f"kvik {self.op} {self.size}", [program, "rate", *words], LIMIT)

    def tool(self, amount: int, depth: int) -> Job:
        """A turn of perftest's tool."""
        name = f"ib_{self.op}_bw"
        common = ["-x", V4_GID, "-s", self.size, "-n", amount // self.size, "-t", depth, "-F"]
        server = ["taskset", "-c", self.cpus[1], name, "-d", LEFT.name, *common]
        client = ["taskset", "-c", self.cpus[0], name, "-d", RIGHT.name, *common, LEFT.v4]
        return two(f"{name} {self.size}", server, client, LIMIT)


def kvik_rate(output: str, amount: int) -> float:
    """MiB/s of a turn of kvik; `AssertionError` where it moved something else."""
    (line,) = [line for line in output.splitlines() if line.startswith("moved ")]
    _, nbytes, seconds = line.split()
    assert int(nbytes) == amount, line
    return amount / MIB / float(seconds)


def tool_rate(output: str, amount: int) -> float:
    """MiB/s of a turn of the tool; `AssertionError` where it moved something else."""
    row = bandwidths(output)[0]  # the client's; the server prints one too
    assert row.size * row.messages == amount, row
    return row.average


def tool_turn(guest: Guest, job: Job, amount: int) -> float:
    """A turn of the tool. It counts cycles of an emulated clock, and sometimes finds none: then once more."""
    for _ in range(TOOL_TRIES):
        if rate := tool_rate(guest.run(job).checked(), amount):
            return rate
    raise AssertionError(f"{job.name} said {TOOL_TRIES} times that it moved nothing in a second")


def measure(guest: Guest, cell: Cell, options: argparse.Namespace) -> list[tuple[float, float]]:
    """kvik's rate and the tool's, in MiB/s, round by round."""
    amount = options.amount * MIB
    rates = []
    for number in range(options.rounds):
        found = {}
        for who in ("kvik", "tool") if number % 2 == 0 else ("tool", "kvik"):
            if who == "kvik":
                job = cell.kvik(options.program, amount, options.depth, options.verify)
                found[who] = kvik_rate(guest.run(job).checked(), amount)
            else:
                found[who] = tool_turn(guest, cell.tool(amount, options.depth), amount)
        print(
            f"{cell.op} {cell.size}: kvik {found['kvik']:.1f}, tool {found['tool']:.1f}",
            file=sys.stderr,
            flush=True,
        )
        rates.append((found["kvik"], found["tool"]))
    return rates


def spread(values: list[float], digits: int) -> str:
    """The median, the lowest and the highest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main(arguments: list[str] | None = None) -> int:
    """Measure; 0 where kvik's rate is at least nine tenths of the tool's in each cell, by the median."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_kernel(parser)
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/examples/nics")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--amount", type=int, default=64, help="MiB of a turn, a multiple of 16")
    parser.add_argument("--depth", type=int, default=64, help="operations under way")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 * KIB, MIB], help="bytes of a message")
    parser.add_argument("--ops", choices=("read", "write"), nargs="+", default=["read", "write"])
    parser.add_argument("--verify", choices=("off", "sample", "full"), default="off")
    parser.add_argument("--clock", choices=sorted(CPUS), default="instructions", help="what time is")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    options = parser.parse_args(arguments)
    if not options.program.exists():
        parser.error(f"{options.program} is not there: cargo build --release -p kvik-engine --example nics")
    kernel = kernel_of(parser, options.kernel)
    rows, good = [], True
    cpus, counted = CPUS[options.clock], options.clock == "instructions"
    with (
        tempfile.TemporaryDirectory(prefix="kvik-guest-") as folder,
        booted(kernel, Path(folder), options.limit + BOOT, counted=counted) as guest,
    ):
        for cell in [Cell(op, size, cpus) for op in options.ops for size in options.sizes]:
            rates = measure(guest, cell, options)
            ratios = [ours / theirs for ours, theirs in rates]
            ours, theirs = ([rate[side] for rate in rates] for side in (0, 1))
            rows.append([cell.op, str(cell.size), spread(ours, 1), spread(theirs, 1), spread(ratios, 3)])
            good &= statistics.median(ratios) >= ENOUGH
    print_table(["", "bytes", "kvik MiB/s", "perftest MiB/s", "ratio"], rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
