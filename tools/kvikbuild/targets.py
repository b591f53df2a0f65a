"""Which stages make up each target, and what each stage does."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial

from kvikbuild import cluster, quick
from kvikbuild.debian import ensure_browser, ensure_packages
from kvikbuild.envs import base_env, install_wheels, overlay_env, uv, uv_env
from kvikbuild.fabric import newer_libfabric
from kvikbuild.fuzz import soak_fuzz
from kvikbuild.mutants import run_mutants
from kvikbuild.paths import DIST, LOCKS, ROOT, TARGET, VENVS
from kvikbuild.rdma import prepare_guest
from kvikbuild.rust import cargo_env, hold_cache, target_dir
from kvikbuild.site import build_site
from kvikbuild.soundness import soak_miri, soak_sanitizers
from kvikbuild.stage import Context, Stage, StageError, beside, run_stages
from kvikbuild.studies import IN_A_GUEST, STUDIES
from kvikbuild.wheel import ensure_wheels


def toolchain(context: Context) -> None:
    """What the operating system has to bring: compiler, cargo, libraries."""
    ensure_packages(context)
    for program in ("cargo", "rustc", "git"):
        if shutil.which(program) is None:
            raise StageError(f"`{program}` is not on the path; please install it")
    rust = context.capture(["rustc", "--version"]).split()[1]
    context.note = context.note or f"python {sys.version.split()[0]}, rust {rust}"


def dev_env(context: Context) -> None:
    """The environment that builds and checks."""
    overlay_env(context, "dev")


def vllm_env(context: Context) -> None:
    """The environment with a real serving engine, and kvik in it."""
    base_env(context, "vllm")
    install_wheels(context, "vllm", ensure_wheels(context))


def lint(context: Context) -> None:
    """Formatting, clippy, ruff, mypy, and what holds crates and packages together."""
    hold_cache(context)
    python = overlay_env(context, "dev")
    env = cargo_env(context)
    context.run(["cargo", "fmt", "--all", "--check"], env)
    context.run(["cargo", "clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"], env)
    context.run([python, "-m", "ruff", "check"])
    context.run([python, "-m", "ruff", "format", "--check"])
    context.run([python, "-m", "mypy"])
    context.run([python, "tools/house.py"])


def rust(context: Context, small: bool = False) -> None:
    """Tests of the Rust crates, and their example; a `small` run is those of `quick`."""
    hold_cache(context)
    env = cargo_env(context)
    if small:
        schedules = {"KVIK_SCHEDULES": quick.SCHEDULES}
        context.run(["cargo", "test", "--locked", *quick.RUST], {**env, **schedules})
        return
    tests = ["cargo", "test", "--locked", "--workspace"]
    context.run([*tests, "--tests", "--no-run"], env)
    # Of all crates at once: cargo would build them again, with the features of one package alone. The other
    # examples are tools that nothing here runs: `lint` checks them, and code of each takes ten seconds.
    context.run(["cargo", "build", "--locked", "--workspace", "--example", "transfer"], env)
    # The simulator computes for minutes and waits for nothing, and the other tests mostly wait: beside them
    # it takes what they leave, and two of them for each processor still leave it most. Their own run of it
    # is one schedule.
    sim = {"KVIK_SCHEDULES": os.environ.get("KVIK_SCHEDULES", quick.ALL_SCHEDULES)}
    waiting = {"KVIK_SCHEDULES": "1", "RUST_TEST_THREADS": str(2 * (os.cpu_count() or 1))}
    with beside("rust-sim", [*tests, "--test", "sim", "--", "--nocapture"], env | sim, context.deadline):
        context.run([*tests, "--tests"], env | waiting)
        context.run([*tests, "--doc"], env | waiting)
        # In place of the protocol's own locks are loom's. With this package alone, two dozen crates below it
        # would be built again, with other features.
        context.run([*tests, "--features", "kvik-proto/loom", "--test", "threads"], env)
    context.run([target_dir(context) / "debug" / "examples" / "transfer"], env)


def wheel(context: Context) -> None:
    """The wheels, installed for the tests."""
    install_wheels(context, "dev", ensure_wheels(context))


def packaging(context: Context) -> None:
    """The wheels as a stranger gets them."""
    _pytest(context, "dev", "tests/packaging", {"KVIK_TEST_UV": str(uv(context)), **uv_env()})


def python(context: Context, small: bool = False) -> None:
    """All tests that need neither a serving engine nor an empty environment; `small` without long ones."""
    context.run([overlay_env(context, "dev"), "tools/vllm_base.py"])
    others = [f"tests/{other}" for other in _OTHER_FOLDERS] + (list(quick.PYTHON) if small else [])
    programs = cluster.on_path(base_env(context, cluster.NAME))
    more = [*_shared("loadfile"), *(f"--ignore={path}" for path in others)]
    _pytest(context, "dev", "tests", programs, more)


def _shared(by: str) -> tuple[str, ...]:
    """Arguments for three processes that share out a stage's tests, by their files or otherwise.

    Most tests wait for what they have started: with two processes two cores are busy for less than half of
    the time. One that a test has ended is not replaced, since the run would wait for it for ever: the others
    do what is left.
    """
    jobs = os.environ.get("JOBS") or "3"
    return ("-n", jobs, "--dist", by, "--max-worker-restart=0") if jobs != "1" else ()


# Tests with stages of their own.
_OTHER_FOLDERS = ("docs", "fabric", "faults", "lab", "netns", "packaging", "rdma", "vllm")


def lab(context: Context) -> None:
    """The lab against known truths: designs, statistics, physics, audits, and reports in a browser."""
    ensure_browser(context)
    # Its files have an order of their own: long ones first.
    more = [*_shared("loadfile"), "--no-loadscope-reorder", "--durations=10"]
    _pytest(context, "dev", "tests/lab", more=more)


def docs(context: Context) -> None:
    """The documentation as a site, its links, and every command in it."""
    site = build_site(context)
    # Nearly all pages are tests of one file: who is through takes over some of another one's.
    more = ["-v", *_shared("worksteal"), "--durations=10"]
    _pytest(context, "dev", "tests/docs", {"KVIK_TEST_SITE": str(site)}, more=more)
    context.note = f"open {site.relative_to(ROOT)}/index.html"


def fabric(context: Context) -> None:
    """A libfabric of the 2.x line, where this system's own one is older."""
    library = newer_libfabric(context)
    if library is None:
        return
    hold_cache(context)
    env = {**cargo_env(context), "KVIK_TEST_LIBFABRIC": str(library)}
    # Not within a test, whose time limit knows of no build.
    context.run(["cargo", "test", "--locked", "--workspace", "--no-run", "--test", "conform"], env)
    _pytest(context, "dev", "tests/fabric", env, more=["-v", "-s"])


