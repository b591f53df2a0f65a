"""A model's file in the guest, served by NFS over TCP and RDMA, on a disk, and in memory.

    python -S -m tests.rdma.models MODULES BYTES FOLDER

The server is the guest's own kernel, at one end of the cable; its client is at the other end (`ROUTE`), so
that both ways, TCP and soft-RoCE, pass the cable. The disk is ext4 on a loop device over memory.

The mounts of a job end with it, so this one stays, and runs what it finds in a folder that the host shares:
`N.ask` has a command, `N.out` what it wrote, `N.done` its status; `stop` ends all. Runs in the guest, with
nothing but the standard library.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.rdma import nfs
from tests.rdma.devices import LEFT, RIGHT

NAME = "model.safetensors"
MODULES = (*nfs.MODULES, "rpcrdma", "loop", "ext4")
RDMA_PORT = 20049  # RFC 8267
DISK, IMAGE = Path("/run/models.disk"), Path("/run/models.image")
SERVED, ON_DISK = nfs.EXPORT / NAME, DISK / NAME
SERVER = LEFT.v4
MIB = 1 << 20
ROOM = 64  # MiB that a file system has beyond the file
HEADER = 4096  # bytes, of which the first eight say how long the rest is
# A client that was told no address of its own takes that of the other end.
TABLE = "9"
ROUTE = (
    ("rule", "add", "pref", TABLE, "iif", "lo", "to", SERVER, "lookup", TABLE),
    ("route", "add", SERVER, "dev", RIGHT.end, "src", RIGHT.v4, "table", TABLE),
)


def write_model(path: Path, size: int) -> None:
    """A file in the form of safetensors: one tensor, no MiB of which is like another."""
    weights = size - HEADER
    tensor = {"dtype": "BF16", "shape": [weights // 2], "data_offsets": [0, weights]}
    header = json.dumps({"model.weight": tensor}).ljust(HEADER - 8).encode()
    block = bytes(range(256)) * (MIB // 256)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number in range(-(-weights // MIB)):
            part = number.to_bytes(8, "little") * 512 + block
            file.write(part[: min(MIB, weights - number * MIB)])


@contextlib.contextmanager
def served(modules: Path, size: int) -> Iterator[None]:
    """Make the file, and serve it; take away what would stay after the job."""
    mib = -(-size // MIB) + ROOM
    nfs.prepare(modules, mib, MODULES)
    write_model(SERVED, size)
    with IMAGE.open("wb") as image:
        image.truncate(mib * MIB)
    DISK.mkdir(exist_ok=True)
    nfs.run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", IMAGE)
    nfs.run("mount", "-o", "loop", IMAGE, DISK)
    nfs.run("cp", SERVED, ON_DISK)
    for line in ROUTE:
        nfs.run("ip", *line)
    try:
        clients = (RIGHT.v4, LEFT.v4)
        nfs.run("sh", "-ec", f"{nfs.exported(nfs.FLAGS, clients)}\necho tcp 2049 >{nfs.SERVER}/portlist")
        (nfs.SERVER / "threads").write_text(f"{nfs.THREADS}\n")
        (nfs.SERVER / "portlist").write_text(f"rdma {RDMA_PORT}\n")
        (nfs.SERVER / "v4_end_grace").write_text("Y\n")
        yield
    finally:
        (nfs.SERVER / "threads").write_text("0\n")
        for line in ROUTE:
            subprocess.run(["ip", line[0], "del", *line[2:]], check=False, timeout=nfs.LIMIT)
        for folder in (DISK, nfs.EXPORT):
            subprocess.run(["umount", folder], check=False, timeout=nfs.LIMIT)
        IMAGE.unlink(missing_ok=True)


def obey(folder: Path) -> None:
    """Run what is asked for, one after the other, until told to stop."""
    number = 1
    while not (folder / "stop").exists():
        asked = folder / f"{number}.ask"
        if not asked.exists():
            time.sleep(0.02)  # a shared folder tells nobody of a new file
            continue
        command = json.loads(asked.read_text())
        status = answered(command["argv"], command["env"], folder / f"{number}.out")
        write_whole(folder / f"{number}.done", f"{status}\n")
        number += 1


def answered(argv: Sequence[str], env: dict[str, str], out: Path) -> int:
    """Run a command; its status. One of Python's own text runs in a copy of this process, which is there at
    once: to start a program takes the guest seconds."""
    with out.open("wb") as file:
        if tuple(argv[1:3]) != ("-S", "-c"):
            done = subprocess.run(argv, env={**os.environ, **env}, stdout=file, stderr=file, check=False)
            return done.returncode
        child = os.fork()
        if not child:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.environ.update(env)
            os._exit(_interpreted(argv[3], argv[4:]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _interpreted(text: str, arguments: Sequence[str]) -> int:
    """As `python -c` does it; the status."""
    sys.argv = ["-c", *arguments]
    status = 0
    try:
        exec(compile(text, "-c", "exec"), {"__name__": "__main__"})  # noqa: S102 - it is the host's
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def write_whole(path: Path, text: str) -> None:
    """A file that is whole as soon as it is there."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.rename(path)


def main(words: Sequence[str]) -> int:
    """Serve until told to stop."""
    modules, size, folder = words
    with served(Path(modules), int(size)):
        write_whole(Path(folder) / "ready", "")
        obey(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
