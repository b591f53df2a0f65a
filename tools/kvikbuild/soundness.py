"""What finds undefined behaviour: Miri, and the compiler's sanitizers. Both take a nightly compiler."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvikbuild.paths import ROOT, TARGET
from kvikbuild.rust import cargo_env, hold_cache
from kvikbuild.stage import Context, StageError

# What is installed where there is no nightly compiler yet.
NIGHTLY = "nightly-2026-10-30"

# Miri has neither sockets nor memory of the kernel's nor other processes, and is some hundred times slower.
# What it can see is what decodes, and, on the heap, where registered memory is touched (memory, runs, sums).
# The protocol has no unsafe code and lets the compiler accept none, so its tests of minutes are not here.
MIRI: Sequence[tuple[str, Sequence[str]]] = (
    # The properties of the arithmetic are checked natively; here one case each would take minutes.
    ("kvik-core", ("--lib", "--", "--skip", "comes_back_random")),
    ("kvik-proto", ("--lib",)),
    ("kvik-host", ("--lib", "--", "runs::", "memory::", "sum::")),
    ("kvik-host", ("--test", "memory", "--", "foreign_memory")),
)

# For both widths of the checksum's vectors: Miri plays a processor with what the compiler may take for given.
MIRI_FLAGS = "-Ctarget-feature=+avx2,+avx512f"

# Crates, and which of their test programs. None: all that do not run under loom, which switches stacks by
# itself; sanitizers take that for an overflow. It runs models of kvik's code, and none of that code.
SANITIZED: Mapping[str, Sequence[str] | None] = {
    "kvik-host": None,
    "kvik-transport": None,
    # Another program there counts the CPU time of the whole process, of which a sanitizer has its own.
    "kvik-engine": ("engine",),
}

# What a sanitizer says that is not so, with the reason. ThreadSanitizer's own syntax.
FALSE_ALARMS = """\
# Tests that wait until a transfer is under way look at the memory that it is writing; nobody else may.
race:engine::common::wait_until
"""

# Tests that a sanitizer cannot run, with the reason.
NOT_SANITIZED: Mapping[str, Sequence[str]] = {
    "address": (
        # It loses memory on purpose, which is what it shows.
        "memory_that_may_still_be_touched",
    ),
    "thread": (
        # It has threads and locks of its own: the child of a process with threads may hang.
        "fork",
        # Reads into the same pages many times at once, which no caller who wants to use them would do.
        "an_engine_that_closes_while_transfers_begin",
        # They bound how long something takes, in a process that is many times as slow here, or have a peer in
        # another process that takes the slow one for dead.
        "a_black_hole_costs_its_attempt",
        "a_grant_whose_second_reader_died",
        "a_peer_that_accepts_and_stays_silent",
        "a_peer_that_was_started_anew",
        "after_its_deadline_a_transfer_from_a_stopped_peer",
        "an_owner_gets_its_pages_back_from_a_stopped_reader",
        "ten_thousand_notifications_of_two_processes",
    ),
}

# Tests at a time. Under ThreadSanitizer an engine is so much slower that beside others, on two cores, its
# peers take it for dead although nothing is measured.
AT_ONCE = {"address": 2, "thread": 1}


def nightly(context: Context, *components: str) -> str | None:
    """The name of a nightly toolchain with these components; None, and a note of it, where there is none.

    KVIK_NIGHTLY names one. Without that an installed one is taken; where there is none, NIGHTLY is installed.
    """
    if shutil.which("rustup") is None:
        context.skips.append((context.name, "rustup, which brings the nightly compiler that this takes"))
        return None
    given = os.environ.get("KVIK_NIGHTLY")
    for name in [given] if given else [NIGHTLY, "nightly"]:
        argv = ["rustup", "component", "list", "--toolchain", name, "--installed"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0 and all(part in done.stdout for part in components):
            return name
    name = given or NIGHTLY
    install = ["rustup", "toolchain", "install", name, "--profile", "minimal"]
    if context.status([*install, *(word for part in components for word in ("-c", part))]) != 0:
        context.skips.append((context.name, f"the toolchain {name!r} with {', '.join(components)}"))
        return None
    return name


def soak_miri(context: Context) -> None:
    """What of the crates needs no kernel, interpreted: no undefined behaviour, no leak."""
    toolchain = nightly(context, "miri", "rust-src")
    if toolchain is None:
        return
    hold_cache(context)
    env = cargo_env(context)
    env["CARGO_TARGET_DIR"] += "/miri"
    # Time may be asked; random tests take a few cases.
    env |= {"MIRIFLAGS": "-Zmiri-disable-isolation", "PROPTEST_CASES": "4", "RUSTFLAGS": MIRI_FLAGS}
    context.run(["cargo", f"+{toolchain}", "miri", "setup"], env)
    passed = sum(
        _tests(context, ["cargo", f"+{toolchain}", "miri", "test", "--locked", "-p", crate, *what], env)
        for crate, what in MIRI
    )
    context.note = f"{passed} tests interpreted, no undefined behaviour and no leak"


def _tests(context: Context, argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run tests; how many passed. None at all is an error: a name that is no more would go unnoticed."""
    log = Path(context.log.name)
    before = log.stat().st_size
    context.run(argv, env)
    with log.open("rb") as file:
        file.seek(before)
        results = re.findall(rb"^test result: ok\. (\d+) passed", file.read(), re.MULTILINE)
    passed = sum(int(count) for count in results)
    if passed == 0:
        raise StageError(f"`{' '.join(argv)}` ran no test; see the lists in tools/kvikbuild/soundness.py")
    return passed


