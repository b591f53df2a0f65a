"""Fuzzing with libFuzzer: each target of `fuzz/` for a while, and a table of what came of it."""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from kvikbuild.paths import LOGS, ROOT, TARGET, cache_dir
from kvikbuild.rust import cargo_env, hold_cache
from kvikbuild.stage import Context, StageError

FUZZ = ROOT / "fuzz"
CARGO_FUZZ = "0.13.2"
LONGEST = 4096  # bytes of an input
MOST_MEMORY = 2048  # MiB of a target
SLOWEST = 10  # seconds of one input


@dataclass
class Row:
    """What one target did. Counts are libFuzzer's own."""

    target: str
    executions: int
    seconds: float
    edges: int
    new_edges: int
    found: list[str]


def soak_fuzz(context: Context) -> None:
    """Each fuzz target with a sanitizer, KVIK_FUZZ_SECONDS long; KVIK_FUZZ_TARGETS names some of them."""
    seconds = int(os.environ.get("KVIK_FUZZ_SECONDS", "60"))
    every = re.findall(r'^name = "(\w+)"$', (FUZZ / "Cargo.toml").read_text(), re.MULTILINE)
    chosen = os.environ.get("KVIK_FUZZ_TARGETS", "").split() or every
    unknown = sorted(set(chosen) - set(every))
    if unknown:
        raise StageError(f"no such fuzz target: {' '.join(unknown)}; there are: {' '.join(every)}")
    programs = _build(context)
    rows = [_run(context, programs / target, seconds) for target in chosen]
    table = _table(rows)
    (LOGS / "soak-fuzz.txt").write_text(table)
    context.say(table)
    print(table)
    crashes = [path for row in rows for path in row.found]
    context.note = f"{sum(row.executions for row in rows):,} executions, {len(crashes)} crashes"
    if crashes:
        raise StageError(f"inputs that break a target: {' '.join(crashes)}; see docs/development.md")


def bootstrap() -> dict[str, str]:
    """Lets the installed compiler take flags that are not stable, where it is no nightly."""
    return {"RUSTC_BOOTSTRAP": "1"}


def _build(context: Context) -> Path:
    """The folder of the targets' programs."""
    hold_cache(context)
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise StageError("libFuzzer takes a C++ compiler: install g++ (apt-get install g++)")
    env = cargo_env(context)
    tools = cache_dir() / f"cargo-fuzz-{CARGO_FUZZ}"
    if not (tools / "bin" / "cargo-fuzz").exists():
        argv = ["cargo", "install", "cargo-fuzz", "--locked", "--version", CARGO_FUZZ, "--root", tools]
        # Built below its own root, and not kept: only the program is wanted.
        building = tools / "building"
        context.run(argv, {**env, "CARGO_TARGET_DIR": str(building)})
        shutil.rmtree(building, ignore_errors=True)
    # Other compiler flags than the rest of the build: a folder of its own keeps both.
    target = Path(env["CARGO_TARGET_DIR"]) / "fuzz"
    env |= {"CARGO_TARGET_DIR": str(target), **bootstrap()}
    env["PATH"] = f"{tools / 'bin'}:{os.environ['PATH']}"
    host = next(
        line.removeprefix("host: ")
        for line in context.capture(["rustc", "-vV"]).splitlines()
        if line.startswith("host: ")
    )
    fetch = ["cargo", "fetch", "--locked", "--target", host, "--manifest-path", FUZZ / "Cargo.toml"]
    if context.status(fetch, env) != 0:
        # cargo-fuzz would change the file without a word.
        raise StageError(
            "fuzz/Cargo.lock does not fit the crates, if the network is there: "
            "run `cargo update --workspace --manifest-path fuzz/Cargo.toml`, and commit it"
        )
    context.run(["cargo", "fuzz", "build", "--fuzz-dir", FUZZ, "--target", host], env, cwd=FUZZ)
    return target / host / "release"


def _run(context: Context, program: Path, seconds: int) -> Row:
    target = program.name
    # New inputs are kept between runs, but not in the tree: the committed corpus stays small.
    grown, found = TARGET / "fuzz" / target, TARGET / "fuzz-found" / target
    grown.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    context.say(f"$ {program} ({seconds} s)")
    # What broke it once comes before all else: it breaks it again, or is a seed like others from then on.
    argv: list[object] = [program, grown, found, FUZZ / "corpus" / target]
    argv += [f"-max_total_time={seconds}", f"-max_len={LONGEST}"]
    argv += [f"-rss_limit_mb={MOST_MEMORY}", f"-timeout={SLOWEST}", "-print_final_stats=1"]
    argv += [f"-artifact_prefix={found}/", f"-seed={os.environ.get('KVIK_FUZZ_SEED', '1')}"]
    begun = time.time()
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=FUZZ, capture_output=True, text=True, errors="replace", check=False, timeout=seconds + 300,
    )  # fmt: skip
    text = done.stdout + done.stderr
    (LOGS / f"soak-fuzz-{target}.log").write_text(text)
    edges = [int(count) for count in re.findall(r"^#\d+\s.*?\bcov: (\d+)", text, re.MULTILINE)]
    crashes = []
    if done.returncode != 0:
        context.say(text[-8000:])
        kept = sorted(path for path in found.iterdir() if path.stat().st_mtime >= begun)
        crashes = [str(path.relative_to(ROOT)) for path in kept]
        crashes = crashes or [f"{target} (status {done.returncode}, no input was kept)"]
    executions = re.search(r"stat::number_of_executed_units:\s+(\d+)", text)
    took = re.search(r"Done \d+ runs in (\d+) second", text)
    return Row(
        target,
        int(executions.group(1)) if executions else 0,
        float(took.group(1)) if took else float(seconds),
        max(edges, default=0),
        max(edges, default=0) - (edges[0] if edges else 0),
        crashes,
    )


def _table(rows: list[Row]) -> str:
    lines = [f"{'target':10} {'executions':>12} {'a second':>9} {'edges':>7} {'new':>6} {'crashes':>8}"]
    lines += [
        f"{row.target:10} {row.executions:12,} {row.executions / max(row.seconds, 1):9,.0f} "
        f"{row.edges:7,} {row.new_edges:6,} {len(row.found):8}"
        for row in rows
    ]
    total, crashes = sum(row.executions for row in rows), sum(len(row.found) for row in rows)
    return "\n".join([*lines, f"{'all':10} {total:12,} {'':9} {'':7} {'':6} {crashes:8}"])
