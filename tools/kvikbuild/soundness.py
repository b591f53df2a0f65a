"""What finds undefined behaviour: Miri, and the compiler's sanitizers. Both take a nightly compiler."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvikbuild.paths import ROOT
from kvikbuild.rust import cargo_env, hold_cache
from kvikbuild.stage import Context, StageError

# What is installed where there is no nightly compiler yet.
NIGHTLY = "nightly-2026-10-30"

# Miri has neither sockets nor memory of the kernel's nor other processes, and is some hundred times slower.
# What it can see is where registered memory is touched (spans, runs, sums), on the heap, and what decodes. The
# protocol itself has no unsafe code and lets the compiler accept none, so its tests of minutes are not here.
MIRI: Sequence[tuple[str, Sequence[str]]] = (
    # The properties of the arithmetic are checked natively; here one case each would take minutes.
    ("kvik-core", ("--lib", "--", "--skip", "comes_back_random")),
    ("kvik-proto", ("--lib",)),
    ("kvik-host", ("--lib", "--", "runs::", "span::", "sum::")),
    ("kvik-host", ("--test", "memory", "--", "foreign_memory")),
)

# Both widths of the vectors of the checksum; Miri plays a processor with what the compiler may take for given.
MIRI_FLAGS = "-Ctarget-feature=+avx2,+avx512f"

# Crate, what of it, and the sanitizers that it is for.
SANITIZED: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    ("kvik-host", ("--lib", "--tests"), ("address", "thread")),
    ("kvik-transport", ("--lib", "--tests"), ("address", "thread")),
    ("kvik-engine", ("--lib", "--test", "engine"), ("address", "thread")),
)

# What a sanitizer says that is not so, with the reason. ThreadSanitizer's own syntax.
FALSE_ALARMS = """\
# Registered memory changes under whoever reads it, by design: a copy that raced with a writer is thrown
# away after the second look at its generation. Copies go through these functions only.
race:kvik_host::span
race:kvik_host::runs
race:kvik_host::memory
"""

# Tests that a sanitizer cannot run, with the reason.
NOT_SANITIZED = (
    # Both sanitizers have threads and locks of their own: the child of a process with threads may hang.
    "fork",
    # They count descriptors, threads or CPU time of the process, of which a sanitizer has its own.
    "idle",
)


def nightly(context: Context, *components: str) -> str | None:
    """The name of a nightly toolchain with these components; None, and a note of it, where there is none.

    KVIK_NIGHTLY names one. Without that an installed one is taken, and where there is none, NIGHTLY is installed.
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
    sanitizers = os.environ.get("KVIK_SANITIZERS", "address thread").split()
    crates = os.environ.get("KVIK_SANITIZED", "").split() or [crate for crate, _, _ in SANITIZED]
    for crate, what, fitting in SANITIZED:
        for sanitizer in sanitizers:
            if crate in crates and sanitizer in fitting:
                _sanitized(context, toolchain, sanitizer, [crate, *what])
    context.note = " and ".join(sanitizers)


def _sanitized(context: Context, toolchain: str, sanitizer: str, what: Sequence[str]) -> None:
    env = cargo_env(context)
    host = _host(context)
    alarms = ROOT / "target" / "false-alarms.txt"
    alarms.parent.mkdir(exist_ok=True)
    alarms.write_text(FALSE_ALARMS)
    env |= {
        "CARGO_TARGET_DIR": f"{env['CARGO_TARGET_DIR']}/{sanitizer}",
        "RUSTFLAGS": f"-Zsanitizer={sanitizer} -Cunsafe-allow-abi-mismatch=sanitizer",
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "TSAN_OPTIONS": f"suppressions={alarms}:second_deadlock_stack=1:halt_on_error=0",
    }
    argv = ["cargo", f"+{toolchain}", "test", "--locked", "--target", host, "-Zbuild-std", "-p", *what]
    skipped = [word for name in NOT_SANITIZED for word in ("--skip", name)]
    context.run([*argv, "--", "--test-threads=2", *skipped], env)


def _host(context: Context) -> str:
    for line in context.capture(["rustc", "-vV"]).splitlines():
        if line.startswith("host: "):
            return line.removeprefix("host: ")
    raise StageError("rustc does not say what machine it is for")