def rdma(context: Context) -> None:
    """Two soft-RoCE devices in a small virtual machine, and what runs on them (FULL=1: at length)."""
    variables = prepare_guest(context)
    if variables is None:
        return
    hold_cache(context)
    env = {**cargo_env(context), **variables}
    # Not within a test, whose time limit knows of no build.
    context.run(["cargo", "test", "--locked", "--workspace", "--no-run", *_GUEST_PROGRAMS], env)
    if os.environ.get("FULL"):
        env["KVIK_TEST_FULL"] = "1"
    _pytest(context, "dev", "tests/rdma", env, more=["-v", "-s"])


_GUEST_PROGRAMS = tuple(
    word for name in ("conform", "log", "ports", "store", "verbs") for word in ("--test", name)
)


def soak_faults(context: Context) -> None:
    """The fault lab at length: each of its tools as a table."""
    python = overlay_env(context, "dev")
    failed = []
    for tool in (
        ["lab", "--runs", "600", "--processes", "2"],
        ["late_write", "--runs", "25", "--processes", "2"],
        ["detection", "--kills", "200", "--stops", "200"],
        ["false_deaths", "--minutes", "4", "--peers", "50"],
        ["idle", "--peers", "200"],
    ):
        try:
            context.run([python, "-m", f"tests.faults.{tool[0]}", *tool[1:]])
        except StageError as error:
            failed.append(str(error))
    if failed:
        raise StageError("; ".join(failed))


def soak_lab(context: Context) -> None:
    """A study whose controller is killed at random moments, and resumed (KVIK_TEST_LAB_KILLS: how often)."""
    kills = {"KVIK_TEST_LAB_KILLS": os.environ.get("KVIK_TEST_LAB_KILLS", "20")}
    _pytest(context, "dev", "tests/lab/run", kills, more=["-v", "-s", "-k", "killed"])


def soak_params(context: Context) -> None:
    """Decode servers under whoever sends `kv_transfer_params` (KVIK_TEST_PARAMS: how many, KVIK_SEED)."""
    argv = [overlay_env(context, "vllm"), "-m", "tests.vllm.params"]
    argv += ["--count", os.environ.get("KVIK_TEST_PARAMS", "500")]
    if seed := os.environ.get("KVIK_SEED"):
        argv += ["--seed", seed]
    context.run(argv)


def demo(context: Context, env: str, engine: str) -> None:
    """Engines of this kind and a router, and what passes between them."""
    more = shlex.split(os.environ.get("DEMO", ""))  # such as DEMO="--link-rate 1gbit"
    context.run([overlay_env(context, env), "-m", "kvik.demo", "--engine", engine, *more])


