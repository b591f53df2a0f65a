"""Where the facts come from: this machine's `/sys`, `/proc`, `/etc` and `/dev`, or a recording of another's.

All code above reads by absolute Linux paths through `Tree`, so what is found on a recorded machine is found
by the same lines on a live one. Symbolic links are followed inside the tree, never out of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from kvik.doctor import ethtool

FORMAT = "kvik-machine/1"
_TEXT_BYTES = 1 << 20  # of one file; `/proc/self/maps` is the largest that is read
_RECORDING_BYTES = 64 << 20
_LINKS = 40  # as the kernel's own bound
_NAMES = 8192  # in one folder
_ASKED = re.compile(r"/ioctl/ethtool/([^/]+)/(link|module)")
SITE = "/elsewhere/lib/python3/site-packages"
"""Where a recording has the Python packages of the serving engine, wherever they were."""


class Unread(Exception):  # noqa: N818 - the contract of the tree; it is no failure
    """A fact that could not be read: `path`, and `reason` in a few words."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class RecordingError(Exception):
    """A file is not a recorded machine."""


class Tree(ABC):
    """A file tree, read by absolute paths. Every method raises `Unread` where it cannot answer."""

    def __init__(self) -> None:
        self._resolved: dict[str, str] = {"/": "/"}

    @abstractmethod
    def _target(self, path: str) -> str | None:
        """The target of the link at `path`, whose folder is resolved; None where it is no link."""

    @abstractmethod
    def _bytes(self, path: str) -> bytes:
        """The content of a resolved path."""

    @abstractmethod
    def _names(self, path: str) -> list[str]:
        """The names in a resolved folder."""

    def resolve(self, path: str) -> str:
        """`path` without symbolic links. What is not there resolves to itself."""
        try:
            return self._resolve(path, _LINKS)
        except RecursionError:  # A recording may have links to anything.
            raise Unread(path, "too many folders") from None

    def _resolve(self, path: str, links: int) -> str:
        known = self._resolved.get(path)
        if known is not None:
            return known
        folder, _, name = path.rstrip("/").rpartition("/")
        if not path.startswith("/") or name in ("", ".", ".."):
            raise Unread(path, "not a plain absolute path")
        here = f"{self._resolve(folder or '/', links).rstrip('/')}/{name}"
        target = self._target(here)
        if target is not None:
            if links == 0:
                raise Unread(path, "too many links")
            joined = os.path.normpath(target if target[:1] == "/" else f"{here.rpartition('/')[0]}/{target}")
            here = self._resolve("/" + joined.lstrip("/") if joined.strip("/") else "/", links - 1)
        self._resolved[path] = here
        return here

    def sites(self) -> tuple[str, ...]:
        """The folders of the serving engine's Python packages."""
        return (SITE,)

    def blob(self, path: str) -> bytes:
        """The bytes of a file."""
        return self._bytes(self.resolve(path))

    def read(self, path: str) -> str:
        """The text of a file, without white space at its ends."""
        return self.blob(path).decode("utf-8", errors="replace").strip()

    def list(self, path: str) -> list[str]:
        """The names in a folder, sorted."""
        names = sorted(self._names(self.resolve(path)))
        if len(names) > _NAMES:
            raise Unread(path, f"more than {_NAMES} entries")
        return names

    def link(self, path: str) -> str:
        """Where the link at `path` leads to, as an absolute path without links."""
        folder, _, name = path.rpartition("/")
        here = f"{self.resolve(folder or '/').rstrip('/')}/{name}"
        if self._target(here) is None:
            raise Unread(path, "absent")
        return self.resolve(path)


