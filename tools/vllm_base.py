#!/usr/bin/env python3
"""Fetch vLLM's own connector base class of each supported release, for the contract tests.

    python tools/vllm_base.py            # all pinned releases; prints the folder of each

pip downloads the pinned source archive (40 to 47 MB) and checks its hash; the files below are kept under
`$XDG_CACHE_HOME/kvik/vllm-base/<version>/` and the archive is dropped. Before pip hands over a source
archive it asks the archive's build backend for metadata, and vLLM's backend would want torch and a compiler
for that; so a stand-in backend answers, which reads the version that the archive states. Nothing of vLLM is
built or run here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# sha256 of the source archives on the Python package index.
PINNED = {
    "0.28.0": "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
    "0.30.0": "5f8f4e890c042ffa1c3e103f81c35e2d96f60a0a175ac43a4adbae7006bef62b",
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
KEPT = (
    f"{V1}/base.py",
    f"{V1}/metrics.py",
    "vllm/distributed/kv_events.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/core/sched/scheduler.py",
    "LICENSE",
)
DOWNLOAD_SECONDS = 600

BACKEND = """
from pathlib import Path

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    stated = [line for line in Path("PKG-INFO").read_text().splitlines() if line.startswith("Version:")][0]
    version = stated.split(":")[1].strip()
    info = Path(directory, f"vllm-{version}.dist-info")
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return info.name
"""


def cache_folder() -> Path:
    """Where the kept files of all releases lie."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "kvik", "vllm-base")


def fetch(version: str) -> Path:
    """Return the folder with the kept files of `version`, downloading them when they are not there yet."""
    folder = cache_folder() / version
    stamp = folder / "archive.sha256"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        # Another run may be at it: what that one makes is taken, and not replaced under its tests.
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = all((folder / kept).is_file() for kept in KEPT)
        if not kept or not stamp.is_file() or stamp.read_text() != PINNED[version]:
            _make(folder, version, stamp.name)
    return folder


def _make(folder: Path, version: str, stamp: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        archive = _download(version, Path(scratch))
        complete = Path(scratch, "complete")
        _extract(archive, f"vllm-{version}", complete)
        (complete / stamp).write_text(PINNED[version])
        shutil.rmtree(folder, ignore_errors=True)
        complete.rename(folder)


def _download(version: str, scratch: Path) -> Path:
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND)
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"vllm=={version} --hash=sha256:{PINNED[version]}\n")
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary=vllm"]
    command += ["--no-build-isolation", "--no-cache-dir", f"--dest={scratch}", f"--requirement={wanted}"]
    environment = os.environ | {"PYTHONPATH": str(backend.parent)}
    subprocess.run(command, env=environment, check=True, timeout=DOWNLOAD_SECONDS)
    archive = scratch / f"vllm-{version}.tar.gz"
    if hashlib.sha256(archive.read_bytes()).hexdigest() != PINNED[version]:
        raise SystemExit(f"{archive.name} is not the pinned archive")
    return archive


def _extract(archive: Path, top: str, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for kept in KEPT:
            source = tar.extractfile(f"{top}/{kept}")
            if source is None:
                raise SystemExit(f"{archive.name} has no file {kept}")
            (target / kept).parent.mkdir(parents=True, exist_ok=True)
            (target / kept).write_bytes(source.read())


def main() -> None:
    """Fetch every pinned release."""
    for version in PINNED:
        print(version, fetch(version))


if __name__ == "__main__":
    main()
