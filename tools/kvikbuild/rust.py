"""Cargo, and the cache of what it builds.

Its output lies outside the checkout, in a folder for each toolchain and checkout: two checkouts may never
share one, because cargo takes a crate of one for the same crate of the other by the times of their files. A
checkout that builds for the first time starts from a copy of what another one has built of third-party
crates. When the cache has grown past a limit, the parts of other checkouts go first, the one that was used
longest ago before the others, unless another build is using the cache. Of this checkout's own part what is
built of kvik goes first: the crates of third parties are most of what a build from nothing takes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvikbuild.paths import ROOT, cache_dir
from kvikbuild.stage import Context

CACHE_LIMIT = 12 << 30  # bytes


def cargo_env(context: Context) -> dict[str, str]:
    """The environment of every cargo call of the build."""
    return {
        "CARGO_TARGET_DIR": str(target_dir(context)),
        "CARGO_NET_RETRY": "8",
        "CARGO_HTTP_TIMEOUT": "120",
        "CARGO_TERM_COLOR": "never",
        # The native module does not link a Python library: the interpreter that loads it has the symbols.
        "PYO3_BUILD_EXTENSION_MODULE": "1",
        "PYO3_PYTHON": sys.executable,
    }


def target_dir(context: Context) -> Path:
    """Where cargo's output is."""
    given = os.environ.get("CARGO_TARGET_DIR")
    if given:
        return Path(given).resolve()
    version = context.capture(["rustc", "-vV"])
    return cache_dir() / "target" / f"{_short(version)}-{_short(str(ROOT))}"


def hold_cache(context: Context) -> None:
    """Make room if the cache is too big, fill a new checkout's part of it, and keep it from being removed for
    as long as this process lives."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    lock = (cache_dir() / "target.lock").open("w")
    if not _held and _try_exclusive(lock):
        own = target_dir(context)
        _make_room(context, own)
        _begin_with_third_parties(context, own)
        if own.is_dir() and own.parent == cache_dir() / "target":
            os.utime(own)  # it is used now; what cargo writes in its folders does not show in this one's time
    fcntl.flock(lock, fcntl.LOCK_SH)
    _held.append(lock)


def _make_room(context: Context, own: Path) -> None:
    """Remove what other checkouts have built, and this one's last, until the cache is below its limit."""
    cache = cache_dir() / "target"
    folders = list(cache.iterdir()) if cache.is_dir() else []
    others = [folder for folder in folders if folder != own]
    others.sort(key=lambda folder: folder.stat().st_mtime)
    steps: list[tuple[Path, Callable[[Path], None], str]] = [(folder, _remove, "") for folder in others]
    if own in folders:
        steps += [(own, _remove_own_crates, "kvik's crates in "), (own, _remove, "")]
    for folder, remove, of_it in steps:
        if _size(cache) <= CACHE_LIMIT:
            return
        what = f"{of_it}{folder.name}"
        context.say(f"the cache of built crates is over {CACHE_LIMIT >> 30} GiB: removing {what}")
        remove(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_own_crates(target: Path) -> None:
    """Remove all but the crates of third parties; cargo builds again what it does not find."""
    for at, folders, files in os.walk(target):
        own = _own_crates(at, [*folders, *files])
        folders[:] = [folder for folder in folders if folder not in own]
        for name in own:
            _remove(Path(at, name))


def _own_crates(at: str, names: list[str]) -> set[str]:
    """Which of these in a folder of cargo's are of kvik's crates: the names of all but programs say so.

    Incremental state and documentation are of these crates only, and so are the programs beside the crates of
    a profile: those of third parties are scripts of their builds, which lie elsewhere.
    """
    folder = Path(at)
    own = {name for name in names if "kvik" in name}
    if (folder / "CACHEDIR.TAG").is_file():  # all of the output
        own.add("doc")
    if (folder / ".fingerprint").is_dir():  # that of a profile
        own.add("incremental")
    if folder.name in ("deps", "examples") and (folder.parent / ".fingerprint").is_dir():
        own |= {name for name in names if "." not in name}
    return own & set(names)


def _begin_with_third_parties(context: Context, target: Path) -> None:
    """Copy what another checkout built with this toolchain, without kvik's own crates."""
    cache = cache_dir() / "target"
    if target.exists() or target.parent != cache:  # beside one that CARGO_TARGET_DIR names lies anything
        return
    others = sorted(
        cache.glob(f"{target.name.partition('-')[0]}-*"), key=lambda folder: folder.stat().st_mtime
    )
    if not others:
        return
    context.say("starting from the third-party crates that another checkout has built")
    making = target.with_name(f".making-{target.name}")
    shutil.rmtree(making, ignore_errors=True)
    # Times are kept: cargo judges by them.
    shutil.copytree(others[-1], making, symlinks=True, ignore=_own_crates)
    making.rename(target)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_held: list[IO[str]] = []


def _try_exclusive(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    done = subprocess.run(
        ["du", "-sk", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    return int(done.stdout.split()[0]) << 10 if done.stdout else 0