def soak_sim(context: Context) -> None:
    """Many more schedules of the protocol's simulator (KVIK_SCHEDULES, KVIK_SEED: how many, from which)."""
    hold_cache(context)
    schedules = {name: os.environ.get(name, usual) for name, usual in _SOAK_SIM.items()}
    env = {**cargo_env(context), **schedules}
    context.run(["cargo", "test", "--locked", "-p", "kvik-proto", "--test", "sim", "--", "--nocapture"], env)


# Other seeds than those of `make test`.
_SOAK_SIM = {"KVIK_SCHEDULES": "1000000", "KVIK_SEED": "1000000"}


def mutants(context: Context) -> None:
    """Break each promise in a copy of the tree; its tests must notice (MUTANTS="a b": only those)."""
    run_mutants(context, os.environ.get("MUTANTS", ""))


def hostile(context: Context) -> None:
    """Peers that misbehave, for a while each: the victim's memory, and its transfers with an honest peer."""
    context.run([overlay_env(context, "dev"), "-m", "tests.hostile.run", "--full"])


def gpu_check(context: Context) -> None:
    """Every part of kvik's side of this machine's GPUs, byte by byte, and how fast pages come and go."""
    hold_cache(context)
    what = ("-p", "kvik-gpu-check")
    context.run(["cargo", "build", "--locked", "--release", *what], cargo_env(context))
    more = shlex.split(os.environ.get("GPU_CHECK", ""))  # such as GPU_CHECK="--device 0 --rounds 99"
    status = context.status([target_dir(context) / "release" / "kvik-gpu-check", *more])
    if status == _NO_GPU:
        raise StageError("there is no GPU here that could be checked; the line above says why")
    if status != 0:
        raise StageError(f"kvik-gpu-check ended with status {status}")


_NO_GPU = 77


def study(context: Context, which: str = "links") -> None:
    """A ready study, run and reported."""
    env = prepare_guest(context) if which in IN_A_GUEST else {}
    if env is None:
        raise StageError(f"there can be no guest: {context.skips[-1][1]}")
    python, out = overlay_env(context, "dev"), TARGET / context.name
    shutil.rmtree(out, ignore_errors=True)
    STUDIES[which](lambda words, cwd: context.run([python, *words], env, cwd), out)
    context.note = f"open {(out / 'report.html').relative_to(ROOT)}"


def _pytest(
    context: Context, env: str, folder: str, variables: dict[str, str] | None = None, more: Sequence[str] = ()
) -> None:
    python = overlay_env(context, env)
    cache = TARGET / "pytest" / env
    argv = [python, "-m", "pytest", folder, "-o", f"cache_dir={cache}", *more]
    context.run(argv, variables)


def _tests(folder: str, *more: str, env: str = "dev") -> Callable[[Context], None]:
    """A stage that only runs the tests of a folder."""
    return partial(_pytest, env=env, folder=f"tests/{folder}", more=more)


# Over this machine's driver in place of the stand-in; each is listed, and what was skipped once more.
_GPU_TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/python/test_gpu*.py"))
_gpu_tests = partial(
    _pytest, env="dev", folder=_GPU_TESTS[0], variables={"KVIK_TEST_GPU": "1"}, more=[*_GPU_TESTS[1:], "-v"]
)

STAGES = {
    stage.name: stage
    for stage in (
        Stage("toolchain", toolchain, limit=900),
        Stage("dev-env", dev_env, limit=1200),
        Stage("lint", lint),
        Stage("rust", rust, limit=2400),
        Stage("rust-quick", partial(rust, small=True), limit=2400),
        Stage("wheel", wheel, limit=2400),
        Stage("packaging", packaging, limit=1800),
        Stage("python", python, limit=1800),
        Stage("python-quick", partial(python, small=True), limit=600),
        Stage("lab", lab, limit=1800),
        Stage("docs", docs, limit=1800),
        # Two hosts on this one: network namespaces with their own addresses.
        Stage("netns", _tests("netns", "-v"), limit=1800),
        # Processes that are killed, stopped, cut off and lied to: a small share of the fault lab.
        Stage("faults", _tests("faults", "-v", "-s"), limit=2400),
        Stage("fabric", fabric, limit=1800),
        Stage("rdma", rdma, limit=2700),
        Stage("vllm-env", vllm_env, limit=2400),
        # Real serving engines hand KV over.
        Stage("vllm", _tests("vllm", "-v", "--durations=15", env="vllm"), output="both", limit=2700),
        Stage("demo", partial(demo, env="dev", engine="emulator"), output="terminal", limit=300),
        Stage("study", study, output="terminal", limit=900),
        Stage("study-loading", partial(study, which="loading"), output="terminal", limit=2400),
        Stage("study-move", partial(study, which="move"), output="terminal", limit=1200),
        Stage("demo-vllm", partial(demo, env="vllm", engine="vllm"), output="terminal", limit=900),
        Stage("gpu-check", gpu_check, output="both", limit=2400),
        Stage("gpu-tests", _gpu_tests, output="both", limit=1800),
        Stage("mutants", mutants, limit=12 * 3600),
        Stage("soak-sim", soak_sim, output="both", limit=7200),
        Stage("soak-faults", soak_faults, output="both", limit=7200),
        Stage("soak-lab", soak_lab, output="both", limit=3600),
        Stage("soak-params", soak_params, output="both", limit=5400),
        Stage("soak-fuzz", soak_fuzz, limit=24 * 3600),
        Stage("soak-hostile", hostile, output="both", limit=1800),
        Stage("soak-miri", soak_miri, limit=3600),
        Stage("soak-sanitizers", soak_sanitizers, limit=7200),
    )
}

