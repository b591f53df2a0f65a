"""What a job is given and what comes back, what ends it, and what is said of a guest that fails."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rdma.conftest import FULL
from tests.rdma.guest import LAB, Guest, GuestError, Job, booted
from tests.rdma.initramfs import Kernel
from tests.rdma.programs import ROOT
from tests.rdma.shown import lines

pytestmark = pytest.mark.timeout(1200)


def test_what_a_job_gets_and_gives(guest: Guest) -> None:
    """Arguments, variables and folder as they are; both outputs, and the exit status."""
    script = 'printf "%s|" "$@" "$COLOUR" "$PWD"; echo bad >&2; exit 7'
    env = {"COLOUR": "red 'and' $blue"}
    words = ["a b", "$HOME", "'"]
    result = guest.run(Job("words", ["sh", "-c", script, "sh", *words], env=env, cwd=Path("/usr")))
    assert result.status == 7
    assert result.output == "a b|$HOME|'|red 'and' $blue|/usr|bad\n"
    assert not result.timed_out
    with pytest.raises(AssertionError, match=r"(?s)the job `words` ended with 7: sh -c.*bad"):
        result.checked()


def test_the_hosts_files_are_safe(guest: Guest) -> None:
    """What a job writes is its own, except in the shared folder."""
    here = Path(__file__)
    before = here.read_bytes()
    script = f"echo harm >{here.name}; echo harm >harm; cat harm; echo seen >{LAB}/seen"
    assert guest.run(Job("write", ["sh", "-ec", script], cwd=here.parent)).checked() == "harm\n"
    assert here.read_bytes() == before
    assert not here.with_name("harm").exists()
    assert (guest.folder / "seen").read_text() == "seen\n"


def test_what_lies_in_a_hidden_folder_and_is_needed(guest: Guest, beside: Path) -> None:
    """A program in the folder for temporary files runs, and writes what stays the guest's; the rest of that
    folder is hidden."""
    script = beside / "a program"
    result = guest.run(Job("beside", [script, "word"], cwd=beside))
    assert result.checked() == f"word in {beside}\n"
    assert [file.name for file in beside.iterdir()] == [script.name]
    assert len(list(beside.parent.iterdir())) == 2
    assert guest.run(Job("others", ["ls", beside.parent])).checked() == f"{beside.name}\n"


def test_which_folders_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lie in hidden ones, each once, under every name; never a hidden one as a whole."""
    hidden, plain = tmp_path / "hidden", tmp_path / "plain"
    monkeypatch.setattr("tests.rdma.shown.HIDDEN", (hidden,))
    for folder in (hidden / "clone" / ".venv", hidden / "other", plain / "clone"):
        folder.mkdir(parents=True)
    (hidden / "link").symlink_to(plain / "clone")
    (plain / "link").symlink_to(hidden / "other")
    shown = lines([
        hidden / "clone", hidden / "clone" / ".venv", hidden / "link", hidden, plain / "clone",
        plain / "link", hidden / "gone",
    ])  # fmt: skip
    assert shown.splitlines() == [
        f"{hidden / 'clone'}\t{hidden / 'clone'}",
        f"{plain / 'clone'}\t{hidden / 'link'}",
        f"{hidden / 'other'}\t{hidden / 'other'}",
    ]


def test_a_job_ends_by_its_limit_with_all_that_it_started(guest: Guest) -> None:
    """Also what has left its session: no process of the guest's is left of it."""
    env = {"LONG": "98765"}  # so that no shell has the number in its own command
    start = "setsid sleep $LONG & "
    # Below the job's own list of processes lies that of the whole guest.
    look = "umount /proc; grep -l '[9]8765' /proc/[0-9]*/cmdline || true"
    seen = guest.run(Job("seen", ["sh", "-c", start + look], env=env))
    # A guest that stood still for the limit has ended what had not begun yet.
    for limit in (3, 30, 120):
        late = guest.run(Job("late", ["sh", "-c", f"{start} echo begun; sleep 1000"], limit=limit, env=env))
        if late.output.startswith("begun\n"):
            break
    left = guest.run(Job("left", ["sh", "-c", look]))
    assert "/cmdline" in seen.checked()
    assert seen.seconds < seen.job.limit
    assert late.timed_out
    assert late.output.startswith("begun\n")
    with pytest.raises(AssertionError, match=f"was ended after {limit} s"):
        late.checked()
    assert left.checked() == ""


def test_a_guest_that_cannot_be_set_up(kernel: Kernel, tmp_path: Path) -> None:
    """Without the module of the cable: the step and the reason are named, and the console's end is shown."""
    without = tuple(module for module in kernel.modules if module.stem != "veth")
    assert len(without) < len(kernel.modules)
    with pytest.raises(GuestError, match=r"(?s)failed make the cable: .*console\.log:\n.*make the cable"):
        boot(replace(kernel, modules=without), tmp_path)
    assert (tmp_path / "console.log").exists()


def test_the_emulator_ends_with_whoever_started_it(kernel: Kernel) -> None:
    """Also with one that was killed, and could end nothing."""
    argv = [sys.executable, "-m", "tests.rdma.inside", "--kernel", str(kernel.image.parent), "true"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as starter:
        try:
            emulator = _child(starter.pid, "qemu-system")
            # Its own handle, with which the end can be waited for.
            handle = os.pidfd_open(emulator)
        finally:
            starter.kill()
        try:
            ended, _, _ = select.select([handle], [], [], 60)
            assert ended, f"process {emulator} runs on"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def _child(parent: int, name: str) -> int:
    """The child of a process whose command begins with a name, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{child}/cmdline").read_text().startswith(name):
                    return int(child)
        time.sleep(0.05)  # the kernel tells nobody that a process has a child
    raise AssertionError(f"process {parent} has started no {name}")


@pytest.mark.skipif(not FULL, reason="FULL is not set")
def test_a_guest_that_dies(kernel: Kernel, tmp_path: Path) -> None:
    """A panic in a job ends the wait for it at once, and is in the error."""
    with booted(kernel, tmp_path) as guest:
        with pytest.raises(GuestError, match=r"(?s)job `panic`: the guest has ended.*Kernel panic"):
            guest.run(Job("panic", ["sh", "-c", "echo c >/proc/sysrq-trigger"]))
        with pytest.raises(GuestError, match="the guest has ended"):
            guest.run(Job("after", ["true"]))


def boot(kernel: Kernel, folder: Path) -> None:
    """Boot a guest and end it."""
    with booted(kernel, folder):
        pass