def soak_sanitizers(context: Context) -> None:
    """The crates that touch memory and threads, under AddressSanitizer and ThreadSanitizer.

    KVIK_SANITIZERS names one of them; KVIK_SANITIZED some of the crates.
    """
    toolchain = nightly(context, "rust-src")
    if toolchain is None:
        return
    hold_cache(context)
    sanitizers = os.environ.get("KVIK_SANITIZERS", " ".join(NOT_SANITIZED)).split()
    crates = os.environ.get("KVIK_SANITIZED", " ".join(SANITIZED)).split()
    unknown = sorted({*sanitizers} - {*NOT_SANITIZED} | {*crates} - {*SANITIZED})
    if unknown:
        known = " ".join([*NOT_SANITIZED, *SANITIZED])
        raise StageError(f"no such sanitizer or crate: {' '.join(unknown)}; there are: {known}")
    passed = {
        sanitizer: sum(_sanitized(context, toolchain, sanitizer, crate) for crate in crates)
        for sanitizer in sanitizers
    }
    context.note = ", ".join(f"{sanitizer}: {count} tests" for sanitizer, count in passed.items())


def _sanitized(context: Context, toolchain: str, sanitizer: str, crate: str) -> int:
    """Run a crate's tests with a sanitizer; how many passed."""
    env = cargo_env(context)
    alarms = TARGET / "false-alarms.txt"
    alarms.parent.mkdir(exist_ok=True)
    alarms.write_text(FALSE_ALARMS)
    env |= {
        "CARGO_TARGET_DIR": f"{env['CARGO_TARGET_DIR']}/{sanitizer}",
        # Over 1 GiB each as it is, in a cache that has a limit.
        "CARGO_INCREMENTAL": "0",
        # rustix asks the kernel by itself, which no sanitizer can see: a mapping at an address that was
        # another's before would race with that one, and a message over a socket would order nothing. Through
        # the C library they see all of it.
        "RUSTFLAGS": f"-Zsanitizer={sanitizer} -Cunsafe-allow-abi-mismatch=sanitizer --cfg=rustix_use_libc",
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "TSAN_OPTIONS": f"suppressions={alarms}:second_deadlock_stack=1:halt_on_error=0",
    }
    programs = [word for name in _programs(crate) for word in ("--test", name)]
    argv = ["cargo", f"+{toolchain}", "test", "--locked", "--target", _host(context), "-Zbuild-std"]
    argv += ["-p", crate, "--lib", *programs, "--", f"--test-threads={AT_ONCE[sanitizer]}"]
    return _tests(
        context, [*argv, *(word for name in NOT_SANITIZED[sanitizer] for word in ("--skip", name))], env
    )


def _programs(crate: str) -> Sequence[str]:
    """The names of a crate's test programs that a sanitizer can run."""
    chosen = SANITIZED[crate]
    if chosen is not None:
        return chosen
    files = sorted((ROOT / "crates" / crate / "tests").glob("*.rs"))
    return [file.stem for file in files if "loom::" not in file.read_text()]


def _host(context: Context) -> str:
    for line in context.capture(["rustc", "-vV"]).splitlines():
        if line.startswith("host: "):
            return line.removeprefix("host: ")
    raise StageError("rustc does not say what machine it is for")
