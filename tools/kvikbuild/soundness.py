"""What finds undefined behaviour: Miri, and the compiler's sanitizers. Both take a nightly compiler."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from kvikbuild.paths import ROOT
from kvikbuild.rust import cargo_env, hold_cache
from kvikbuild.stage import Context, StageError

# Miri has no sockets, memory of the kernel's, or other processes, and is some hundred times slower.
MIRI: Sequence[tuple[str, Sequence[str]]] = (
    # The properties of the arithmetic are checked natively; here one case each would take minutes.
    ("kvik-core", ("--lib", "--", "--skip", "comes_back_random")),
    ("kvik-proto", ("--lib",)),
    ("kvik-proto", ("--test", "proto", "--", "transfers::", "sessions::", "endings::")),
    ("kvik-host", ("--lib", "--", "runs::", "span::", "addr::")),
)

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
    """The name of a nightly toolchain with these components; None, and a note of it, where there is none."""
    if shutil.which("rustup") is None:
        context.skips.append((context.name, "rustup, which brings the nightly compiler that this takes"))
        return None
    name = os.environ.get("KVIK_NIGHTLY", "nightly")
    argv = ["rustup", "component", "list", "--toolchain", name, "--installed"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    missing = [part for part in components if part not in done.stdout]
    if done.returncode != 0 or missing:
        argv = ["rustup", "toolchain", "install", name, "--profile", "minimal"]
        if context.status([*argv, *(word for part in components for word in ("-c", part))]) != 0:
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
    env |= {"MIRIFLAGS": "-Zmiri-disable-isolation", "PROPTEST_CASES": "4"}
    context.run(["cargo", f"+{toolchain}", "miri", "setup"], env)
    for crate, what in MIRI:
        context.run(["cargo", f"+{toolchain}", "miri", "test", "--locked", "-p", crate, *what], env)
    context.note = f"{len(MIRI)} groups of tests"


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
