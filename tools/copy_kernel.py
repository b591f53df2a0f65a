"""Makes `copy.ptx` of `copy.cu` in crates/kvik-host/src/cuda: kvik's kernel for GPUs, which drivers compile.

    python -m venv scratch && scratch/bin/pip install nvidia-cuda-nvrtc-cu12==12.9.86
    scratch/bin/python tools/copy_kernel.py

It takes NVIDIA's run-time compiler, of a CUDA that still knows GPUs of 7.0 (12 does), and no GPU. The text is
said to be of the oldest language that has its instructions, so that the oldest driver that kvik takes (470)
compiles it.
"""

import ctypes
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "crates" / "kvik-host" / "src" / "cuda"
SOURCE, IMAGE = FOLDER / "copy.cu", FOLDER / "copy.ptx"
TARGET = "compute_70"
# `shfl.sync` and the target are of this one.
VERSION = ".version 6.0"


def digest() -> str:
    """The source's SHA-256, which the image carries in its first line."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def main() -> int:
    """Compile, and write the image."""
    text, compiler = _compiled(SOURCE.read_bytes())
    text = re.sub(r"^\.version .*$", VERSION, text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^//.*\n", "", text, flags=re.MULTILINE).strip()
    header = f"// copy.cu {digest()}\n// by NVRTC {compiler} for {TARGET}: `python tools/copy_kernel.py`\n"
    IMAGE.write_text(f"{header}\n{text}\n")
    print(f"{IMAGE}: {len(text.splitlines())} lines")
    return 0


def _compiled(source: bytes) -> tuple[str, str]:
    """The PTX, and which version of the compiler made it."""
    library = ctypes.CDLL(str(_library()))
    major, minor, program, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source, b"copy.cu", 0, None, None))
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={TARGET}".encode())
    code = library.nvrtcCompileProgram(program, 1, options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    print(log.value.decode(), file=sys.stderr)
    _check(code)
    _check(library.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(library.nvrtcGetPTX(program, text))
    return text.value.decode(), f"{major.value}.{minor.value}"


def _library() -> Path:
    found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    for folder in (found and found.submodule_search_locations) or ():
        for path in Path(folder, "lib").glob("libnvrtc.so.*"):
            return path
    sys.exit("no NVRTC here: pip install nvidia-cuda-nvrtc-cu12 into the environment that runs this")


def _check(code: int) -> None:
    if code != 0:
        sys.exit(f"NVRTC refuses it: {code}")


if __name__ == "__main__":
    sys.exit(main())
