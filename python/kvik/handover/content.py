"""Digests of what KV depends on besides tokens: the bytes of weights, of adapters. (Of images: `Items`.)

A name can come to mean something else, so none is trusted. Reading gigabytes takes seconds, in which the
scheduler must not stand still: digests are made on a thread of their own, and until one is there nothing that
depends on it is kept, asked for or handed over. Of weights a handover goes by a sample, which takes less
than starting a server does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

from kvik.handover.items import NoContentError

logger = logging.getLogger("kvik.handover")

# What weights, and the shape of a model or an adapter, are read from; a tokenizer, or a README, changes no
# KV. How images are normalised does, where the model does it and not who prepares its input.
SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
NAMES = frozenset({
    "config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
})  # fmt: skip
MOST_FILES = 4096
# Of a sample: at how many places files are read, and how much there.
SAMPLE_PLACES = 4096
SAMPLE_BYTES = 4096

Signature = tuple[tuple[str, int, int, int, int], ...]


class Digests:
    """Digests by key, each made once, on one thread, and kept until it is forgotten: whoever asks forgets. A
    bound would lose those that were asked for first, of requests whose turn comes next. One that is forgotten
    before its turn is made as well: who makes it remembers what a name stood for (`adapters.py`)."""

    def __init__(self) -> None:
        self._made: dict[Hashable, bytes | NoContentError | None] = {}
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Hashable, Callable[[], bytes]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes | None:
        """The digest of a key; None while it is being made by `make`. Raises NoContentError where it cannot
        be."""
        with self._lock:
            if key not in self._made:
                self._begin(key, make)
            found = self._made.get(key)
        if isinstance(found, NoContentError):
            raise found
        return found

    def forget(self, key: Hashable) -> None:
        """It is not asked for any more."""
        with self._lock:
            self._made.pop(key, None)

    def _begin(self, key: Hashable, make: Callable[[], bytes]) -> None:
        self._waiting.put((key, make))
        self._made[key] = None
        if self._thread is None:
            # A daemon: nobody waits at the end of a process for gigabytes to be read.
            self._thread = threading.Thread(target=self._run, name="kvik-content", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            key, make = self._waiting.get()
            made: bytes | NoContentError
            try:
                made = make()
            except NoContentError as error:
                made = error
            except Exception as error:  # whatever it is, the next one has to be made
                logger.exception("kvik: the digest of %s could not be made", key)
                made = NoContentError(str(error))
            with self._lock:
                if key in self._made:
                    self._made[key] = made


def signature(folder: str | os.PathLike[str]) -> Signature:
    """Which files a folder has that matter, as the file system tells: name, size, inode, and when their bytes
    and they themselves were last changed. Raises NoContentError where there is none, or not a folder."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name not in NAMES and Path(entry.name).suffix not in SUFFIXES:
                    continue
                told = entry.stat()
                if stat.S_ISREG(told.st_mode):
                    found.append((entry.name, told.st_size, told.st_ino, told.st_mtime_ns, told.st_ctime_ns))
                if len(found) > MOST_FILES:
                    raise NoContentError(f"{folder} has more than {MOST_FILES} files")
    except OSError as error:
        raise NoContentError(f"{folder} cannot be read: {error.strerror or error}") from error
    if all(name in NAMES for name, *_ in found):
        raise NoContentError(f"{folder} has no file of weights ({', '.join(sorted(SUFFIXES))})")
    return tuple(sorted(found))


def files_digest(folder: str | os.PathLike[str]) -> bytes:
    """SHA-256 over the names and bytes of the files of a folder that matter: 32 bytes.

    Raises NoContentError where they cannot be read, or changed meanwhile.
    """
    before = signature(folder)
    whole = hashlib.sha256()
    for name, *_ in before:
        try:
            with Path(folder, name).open("rb") as file:
                one = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise NoContentError(f"{Path(folder, name)} cannot be read: {error.strerror or error}") from error
        whole.update(len(name.encode()).to_bytes(8, "little") + name.encode() + one.digest())
    if signature(folder) != before:
        raise NoContentError(f"{folder} was changed while it was read")
    return whole.digest()


def files_sample(model: Path) -> bytes:
    """SHA-256 over the names and sizes of the weights' files of a folder (or of one such file), and over
    their bytes at `SAMPLE_PLACES` places that are spread evenly over all of them: 32 bytes. Weights of
    another training differ there; a change of a few bytes may not be seen.

    Raises NoContentError where they cannot be read.
    """
    if model.is_file():
        folder, files = model.parent, [(model.name, model.stat().st_size)]
    else:
        folder, files = model, [(name, size) for name, size, *_ in signature(model) if name not in NAMES]
    step = max(SAMPLE_BYTES, -(-sum(size for _, size in files) // SAMPLE_PLACES))
    whole = hashlib.sha256()
    for name, size in files:
        whole.update(f"{len(name.encode())} {name} {size} ".encode())
        try:
            with Path(folder, name).open("rb") as file:
                for place in range(0, size, step):
                    whole.update(os.pread(file.fileno(), SAMPLE_BYTES, place))
        except OSError as error:
            raise NoContentError(f"{Path(folder, name)} cannot be read: {error.strerror or error}") from error
    return whole.digest()
