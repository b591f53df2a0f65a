"""What the guest boots from: a static busybox, the modules, and `init.sh`."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BUSYBOX = Path("/bin/busybox")  # of the package busybox-static


@dataclass(frozen=True)
class Kernel:
    """A kernel for the guest: the image, and the modules in the order in which they are loaded."""

    image: Path
    modules: tuple[Path, ...]

    @classmethod
    def of(cls, folder: Path) -> "Kernel":
        """The kernel that the stage `rdma` has prepared: `vmlinux`, and `modules`, a list of paths."""
        listed = (folder / "modules").read_text().splitlines()
        return cls(folder / "vmlinux", tuple(folder / line for line in listed))


def build(kernel: Kernel, folder: Path) -> Path:
    """Make the initramfs below a folder; returns its path."""
    tree = folder / "initramfs"
    for name in ("bin", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(BUSYBOX, tree / "bin" / "busybox")
    shutil.copy2(Path(__file__).with_name("init.sh"), tree / "init")
    (tree / "init").chmod(0o755)
    for module in kernel.modules:
        shutil.copy2(module, tree / "modules")
    order = "".join(f"{module.name}\n" for module in kernel.modules)
    (tree / "modules" / "order").write_text(order)
    names = "".join(f"{path.relative_to(tree)}\n" for path in sorted(tree.rglob("*")))
    packed = folder / "initramfs.cpio"
    with packed.open("wb") as out:
        subprocess.run(
            ["cpio", "--create", "--quiet", "--format=newc", "--owner=0:0"],
            input=names.encode(), stdout=out, cwd=tree, check=True, timeout=60,
        )  # fmt: skip
    shutil.rmtree(tree)
    return packed