class FolderTree(Tree):
    """A live machine (`/`), or a folder that has its files under the same names."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _target(self, path: str) -> str | None:
        try:
            return str(self._at(path).readlink())
        except OSError:
            return None

    def _bytes(self, path: str) -> bytes:
        try:
            # Never waits: a device or a pipe in a recorded folder is not a fact.
            opened = os.open(self._at(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(opened, "rb") as file:
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    raise Unread(path, "not a file")
                return file.read(_TEXT_BYTES)
        except OSError as error:
            raise Unread(path, _reason(error)) from error

    def _names(self, path: str) -> list[str]:
        try:
            return [entry.name for entry in self._at(path).iterdir()]
        except OSError as error:
            raise Unread(path, _reason(error)) from error


class LiveTree(FolderTree):
    """This machine, as this process sees it. `cables`: whether drivers are asked what is plugged in, which
    takes milliseconds a port."""

    def __init__(self, cables: bool) -> None:
        super().__init__(Path("/"))
        self._cables = cables

    def _bytes(self, path: str) -> bytes:
        asked = _ASKED.fullmatch(path)
        if asked is None:
            return super()._bytes(path)
        if not self._cables:
            raise Unread(path, "not asked for")
        try:
            return {"link": ethtool.link, "module": ethtool.module}[asked[2]](asked[1])
        except OSError as error:
            raise Unread(path, _reason(error)) from error

    def sites(self) -> tuple[str, ...]:
        """Those of this Python: the doctor is to be run by the one that serves."""
        ends = ("/site-packages", "/dist-packages")
        return tuple(dict.fromkeys(path for path in sys.path if path[:1] == "/" and path.endswith(ends)))


class RecordedTree(Tree):
    """A machine that was saved into one document; see `FORMAT`."""

    def __init__(self, document: Any) -> None:
        super().__init__()
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise RecordingError(f'not a recorded machine: it has no "format": "{FORMAT}"')
        self.name = str(document.get("name", "unnamed"))
        self._files = _texts(document, "files")
        self._links = _texts(document, "links")
        self._binary = _texts(document, "binary")
        self._unread = _texts(document, "unread")
        self._folders: dict[str, set[str]] = {}
        for path in (*self._files, *self._links, *self._binary):
            folder, _, name = path.rpartition("/")
            while name:
                names = self._folders.setdefault(folder or "/", set())
                if name in names:
                    break
                names.add(name)
                folder, _, name = folder.rpartition("/")

    def _target(self, path: str) -> str | None:
        return self._links.get(path)

    def _bytes(self, path: str) -> bytes:
        if path in self._files:
            return self._files[path].encode()
        if path in self._binary:
            try:
                return base64.b64decode(self._binary[path], validate=True)
            except (binascii.Error, ValueError) as error:
                raise Unread(path, "not base64 in the recording") from error
        raise Unread(path, self._unread.get(path, "absent"))

    def _names(self, path: str) -> list[str]:
        if path in self._folders:
            return list(self._folders[path])
        raise Unread(path, self._unread.get(path, "absent"))


def _texts(document: dict[str, Any], key: str) -> dict[str, str]:
    found = document.get(key, {})
    if not isinstance(found, dict) or not all(
        isinstance(path, str) and path.startswith("/") and isinstance(value, str)
        for path, value in found.items()
    ):
        raise RecordingError(f'"{key}" of a recorded machine is an object of texts by absolute path')
    try:
        "".join((*found, *found.values())).encode()
    except UnicodeEncodeError as error:  # JSON can hold what no terminal and no file can.
        raise RecordingError(f'"{key}" of a recorded machine has text that is none: {error}') from error
    return found


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "absent"
    if isinstance(error, PermissionError):
        return "not permitted"
    return (error.strerror or str(error)).lower()


def live(cables: bool = True) -> Tree:
    """This machine. `cables`: with what is plugged into its ports."""
    return LiveTree(cables)


def load(path: Path) -> Tree:
    """A recorded machine: a folder with `sys` and `proc` in it, or one JSON file. `RecordingError` where it
    is neither."""
    if path.is_dir():
        if not (path / "sys").is_dir():
            raise RecordingError(f"{path} is not a recorded machine: the folder has no sys")
        return FolderTree(path)
    try:
        if path.stat().st_size > _RECORDING_BYTES:
            raise RecordingError(f"{path} is larger than {_RECORDING_BYTES >> 20} MiB")
        return RecordedTree(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError(f"{path} cannot be read as a recorded machine: {error}") from error
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from error


class RecordingReader(Tree):
    """Reads through another tree, and keeps what was read, for `--save`."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.folders: dict[str, list[str]] = {}

    def sites(self) -> tuple[str, ...]:
        return self._tree.sites()

    def _target(self, path: str) -> str | None:
        target = self._tree._target(path)
        if target is not None:
            self.links[path] = target
        return target

    def _bytes(self, path: str) -> bytes:
        try:
            self.files[path] = self._tree._bytes(path)
        except Unread as error:
            self.unread[path] = error.reason
            raise
        return self.files[path]

    def _names(self, path: str) -> list[str]:
        try:
            self.folders[path] = self._tree._names(path)
        except Unread as error:
            self.unread[path] = error.reason
            raise
        return self.folders[path]
