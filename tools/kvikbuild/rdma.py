"""What the soft-RoCE laboratory takes: packages of the operating system, and a kernel for its guest.

The kernel is Debian's own for virtual and other machines, unpacked in the cache and never installed. It is
kept there without its compression, which an emulated processor would need ten seconds for at each start.
"""

import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvikbuild.debian import apt_get, install, system
from kvikbuild.envs import locked
from kvikbuild.paths import cache_dir
from kvikbuild.stage import Context, StageError

RECIPE = "1"  # raise it when what is kept of a kernel changes
PACKAGES = ("busybox-static", "cpio", "ibverbs-providers", "ibverbs-utils", "iproute2", "kmod", "perftest",
            "qemu-system-x86")  # fmt: skip
META_PACKAGE = "linux-image-amd64"  # it depends on the kernel of the day

# What the guest loads, with all that they depend on: soft-RoCE and its way to programs, the cable, and this
# machine's files. rxe asks for crc32 by name when a device is made, and knows of no dependency.
MODULES = ("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "veth", "virtio_pci", "9p", "9pnet_virtio",
           "overlay")  # fmt: skip
# Over half of a kernel package, and nothing of it can be in such a guest.
UNUSED = ("sound", "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/staging")


def prepare_guest(context: Context) -> dict[str, str] | None:
    """Variables for the tests that boot a guest; None, and a note of the reason, where there can be none."""
    missing: list[str] = []
    reason = _unfit_system()
    if reason is None:
        missing = _missing_packages()
        if missing and os.geteuid() != 0:
            reason = f"only root can install what it takes: apt-get install {' '.join(missing)}"
    if reason is not None:
        context.skips.append((context.name, reason))
        context.note = "skipped"
        return None
    if missing:
        install(context, missing)
    return {"KVIK_TEST_RDMA_KERNEL": str(_kernel(context))}


def _unfit_system() -> str | None:
    """Why this machine cannot have the guest, if so."""
    if platform.machine() != "x86_64":
        return (
            f"the guest is an x86-64 machine with this machine's programs, and this is {platform.machine()}"
        )
    if system() != "debian":
        return f"the guest's kernel and tools are packages of Debian, and this system is {system()}"
    return None


def _missing_packages() -> list[str]:
    """Those of `PACKAGES` that are not installed."""
    form = "${Package} ${db:Status-Status}\n"
    argv = ["dpkg-query", "--show", f"--showformat={form}", *PACKAGES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    installed = {line.partition(" ")[0] for line in done.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in PACKAGES if package not in installed]


def _kernel(context: Context) -> Path:
    """A folder with `vmlinux`, `lib/modules`, and `modules`, the order in which the guest loads them.

    One that is there is taken as it is; nothing asks whether there is a newer one.
    """
    home = cache_dir() / "rdma"
    with locked(home / ".lock"):
        kept = sorted(home.glob(f"linux-image-*-r{RECIPE}"), key=lambda folder: folder.stat().st_mtime)
        if kept:
            return kept[-1]
        for stale in home.glob(".making-*"):
            shutil.rmtree(stale)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=home))
        making.chmod(0o755)
        package = _download(context, making)
        _unpack(context, making)
        final = home / f"{package}-r{RECIPE}"
        making.rename(final)
    context.note = f"kept {package} in the cache"
    return final


def _download(context: Context, folder: Path) -> str:
    """Put the kernel's package into a folder; returns its name."""
    package = _kernel_package(context)
    if package is None and os.geteuid() == 0:
        apt_get(context, "update")
        package = _kernel_package(context)
    if package is None:
        raise StageError(f"apt knows no kernel that {META_PACKAGE} depends on: run `apt-get update` as root")
    # As root apt would take on another user, who may not write here.
    download = ("-o", "APT::Sandbox::User=root", "download", package)
    try:
        apt_get(context, *download, cwd=folder)
    except StageError:
        if os.geteuid() != 0:
            raise
        apt_get(context, "update")  # the list may be older than what is given out
        package = _kernel_package(context) or package
        apt_get(context, *download[:-1], package, cwd=folder)
    return package


def _kernel_package(context: Context) -> str | None:
    """The exact package of today's kernel, if apt has a list of packages."""
    argv = ["apt-cache", "depends", "--important", META_PACKAGE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    context.say(done.stdout + done.stderr)
    found = re.search(r"Depends: (linux-image-[\w.+-]+)$", done.stdout, re.MULTILINE)
    return found[1] if found else None


def _unpack(context: Context, folder: Path) -> None:
    """Keep of a kernel's package what a guest takes."""
    (package,) = folder.glob("*.deb")
    context.run(["dpkg", "-x", package, folder / "all"])
    package.unlink()
    (image,) = (folder / "all" / "boot").glob("vmlinuz-*")
    version = image.name.removeprefix("vmlinuz-")
    (folder / "vmlinux").write_bytes(_uncompressed(image))
    modules = folder / "lib" / "modules"
    modules.mkdir(parents=True)
    (folder / "all" / "lib" / "modules" / version).rename(modules / version)
    for unused in UNUSED:
        shutil.rmtree(modules / version / "kernel" / unused, ignore_errors=True)
    shutil.rmtree(folder / "all")
    context.run(["/sbin/depmod", "-b", folder, version])
    order = _load_order(context, folder, version)
    (folder / "modules").write_text("".join(f"{path}\n" for path in order))


def _load_order(context: Context, folder: Path, version: str) -> list[Path]:
    """The files of `MODULES` and of what they depend on, each once, relative to the folder."""
    argv = ["/sbin/modprobe", "-d", folder, "-S", version, "--show-depends", "--all", *MODULES]
    lines = [line.split() for line in context.capture(argv).splitlines()]
    files = [Path(words[1]).relative_to(folder) for words in lines if words[:1] == ["insmod"]]
    return list(dict.fromkeys(files))


def _uncompressed(image: Path) -> bytes:
    """The kernel as an ELF file, which lies compressed by xz within the image (the package's own choice)."""
    packed = image.read_bytes()
    at = packed.find(b"\xfd7zXZ\x00")
    try:
        kernel = lzma.LZMADecompressor().decompress(packed[at:]) if at >= 0 else b""
    except lzma.LZMAError:
        kernel = b""
    if not kernel.startswith(b"\x7fELF"):
        raise StageError(
            f"{image.name} is not compressed by xz: see `_uncompressed` in tools/kvikbuild/rdma.py"
        )
    return kernel
