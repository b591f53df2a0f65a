"""The kernel that kvik carries is made of the source beside it, and says what drivers and GPUs it is for."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "crates" / "kvik-host" / "src" / "cuda"
IMAGE = (FOLDER / "copy.ptx").read_text()


def test_the_image_is_of_this_source() -> None:
    digest = hashlib.sha256((FOLDER / "copy.cu").read_bytes()).hexdigest()
    assert IMAGE.startswith(f"// copy.cu {digest}\n"), "run tools/copy_kernel.py, and gpu-check on a GPU"


def test_the_oldest_drivers_and_gpus_take_it() -> None:
    # A driver takes the languages up to its own: 470 has 7.4. 6.0 is the first that knows the target.
    assert "\n.version 6.0\n.target sm_70\n.address_size 64\n" in IMAGE
    assert IMAGE.count(".entry ") == 1


def test_both_sides_mean_the_same_share() -> None:
    assert "SHARE = 4096," in (FOLDER / "copy.cu").read_text()
    assert "const SHARE: usize = 4096;" in (FOLDER / "kernel.rs").read_text()
    assert "__launch_bounds__(256)" in (FOLDER / "copy.cu").read_text()
    assert "const THREADS: u32 = 256;" in (FOLDER / "kernel.rs").read_text()
