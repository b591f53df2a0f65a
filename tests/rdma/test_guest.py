"""What a job is given and what comes back, what ends it, and what is said of a guest that fails."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.rdma.conftest import FULL
from tests.rdma.guest import LAB, Guest, GuestError, Job, booted
from tests.rdma.initramfs import Kernel

pytestmark = pytest.mark.timeout(300)


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
    script = (
        f"echo harm >{here}; echo harm >{here.parent}/harm; cat {here.parent}/harm; echo seen >{LAB}/seen"
    )
    assert guest.run(Job("write", ["sh", "-ec", script])).checked() == "harm\n"
    assert here.read_bytes() == before
    assert not here.with_name("harm").exists()
    assert (guest.folder / "seen").read_text() == "seen\n"
    guest.run(Job("undo", ["rm", f"{here.parent}/harm"])).checked()


def test_a_job_ends_by_its_limit_with_all_that_it_started(guest: Guest) -> None:
    """Also what has left its session; the next job finds nothing of it."""
    slow = "setsid sleep 1000 & echo begun; sleep 1000"
    asleep = ["sh", "-c", "grep -l '^sleep' /proc/[0-9]*/cmdline || true"]
    early, late, left = guest.run_all(
        [Job("early", ["sh", "-c", "setsid sleep 1000 & true"]), Job("late", ["sh", "-c", slow], limit=3),
         Job("list", ["unshare", "--mount", *asleep])]
    )  # fmt: skip
    assert early.status == 0
    assert early.seconds < early.job.limit
    assert late.timed_out
    assert late.output.startswith("begun\n")
    with pytest.raises(AssertionError, match="was ended after 3 s"):
        late.checked()
    assert left.checked() == ""


def test_a_guest_that_cannot_be_set_up(kernel: Kernel, tmp_path: Path) -> None:
    """Without the module of the cable: the step and the reason are named, and the console's end is shown."""
    without = tuple(module for module in kernel.modules if module.stem != "veth")
    assert len(without) < len(kernel.modules)
    with pytest.raises(GuestError, match=r"(?s)failed make the cable: .*console\.log:\n.*make the cable"):
        boot(replace(kernel, modules=without), tmp_path)
    assert (tmp_path / "console.log").exists()


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
