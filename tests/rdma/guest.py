"""A virtual machine with two soft-RoCE devices, in which programs of this machine run as they are.

The guest sees this machine's files read-only below what it writes itself (virtio-9p and an overlay in its
memory), so no program has to be packed for it. Folders for temporary files are empty there, but for what this
checkout needs of them (`shown`), wherever it lies. Its processor is emulated: it shows that something works,
and never how fast.

    with booted(kernel, folder) as guest:
        result = guest.run(Job("list the devices", ["rdma", "link"]))

There are two devices, `rxe0` and `rxe1`, at the two ends of one cable; `devices` has their addresses.
"""

import contextlib
import os
import selectors
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma import initramfs, shown
from tests.rdma.initramfs import Kernel

QEMU = "qemu-system-x86_64"
LAB = Path("/run/lab")  # where the guest sees the folder that it shares with this machine
MEMORY = 2048  # MiB
# Emulation moves a byte a step where a program says `rep movsb`: a processor that does not call that fast is
# not told to, by the kernel or the C library. Soft-RoCE is half as fast again.
PROCESSOR = "max,-erms,-fsrm"
# The clock is read without the emulated chipset, and nobody has to be kept out of this kernel. Nor is memory
# wiped as it is allocated: soft-RoCE takes 8 KiB a packet, of which a real NIC takes none.
QUICK = "clocksource=tsc tsc=reliable mitigations=off init_on_alloc=0"
# The clock counts instructions, 2^3 ns each: the emulator's other way to run a guest, with one processor.
COUNTED = ("-accel", "tcg,thread=single", "-icount", "shift=3", "-smp", "1")
TIMED = ("-accel", "tcg,thread=multi", "-smp", "2")
BOOT_LIMIT = 180.0  # seconds; it takes about ten, and more beside others
OFF_LIMIT = 10.0  # seconds
# Seconds beyond a job's own limit, within which the guest, which may be busy, says that it has ended it.
GRACE = 60.0
SHOWN = 40  # lines of the console in an error
OUTPUT_LIMIT = 1 << 20  # bytes of a job's output that are kept: the last ones


class GuestError(Exception):
    """The guest did not start, or is no more; the text has the end of its console."""


@dataclass(frozen=True)
class Job:
    """A command for the guest.

    It runs as root, in a PID namespace of its own: whatever it leaves is killed at its end. Files that it
    writes are gone with the guest, except below `LAB`, which is the guest's `folder`.
    """

    name: str
    argv: Sequence[object]
    limit: float = 120.0  # seconds
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/tmp")  # noqa: S108 - the guest's own

    def script(self) -> str:
        """The job for a shell, which stays and so is the first process of the namespace."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        command = shlex.join(str(word) for word in self.argv)
        return "\n".join([f"cd {shlex.quote(str(self.cwd))} || exit", *exports, command, "exit $?\n"])


@dataclass(frozen=True)
class Result:
    """How a job ended: its exit status, the guest's seconds that it took, and all that it wrote."""

    job: Job
    status: int
    seconds: float
    output: str

    @property
    def timed_out(self) -> bool:
        """Whether it was ended for having reached its limit."""
        return self.status != 0 and self.seconds >= self.job.limit

    def checked(self) -> str:
        """The output of a job that has to succeed; `AssertionError` names one that did not, and shows it."""
        why = f"was ended after {self.job.limit:g} s" if self.timed_out else f"ended with {self.status}"
        command = shlex.join(str(word) for word in self.job.argv)
        assert self.status == 0, f"the job `{self.job.name}` {why}: {command}\n{self.output}"
        return self.output


