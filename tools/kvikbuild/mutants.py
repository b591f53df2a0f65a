"""Mutants: patches that each break one promise, and the tests that must notice.

A patch lies in `tests/mutants/NAME.patch`. Its first line says what it breaks and which tests must catch it:

    A grant is served after its expiry. Caught by: kvik-proto/proto grants::expiry; python tests/x.py::test_y

A test is `CRATE/TARGET NAME` (a Rust test by its full name; the target `lib` is the crate itself, and
`threads` is built with loom's locks) or `python ID`. Each patch is applied to a copy of the tree, and every
test that it names has to pass before and to fail after it.
"""

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvikbuild import cluster
from kvikbuild.envs import base_env, overlay_env
from kvikbuild.paths import ROOT, VENVS, cache_dir
from kvikbuild.rust import cargo_env, hold_cache, target_dir
from kvikbuild.stage import Context, StageError

PATCHES = ROOT / "tests" / "mutants"
HEAD = re.compile(r"(?P<breaks>.+\.) Caught by: (?P<tests>.+)")
LIMIT = 900  # seconds that one test may take; one that hangs has noticed too
SCHEDULES = "200000"  # of the simulator, as in `make test`: the first that fails ends the run


@dataclass(frozen=True)
class Mutant:
    """A patch, what it breaks, and the tests that must catch it."""

    patch: Path
    breaks: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.patch.stem


def read_mutants() -> list[Mutant]:
    """Every patch of the tree."""
    found = []
    for patch in sorted(PATCHES.glob("*.patch")):
        head = HEAD.fullmatch(patch.read_text().splitlines()[0])
        if head is None:
            raise StageError(f"{patch}: the first line must say `WHAT IT BREAKS. Caught by: TEST; TEST`")
        found.append(Mutant(patch, head["breaks"], tuple(head["tests"].split("; "))))
    return found


def run_mutants(context: Context, only: str = "") -> None:
    """Apply each patch in turn; all of its tests must fail. `only`: parts of the names of those to run."""
    mutants = read_mutants()
    parts = only.split()
    unknown = [part for part in parts if not any(part in mutant.name for mutant in mutants)]
    if unknown:
        raise StageError(f"no mutant's name has {' or '.join(map(repr, unknown))} in it")
    mutants = [mutant for mutant in mutants if not parts or any(part in mutant.name for part in parts)]
    hold_cache(context)
    bench = Bench(context)
    whole = [test for test in sorted({t for m in mutants for t in m.tests}) if bench.fails(test)]
    if whole:
        raise StageError(f"these fail without any mutant: {', '.join(whole)}")
    lines, survived = [], []
    for mutant in mutants:
        begun = time.monotonic()
        with bench.mutated(mutant):
            missed = [test for test in mutant.tests if not bench.fails(test)]
        caught = [test for test in mutant.tests if test not in missed]
        survived += [f"{mutant.name} ({test})" for test in missed]
        seconds = time.monotonic() - begun
        lines.append(f"{mutant.name:<28} {seconds:>7.1f}  {', '.join(caught) or 'SURVIVED'}")
        print(f"    {lines[-1]}", flush=True)
    context.say("\n".join([f"{'mutant':<28} seconds  caught by", *lines]))
    if survived:
        raise StageError(f"not caught: {'; '.join(survived)}")
    context.note = f"{len(mutants)} mutants, every one caught by each of its tests"


class Bench:
    """A copy of the tree, with build output of its own."""

    def __init__(self, context: Context) -> None:
        self.context = context
        target = target_dir(context)
        self.tree = cache_dir() / "mutants" / target.name
        self.tree.mkdir(parents=True, exist_ok=True)
        # Held until the process ends. Two at once would see each other's patches, and call them caught.
        self.lock = self.tree.with_name(f"{target.name}.lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError("another run of mutants uses this checkout's copy: wait for its end") from None
        self.env = {
            **cargo_env(context),
            "CARGO_TARGET_DIR": str(target.with_name(f"{target.name}-mutants")),
            "KVIK_SCHEDULES": SCHEDULES,
            "RUST_BACKTRACE": "0",
        }
        self.built: set[str] = set()
        self.native = False
        self._copy_tree()

    def _copy_tree(self) -> None:
        """Only what differs is written, so that cargo builds only that again."""
        listed = self.context.capture(["git", "ls-files", "-coz", "--exclude-standard"])
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            self._restore(name)
        for old in [path for path in self.tree.rglob("*") if path.is_file()]:
            if str(old.relative_to(self.tree)) not in names:
                old.unlink()

    def _restore(self, name: str) -> None:
        source, copy = ROOT / name, self.tree / name
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            # With a new time: cargo would take an old one for what it has built last.
            shutil.copyfile(source, copy)
            copy.chmod(source.stat().st_mode)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The tree with a patch in it."""
        changed = re.findall(r"^\+\+\+ b/(.+)$", mutant.patch.read_text(), re.MULTILINE)
        try:
            # The copy is no repository, and must not be taken for a part of one around it.
            env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(self.tree.parent)}
            done = subprocess.run(
                ["git", "apply", str(mutant.patch)], cwd=self.tree, env=env, capture_output=True, text=True,
                timeout=60, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise StageError(f"{mutant.name} does not apply any more: {done.stderr.strip()}")
            self.built.clear()
            self.native = any(name.startswith("crates/") for name in changed)
            yield
        finally:
            self.built.clear()
            self.native = False
            for name in changed:
                self._restore(name)

    def fails(self, test: str) -> bool:
        """Whether a test fails. A tree that does not even build is an error: such a mutant shows nothing."""
        where, _, name = test.partition(" ")
        self.context.say(f"---- {test}")
        if where == "python":
            return self._python(name) != 0
        crate, _, target = where.partition("/")
        cargo = [
            "cargo",
            "test",
            "--locked",
            "-p",
            crate,
            *(["--lib"] if target == "lib" else ["--test", target]),
            *(["--features", "loom"] if target == "threads" else []),
        ]
        if where not in self.built:
            if self.context.status([*cargo, "--no-run"], self.env, self.tree) != 0:
                raise StageError(f"{where} does not build")
            self.built.add(where)
        return (
            self.context.status(["timeout", LIMIT, *cargo, "--", "--exact", name], self.env, self.tree) != 0
        )

    def _python(self, name: str) -> int:
        """Run a Python test against the copy's sources, beside the native module of the dev environment; or
        beside the copy's own, where Rust has changed."""
        python = overlay_env(self.context, "dev")
        for native in (VENVS / "dev").glob("lib/python3*/site-packages/kvik/_native*.so"):
            own = self._native(python) if self.native else native
            shutil.copyfile(own, self.tree / "python" / "kvik" / native.name)
        sources = ":".join(str(self.tree / folder) for folder in ("python", "lab", "."))
        env = {"PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1"}
        env |= cluster.on_path(base_env(self.context, cluster.NAME))
        argv = ["timeout", LIMIT, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
        return self.context.status(argv, env, self.tree)

    def _native(self, python: Path) -> Path:
        """The native module of the copy, built."""
        env = {**self.env, "PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": str(python)}
        if self.context.status(["cargo", "build", "--locked", "-p", "kvik-py"], env, self.tree) != 0:
            raise StageError("kvik-py does not build")
        return Path(self.env["CARGO_TARGET_DIR"]) / "debug" / "lib_native.so"
