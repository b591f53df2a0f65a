"""Which of this machine's folders a guest shows although they lie where it hides everything.

A guest's folders for temporary files are its own and empty. A checkout may lie in one of this machine's, and
so may its Python, what cargo has built, or the cache.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = (Path("/tmp"), Path("/run"), Path("/var/tmp"))  # noqa: S108 - those that init.sh empties


def own_folders() -> list[Path]:
    """What the tests' jobs need: the checkout, Python and its packages, and what cargo has built."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    named = [
        ROOT,
        sys.prefix,
        sys.base_prefix,
        *sys.path,
        os.environ.get("CARGO_TARGET_DIR", ROOT / "target"),
    ]
    return [Path(os.path.abspath(name)) for name in [*named, Path(cache, "kvik")] if name]  # noqa: PTH100


def lines(folders: Iterable[Path]) -> str:
    """For `init.sh`: where each hidden one lies and how it is called, which links make two names."""
    found = sorted(set(_hidden(folders)), key=lambda pair: pair[1].parts)
    kept: list[tuple[Path, Path]] = []
    for source, target in found:
        # What lies in one that is shown is shown with it, unless a link leads elsewhere.
        if not any(target.is_relative_to(t) and source == s / target.relative_to(t) for s, t in kept):
            kept.append((source, target))
    return "".join(f"{source}\t{target}\n" for source, target in kept)


def _hidden(folders: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    for folder in folders:
        real = folder.resolve()
        for name in (folder, real):
            # A folder that is hidden as a whole stays so: it would not be the guest's any more.
            if real.is_dir() and any(name.is_relative_to(h) and name != h for h in _all_hidden()):
                yield real, name


def _all_hidden() -> set[Path]:
    return {name for folder in HIDDEN for name in (folder, folder.resolve())}