TARGETS = {
    "test": [
        "toolchain",
        "dev-env",
        "lint",
        "rust",
        "wheel",
        "packaging",
        "python",
        "lab",
        "docs",
        "netns",
        "faults",
        "fabric",
        "rdma",
        "vllm-env",
        "vllm",
    ],
    "test-quick": ["toolchain", "dev-env", "lint", "rust-quick", "wheel", "python-quick"],
    "test-rdma": ["toolchain", "dev-env", "wheel", "rdma"],
    # Nothing is built for the tests where there is no GPU: the first stage that asks for one ends the target.
    "gpu-check": ["toolchain", "gpu-check", "dev-env", "wheel", "gpu-tests"],
    "demo": ["toolchain", "dev-env", "wheel", "demo"],
    "study": ["toolchain", "dev-env", "wheel", "study"],
    "study-loading": ["toolchain", "dev-env", "wheel", "study-loading"],
    "study-move": ["toolchain", "dev-env", "wheel", "study-move"],
    "demo-vllm": ["toolchain", "dev-env", "wheel", "vllm-env", "demo-vllm"],
    "wheel": ["toolchain", "dev-env", "wheel", "packaging"],
    "docs": ["toolchain", "dev-env", "wheel", "docs"],
    "lint": ["toolchain", "dev-env", "lint"],
    "mutants": ["toolchain", "dev-env", "wheel", "mutants"],
    "soak": [
        "toolchain",
        "dev-env",
        "soak-sim",
        "wheel",
        "soak-faults",
        "soak-lab",
        "vllm-env",
        "soak-params",
    ],
    "env": ["toolchain", "dev-env", "wheel", "vllm-env"],
    "soak-fuzz": ["toolchain", "soak-fuzz"],
    "soak-hostile": ["toolchain", "dev-env", "wheel", "soak-hostile"],
    "soak-miri": ["toolchain", "soak-miri"],
    "soak-sanitizers": ["toolchain", "soak-sanitizers"],
}


def clean() -> int:
    """Remove what was built in this checkout."""
    for folder in (TARGET, DIST, VENVS):
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def lock(context: Context) -> None:
    """Pin the Python packages again."""
    for name in sorted(path.stem for path in LOCKS.glob("*.in")):
        overrides = LOCKS / f"{name}.overrides"
        argv: list[object] = [uv(context), "pip", "compile", "--quiet", "--upgrade", "--universal"]
        argv += ["--python-version", "3.11", "--generate-hashes", "--no-emit-index-url", "--no-annotate"]
        argv += ["--no-header", *(["--override", overrides] if overrides.exists() else [])]
        context.run([*argv, LOCKS / f"{name}.in", "-o", LOCKS / f"{name}.txt"], uv_env())


def main(arguments: Sequence[str]) -> int:
    """Run a target, or only those of its stages that are named; gives the exit status, 2 for a wrong name."""
    if not arguments:
        print(f"usage: build.py TARGET [STAGE...]; targets: {', '.join([*TARGETS, 'lock', 'clean'])}")
        return 2
    target, *only = arguments
    special: dict[str, Callable[[], int]] = {
        "clean": clean,
        "lock": lambda: run_stages([Stage("lock", lock)]),
    }
    if target in special:
        return special[target]()
    unknown = [name for name in (target, *only) if name not in TARGETS and name not in STAGES]
    if target not in TARGETS or unknown:
        print(f"no such target or stage: {' '.join(unknown or [target])}; stages: {' '.join(STAGES)}")
        return 2
    others = [name for name in only if name not in TARGETS[target]]
    if others:
        print(f"not among the stages of {target}: {' '.join(others)}; it has {' '.join(TARGETS[target])}")
        return 2
    chosen = [STAGES[name] for name in TARGETS[target] if not only or name in only]
    left_out = [
        (name, "not among the chosen stages") for name in TARGETS[target] if only and name not in only
    ]
    if target == "test-quick":
        left_out += quick.LEFT_OUT
    return run_stages(chosen, left_out)
