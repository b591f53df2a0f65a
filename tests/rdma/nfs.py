"""A command beside an NFS server, over which it has a folder: `nfs.py MODULES MOUNT_OPTIONS MIB COMMAND...`.

Makes a file system of so many MiB, has the kernel's own server export it, and mounts it by that server over
the loopback network. The command finds it as TMPDIR, and in variables what stops the server, has it go on, or
has it export for reading only. The exit status is the command's. Runs in the guest, with nothing but the
standard library; no program of an NFS package is needed, since the server's tables are written here.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MODULES = ("nfsd", "nfsv4")
SERVER, TABLES = Path("/proc/fs/nfsd"), Path("/proc/net/rpc")
EXPORT, RECOVERY, MOUNT = Path("/run/nfs.export"), Path("/run/nfs.recovery"), Path("/run/nfs")
FOR_EVER = 2**31 - 1  # when an entry of the server's tables ends
# Of an export: from any port, no check of the folders above, and a number in place of its disk's name.
FLAGS = 0x2 | 0x400 | 0x2000
READ_ONLY = 0x1
NOBODY = 65534
THREADS = 2
LEASE = 10  # seconds, the least that the server takes
LIMIT = 60.0  # seconds of each step


def run(*argv: object) -> None:
    """Run a command that has to succeed."""
    subprocess.run([str(word) for word in argv], check=True, timeout=LIMIT)


def exported(flags: int, clients: Sequence[str] = ("127.0.0.1",)) -> str:
    """A command that has the server export the file system to these addresses."""
    lines = [
        *(("auth.unix.ip", f"nfsd {client} {FOR_EVER} kvik") for client in clients),
        ("nfsd.export", f"kvik {EXPORT} {FOR_EVER} {flags} {NOBODY} {NOBODY} 0"),
        ("nfsd.fh", f"kvik 1 \\x00000000 {FOR_EVER} {EXPORT}"),
    ]
    return " && ".join(f"printf '%s\\n' '{line}' >{TABLES}/{name}/channel" for name, line in lines)


def commands() -> dict[str, str]:
    """What a test may do to the server, for a shell."""
    begin = f"echo tcp 2049 >{SERVER}/portlist && echo {THREADS} >{SERVER}/threads"
    return {
        # It forgets its exports with that.
        "KVIK_DISK_STOPS": f"echo 0 >{SERVER}/threads",
        "KVIK_DISK_GOES_ON": f"{exported(FLAGS)} && {begin}",
        "KVIK_DISK_READ_ONLY": exported(FLAGS | READ_ONLY),
        "KVIK_DISK_WRITABLE": exported(FLAGS),
    }


def prepare(modules: Path, mib: int, names: Sequence[str]) -> None:
    """What the server has before it begins: its modules, an empty file system to export, and settings."""
    run("modprobe", "-d", modules, "-S", os.uname().release, "-a", *names)
    for folder in (EXPORT, MOUNT, RECOVERY):
        folder.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", EXPORT)
    run("mount", "-t", "nfsd", "nfsd", SERVER)
    (SERVER / "threads").write_text("0\n")  # of a job that was ended by its limit
    (SERVER / "nfsv4recoverydir").write_text(f"{RECOVERY}\n")
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        (SERVER / name).write_text(f"{LEASE}\n")
    (SERVER / "versions").write_text("-2 -3 +4 +4.1 +4.2\n")


@contextlib.contextmanager
def served(modules: Path, mib: int) -> Iterator[None]:
    """A server that exports a file system of its own."""
    prepare(modules, mib, MODULES)
    try:
        run("sh", "-ec", commands()["KVIK_DISK_GOES_ON"])
        # Nobody had anything of a server that was never there before.
        (SERVER / "v4_end_grace").write_text("Y\n")
        yield
    finally:
        (SERVER / "threads").write_text("0\n")
        run("umount", EXPORT)


@contextlib.contextmanager
def mounted(options: str) -> Iterator[None]:
    """The file system by way of the server. Not by mount.nfs, which would ask for nothing else."""
    options = f"vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,{options}"
    run("mount", "-i", "-t", "nfs4", "-o", options, "127.0.0.1:/", MOUNT)
    try:
        yield
    finally:
        run("umount", "-f", MOUNT)


def main(words: Sequence[str]) -> int:
    """Serve, mount, and run the command; its status."""
    modules, options, mib, *command = words
    begun = time.monotonic()
    env = {**os.environ, **commands(), "TMPDIR": str(MOUNT), "CARGO_TARGET_TMPDIR": str(MOUNT)}
    with served(Path(modules), int(mib)), mounted(options):
        print(f"served and mounted after {time.monotonic() - begun:.1f} s", flush=True)
        status = subprocess.run(command, env=env, check=False).returncode
        print(f"the command has ended after {time.monotonic() - begun:.1f} s", flush=True)
    print(f"all has ended after {time.monotonic() - begun:.1f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
