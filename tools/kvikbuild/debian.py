"""Packages of the operating system: installed with apt-get when they are missing and this is root on
Debian."""

import ctypes.util
import importlib.util
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvikbuild.paths import ROOT
from kvikbuild.stage import Context, StageError


def system() -> str:
    """Which operating system this is, as it calls itself: `debian`, say."""
    try:
        return platform.freedesktop_os_release().get("ID", "unknown")
    except OSError:
        return "unknown"


def missing_packages() -> list[str]:
    """Debian packages that are needed and are not here, found by what they provide."""
    missing = []
    # openssl makes the certificates of the tests; make and gcc build the stand-ins and plug-ins.
    programs = {"gcc": "gcc", "make": "make", "ld": "binutils", "readelf": "binutils", "openssl": "openssl"}
    if os.geteuid() == 0:
        # For tests between network namespaces, which root makes, for commands in the documentation, and for
        # the queries of the dashboard; etcd for servers of a store that enter themselves there.
        programs |= {"ip": "iproute2", "ss": "iproute2", "curl": "curl", "prometheus": "prometheus"}
        programs["etcd"] = "etcd-server"
        # The lab reaches other hosts over it; its tests have a server each.
        programs |= {"ssh": "openssh-client", "sshd": "openssh-server"}
        # And it asks Slurm for hosts; its tests have one of their own.
        programs |= {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
    for program, package in programs.items():
        if shutil.which(program) is None and package not in missing:
            missing.append(package)
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        missing.append("python3-venv")
    if ctypes.util.find_library("numa") is None and not _loads("libnuma.so.1"):
        missing.append("libnuma1")  # the serving engine's CPU kernels link it
    if not _loads("libfabric.so.1"):
        missing.append("libfabric1")  # loaded at run time; its tests need no NIC
    if not _loads("libibverbs.so.1"):
        missing.append("libibverbs1")  # loaded at run time; some of its tests need no device
    for header, package in (("rdma/fabric.h", "libfabric-dev"), ("infiniband/verbs.h", "libibverbs-dev")):
        if not any(Path(folder, header).is_file() for folder in ("/usr/include", "/usr/local/include")):
            missing.append(package)  # its headers, for the stand-in of the tests
    return missing


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def ensure_packages(context: Context) -> None:
    """Install what is missing, or say what to install where this may not be done."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        names = " ".join(missing)
        raise StageError(f"these packages of the operating system are missing: {names}; please install them")
    install(context, missing)


def ensure_browser(context: Context) -> None:
    """Install chromium, where this may be done; where it may not, what needs it says so."""
    if shutil.which("chromium") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        install(context, ["chromium"])


def install(context: Context, packages: Sequence[str]) -> None:
    """Install packages, as root on Debian."""
    apt_get(context, "update")
    apt_get(context, "install", "-y", "--no-install-recommends", *packages)
    context.note = f"installed {' '.join(packages)}"


def apt_get(context: Context, *arguments: object, cwd: Path = ROOT) -> None:
    """Run apt-get, which tries again where the network fails and waits for others that install."""
    retries = ["-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300"]
    context.run(["apt-get", *retries, *arguments], {"DEBIAN_FRONTEND": "noninteractive"}, cwd)