class Guest:
    """A guest that runs. Made by `booted`; jobs run one after the other."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.folder = folder
        self.boot_seconds = 0.0
        self._process = process
        self._heard = b""
        self._jobs = 0

    def run(self, job: Job) -> Result:
        """Run a job to its end, by its limit at the latest; `GuestError` where the guest is no more."""
        self._jobs += 1
        number = self._jobs
        (self.folder / f"{number}.sh").write_text(job.script())
        self._tell(f"{number} {job.limit:g}")
        words = self._hear(f"job `{job.name}`", job.limit + GRACE)
        if words[:2] != ["ended", str(number)] or len(words) != 5:
            raise self.failure(f"job `{job.name}`: the guest said {' '.join(words)!r}")
        status, begun, ended = int(words[2]), float(words[3]), float(words[4])
        with (self.folder / f"{number}.out").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_LIMIT))
            output = file.read().decode(errors="replace")
        return Result(job, status, ended - begun, output)

    def failure(self, what: str) -> GuestError:
        """An error with the end of the console, whose file stays in the guest's folder."""
        console = self.folder / "console.log"
        lines = console.read_text(errors="replace").splitlines() if console.exists() else []
        end = "\n".join(f"    {line}" for line in lines[-SHOWN:]) or "    (nothing)"
        return GuestError(f"{what}\n  the end of the guest's console, {console}:\n{end}")

    def await_ready(self) -> None:
        """Wait until both devices are up; `GuestError` names the step that failed."""
        words = self._hear("boot", BOOT_LIMIT)
        if words[0] != "ready":
            raise self.failure(f"the guest could not be set up: {' '.join(words)}")
        self.boot_seconds = float(words[1])

    def off(self) -> None:
        """Ask the guest to end, and end it."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._tell("off")
                self._process.wait(OFF_LIMIT)
        self.kill()

    def kill(self) -> None:
        """End the emulator by its process id, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _status(self) -> int:
        """The exit status of an emulator that has closed its ends."""
        try:
            return self._process.wait(OFF_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure(f"the guest has ended (status {self._status()})") from None

    def _hear(self, what: str, limit: float) -> list[str]:
        """The words of the next line of the guest's."""
        deadline = time.monotonic() + limit
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise self.failure(f"{what}: the guest said nothing for {limit:g} s, and was killed")
                more = os.read(self._process.stdout.fileno(), 4096)
                if not more:
                    raise self.failure(f"{what}: the guest has ended (status {self._status()})")
                self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        words = line.decode(errors="replace").split()
        if not words or not words[0].startswith("@"):
            raise self.failure(f"{what}: the guest said {line!r}")
        return [words[0].removeprefix("@"), *words[1:]]


@contextlib.contextmanager
def booted(
    kernel: Kernel, folder: Path, limit: float = 600.0, *, counted: bool = False, more: Sequence[Path] = ()
) -> Iterator[Guest]:
    """Boot a guest, for `limit` of its seconds at most, and end it whatever happens.

    `more` are folders that it shows even where it hides what they lie in, beside those of the checkout.
    `folder` is an empty folder. It takes the console's log and the output of each job, and stays. A `counted`
    guest has one processor and a clock of its own, by which each instruction takes as long as any other: what
    else this machine does is not in it. Raises `GuestError` where the guest does not come up.
    """
    packed = initramfs.build(kernel, folder)
    (folder / "shown").write_text(shown.lines([*shown.own_folders(), *more]))
    argv = _command(kernel, packed, folder, limit, COUNTED if counted else TIMED)
    with (folder / "qemu.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    guest = Guest(process, folder)
    try:
        guest.await_ready()
        yield guest
        guest.off()
    finally:
        guest.kill()
        packed.unlink()


def _command(
    kernel: Kernel, packed: Path, folder: Path, limit: float, processors: Sequence[str]
) -> list[str]:
    """The emulator's command line. The first serial port is the console, the second one ours."""
    # It ends with whoever started it, however that ends: one that is left behind would compute for hours.
    argv = ["setpriv", "--pdeathsig", "KILL", QEMU, "-nodefaults", "-display", "none", "-no-reboot"]
    # Not the host's own virtualisation: where it is there at all, it may not work within another one.
    argv += [*processors, "-cpu", PROCESSOR, "-m", str(MEMORY)]
    argv += ["-kernel", str(kernel.image), "-initrd", str(packed)]
    argv += ["-append", f"console=ttyS0 panic=-1 loglevel=5 {QUICK} kvik.limit={int(limit)}"]
    argv += ["-serial", f"file:{_escaped(folder / 'console.log')}", "-serial", "stdio"]
    for tag, path, options in (("host", Path("/"), "readonly=on,multidevs=remap"), ("lab", folder, "")):
        shared = f"local,id={tag},path={_escaped(path)},security_model=none,{options}".rstrip(",")
        argv += ["-fsdev", shared, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return argv


def _escaped(path: Path) -> str:
    """A path within an option of the emulator's, where a comma ends a value."""
    return str(path).replace(",", ",,")
