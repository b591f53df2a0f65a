"""A command beside a stage: it runs to its end, what it says is kept, its failure is the stage's."""

import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from kvikbuild import stage  # noqa: E402

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stage, "LOGS", tmp_path)
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    return tmp_path


def soon() -> float:
    """What takes only what others leave may get a hundredth of a processor."""
    return time.monotonic() + 150


def test_it_is_waited_for_and_takes_only_what_is_left(logs: Path) -> None:
    """Its policy is that of idle time, and the block's is not changed."""
    show = "import os; print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.environ['COLOUR'])"
    before = os.sched_getscheduler(0)
    with stage.beside("other", [sys.executable, "-c", show], {"COLOUR": "red"}, soon()):
        assert os.sched_getscheduler(0) == before
    assert (logs / "other.log").read_text() == "True red\n"


def test_its_failure_fails_the_stage_with_its_last_lines() -> None:
    """After the block, which has run to its end."""
    ran = []
    said = r"(?s)ended with status 3; other\.log ends with\nwhy it failed"
    with (
        pytest.raises(stage.StageError, match=said),
        stage.beside("other", ["sh", "-c", "echo why it failed; exit 3"], {}, soon()),
    ):
        ran.append(True)
    assert ran


@pytest.mark.parametrize("late", [False, True])
def test_it_is_stopped_where_the_block_fails_or_time_is_over(logs: Path, late: bool) -> None:
    """With all that it started."""
    started = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    pids = []

    def block() -> None:
        pids.append(told(logs / "other.log"))
        if not late:
            raise stage.StageError("the block")

    with (
        pytest.raises(stage.StageError, match="time limit" if late else "the block"),
        stage.beside("other", started, {}, time.monotonic() if late else soon()),
    ):
        block()
    assert gone(pids[0])


def told(log: Path) -> int:
    """The process id that the command says."""
    until = soon()
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.01)  # a file tells nobody that it was written
    return int(log.read_text())


def gone(pid: int) -> bool:
    """Whether a process that was killed is none any more, or only waits to be reaped."""
    until = soon()
    while time.monotonic() < until:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)  # it is not our child
    return False
