"""The wheels: kvik's, and that of its lab.

kvik's is one abi3 file for every Python from 3.11 and every Linux from glibc 2.28 on. It is linked by zig
against the old glibc, so that this machine's newer one does not matter, and compiled for x86-64-v2. The lab's
is Python alone. Each is built again only when its sources or its tools changed.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvikbuild.envs import locked, overlay_env
from kvikbuild.paths import DIST, ROOT, TARGET
from kvikbuild.rust import cargo_env, hold_cache
from kvikbuild.stage import Context, StageError

TRIPLE = "x86_64-unknown-linux-gnu"
PLATFORM = "manylinux_2_28"
RUSTFLAGS = "-Ctarget-cpu=x86-64-v2"
TOOLS = ("LICENSE", "tools/locks/dev.txt", "tools/kvikbuild/wheel.py")


@dataclass(frozen=True)
class Distribution:
    """What a wheel is made from; `name` is that of its file."""

    name: str
    sources: tuple[str, ...]
    build: Callable[[Context], None]

    def ensure(self, context: Context) -> tuple[Path, str]:
        """Its wheel, and what to say of it."""
        mark = DIST / f"{self.name}.inputs.txt"
        inputs = self._inputs(context)
        wheels = self._wheels()
        said = "unchanged"
        if len(wheels) != 1 or not mark.exists() or mark.read_text() != inputs:
            for old in [mark, *wheels]:
                old.unlink(missing_ok=True)
            self.build(context)
            wheels = self._wheels()
            if len(wheels) != 1:
                raise StageError(f"expected one {self.name}-*.whl in dist/, found {len(wheels)}")
            mark.write_text(inputs)
            said = f"{wheels[0].stat().st_size / 1e6:.1f} MB"
        return wheels[0], f"{wheels[0].name}: {said}"

    def _wheels(self) -> list[Path]:
        return list(DIST.glob(f"{self.name}-*.whl"))

    def _inputs(self, context: Context) -> str:
        """A digest of all that it is made from."""
        digest = hashlib.sha256(context.capture(["rustc", "-vV"]).encode())
        what = [*self.sources, *TOOLS]
        listed = context.capture(["git", "ls-files", "-z", "-co", "--exclude-standard", "--", *what])
        for name in sorted(set(listed.split("\0")) - {""}):
            file = ROOT / name
            if file.is_file():
                digest.update(f"{name}\0{file.stat().st_mode & 0o111:o}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()


def ensure_wheels(context: Context) -> list[Path]:
    """The wheels of the sources as they are now: kvik's, then its lab's."""
    DIST.mkdir(exist_ok=True)
    with locked(TARGET / "wheels.lock"):
        made = [distribution.ensure(context) for distribution in DISTRIBUTIONS]
    context.note = "; ".join(said for _wheel, said in made)
    return [wheel for wheel, _said in made]


def _build_lab(context: Context) -> None:
    # In the environment that has the backend: nothing is downloaded.
    python = overlay_env(context, "dev")
    context.run([python, "-m", "hatchling", "build", "-t", "wheel", "-d", DIST], cwd=ROOT / "lab")


def _build_kvik(context: Context) -> None:
    python = overlay_env(context, "dev")
    base = Path((python.parent.parent / "base.txt").read_text())
    hold_cache(context)
    # maturin looks for zig as a module of the Python on the path.
    path = f"{base / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**cargo_env(context), "RUSTFLAGS": RUSTFLAGS, "PATH": path, "VIRTUAL_ENV": str(base)}
    argv = [base / "bin" / "maturin", "build", "--release", "--zig", "--target", TRIPLE,
            "--compatibility", PLATFORM, "--out", DIST]  # fmt: skip
    context.run([*argv, "--locked"], env)


DISTRIBUTIONS = (
    Distribution("kvik", ("Cargo.toml", "Cargo.lock", "crates", "python", "pyproject.toml"), _build_kvik),
    Distribution("kvik_lab", ("lab",), _build_lab),
)
