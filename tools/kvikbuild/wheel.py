"""The wheel: one abi3 file for every Python from 3.11 and every Linux from glibc 2.28 on.

It is linked by zig against the old glibc, so that this machine's newer one does not matter, and compiled for
x86-64-v2. It is built again only when the sources or the toolchain changed.
"""

import hashlib
import os
import shutil
from pathlib import Path

from kvikbuild.envs import overlay_env
from kvikbuild.paths import DIST, ROOT
from kvikbuild.rust import cargo_env, hold_cache
from kvikbuild.stage import Context, StageError

TRIPLE = "x86_64-unknown-linux-gnu"
PLATFORM = "manylinux_2_28"
RUSTFLAGS = "-Ctarget-cpu=x86-64-v2"
SOURCES = ("Cargo.toml", "Cargo.lock", "crates", "python", "pyproject.toml", "README.md", "LICENSE",
           "tools/locks/dev.txt", "tools/kvikbuild/wheel.py")  # fmt: skip


def ensure_wheel(context: Context) -> Path:
    """The wheel of the sources as they are now."""
    mark = DIST / "inputs.txt"
    inputs = _inputs(context)
    wheels = list(DIST.glob("kvik-*.whl"))
    if len(wheels) == 1 and mark.exists() and mark.read_text() == inputs:
        context.note = "unchanged"
        return wheels[0]
    shutil.rmtree(DIST, ignore_errors=True)
    _build(context)
    wheels = list(DIST.glob("kvik-*.whl"))
    if len(wheels) != 1:
        raise StageError(f"expected one wheel in dist/, found {len(wheels)}")
    mark.write_text(inputs)
    context.note = f"{wheels[0].name}, {wheels[0].stat().st_size / 1e6:.1f} MB"
    return wheels[0]


def _build(context: Context) -> None:
    python = overlay_env(context, "dev")
    base = Path((python.parent.parent / "base.txt").read_text())
    hold_cache(context)
    # maturin looks for zig as a module of the Python on the path.
    path = f"{base / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**cargo_env(context), "RUSTFLAGS": RUSTFLAGS, "PATH": path, "VIRTUAL_ENV": str(base)}
    argv = [base / "bin" / "maturin", "build", "--release", "--zig", "--target", TRIPLE,
            "--compatibility", PLATFORM, "--out", DIST]  # fmt: skip
    context.run([*argv, "--locked"], env)


def _inputs(context: Context) -> str:
    """A digest of all that the wheel is made from."""
    digest = hashlib.sha256(context.capture(["rustc", "-vV"]).encode())
    listed = context.capture(["git", "ls-files", "-z", "-co", "--exclude-standard", "--", *SOURCES])
    for name in sorted(set(listed.split("\0")) - {""}):
        file = ROOT / name
        if file.is_file():
            digest.update(f"{name}\0{file.stat().st_mode & 0o111:o}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
