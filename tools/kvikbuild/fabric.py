"""A libfabric of the 2.x line, for tests that the operating system's own one may be too old for.

EFA's installer and newer systems bring such a library. Where this system's is older, the source package of a
newer Debian is built in the cache, once, with the providers that need no device, and never installed.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvikbuild.debian import apt_get, install, system
from kvikbuild.envs import locked
from kvikbuild.paths import cache_dir
from kvikbuild.stage import Context, StageError

RECIPE = "1"  # raise it when what is built changes
WANTED = (2, 1)
SUITE = "trixie"  # of Debian: the first one that has it
SONAME = "libfabric.so.1"
# What its build takes beyond the compiler and make, which all stages take.
PROGRAMS = {"autoconf": "autoconf", "automake": "automake", "libtoolize": "libtool", "xz": "xz-utils"}
PROVIDERS = ("tcp", "rxm", "shm")
LEFT_OUT = ("cxi", "dmabuf_peer_mem", "efa", "hook_debug", "hook_hmem", "lnx", "lpp", "monitor", "mrail",
            "opx", "perf", "profile", "psm2", "psm3", "rxd", "sm2", "sockets", "trace", "ucx", "udp", "usnic",
            "verbs")  # fmt: skip


def newer_libfabric(context: Context) -> Path | None:
    """The file of a libfabric that the system has not; None, and a note why, where there is none."""
    if _version(SONAME) >= WANTED:
        context.note = "the system's own is as new: the other stages run over it"
        return None
    folder = cache_dir() / "libfabric" / f"{SUITE}-r{RECIPE}"
    with locked(folder.parent / ".lock"):
        if not folder.exists():
            reason = _unfit() or _make(context, folder)
            if reason is not None:
                context.skips.append((context.name, reason))
                context.note = "skipped"
                return None
            context.note = "kept a libfabric in the cache"
    return folder / "lib" / SONAME


def _make(context: Context, folder: Path) -> str | None:
    """Build it into a folder; why not, if its source, or what builds it, cannot be had."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    # A build that was stopped leaves half a library: it gets its name when it is whole.
    making = folder.with_name(f".making-{folder.name}")
    shutil.rmtree(making, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvik-libfabric-") as scratch:
        try:
            if missing:
                install(context, missing)
            source = _source(context, Path(scratch))
        except StageError as error:
            return f"this system's libfabric is older, and a newer one cannot be had: {error}"
        _build(context, source, making)
    found = _version(str(making / "lib" / SONAME))
    if found < WANTED:
        raise StageError(f"libfabric {found} came of {SUITE}'s source, and {WANTED} was to be built")
    making.rename(folder)
    return None


def _version(file: str) -> tuple[int, int]:
    """Major and minor version of a library; zeros where there is none."""
    try:
        version = int(ctypes.CDLL(file).fi_version())
    except OSError:
        return 0, 0
    return version >> 16, version & 0xFFFF


def _unfit() -> str | None:
    """Why none can be built here, if so."""
    what = f"a libfabric of {'.'.join(map(str, WANTED))} or newer"
    if system() != "debian":
        return f"this system has not {what}, and only Debian's source package is built here"
    if os.geteuid() != 0:
        return f"this system has not {what}, and only root can fetch the source package"
    return None


def _source(context: Context, folder: Path) -> Path:
    """Fetch and unpack the source as its authors gave it out; apt compares checksums. Returns its folder."""
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb-src {_mirror(context)} {SUITE} main\n")
    # Beside what the system knows, whose lists stay as they are.
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": lists,
    }
    options |= {"Dir::Cache::srcpkgcache": "", "Dir::Cache::pkgcache": "", "APT::Sandbox::User": "root"}
    own = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    apt_get(context, *own, "update")
    apt_get(context, *own, "source", "--download-only", "--tar-only", "libfabric", cwd=folder)
    archives = sorted(folder.glob("libfabric_*.orig.tar.*"))
    archives = [archive for archive in archives if archive.suffix != ".asc"]
    if len(archives) != 1:
        raise StageError(
            f"the source package of libfabric has {len(archives)} archives, and one was expected"
        )
    unpacked = folder / "source"
    unpacked.mkdir()
    context.run(["tar", "-xf", archives[0], "-C", unpacked, "--strip-components=1"])
    return unpacked


def _mirror(context: Context) -> str:
    """Where this system has its own packages from: the same place has those of other suites."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    argv = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    context.say(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        match line.split():
            case [uri, release, "main"] if release == codename:
                return uri
    raise StageError(f"apt names no place for the packages of {codename or 'this system'}")


def _build(context: Context, source: Path, folder: Path) -> None:
    """Build it into a folder."""
    context.run(["sh", "autogen.sh"], cwd=source)
    some = [f"--enable-{name}=yes" for name in PROVIDERS] + [f"--enable-{name}=no" for name in LEFT_OUT]
    context.run(["sh", "configure", "--disable-static", f"--prefix={folder}", *some], cwd=source)
    context.run(["make", "-j", str(os.cpu_count() or 1), "install"], cwd=source)
