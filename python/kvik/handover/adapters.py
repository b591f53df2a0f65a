"""LoRA adapters of requests: by the bytes of their files, while a serving engine knows them by names.

What an engine has loaded is what lay there when an adapter was first used. Files that change later may or may
not have been loaded since, and a name that has stood for two adapters may have KV of both in the engine's own
cache. So this remembers what each adapter's files were, and what each name stood for; where that was not
always the same, nothing that depends on it is kept or handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvik.handover.content import Digests, Signature, files_digest, signature
from kvik.handover.items import NoContentError
from kvik.handover.protocol import RefusedError

MOST_ADAPTERS = 65_536  # remembered by how their files were
MOST_DIGESTS = 1024
PATIENCE_S = 1.0
"""Seconds that a request may be made to wait for the digest of its adapter; from then on it is computed, and
not handed over."""


class Adapters:
    """Adapters by request. digests: makes what takes long; clock: in seconds."""

    def __init__(self, digests: Digests | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._digests = digests or Digests()
        self._clock = clock
        self._arrivals: dict[str, float] = {}
        self._adapters: dict[int, tuple[str, Signature]] = {}
        self._made: dict[tuple[str, Signature], bytes] = {}
        self._names: dict[str, bytes] = {}  # empty: what it stands for is not known (any more)

    def content(self, request: Any) -> bytes | None:
        """The digest of a request's adapter, nothing for none; None while it is being made, since when it was
        first asked for. Raises NoContentError where it cannot be."""
        lora = getattr(request, "lora_request", None)
        if not lora:
            return b""
        if request.request_id not in self._arrivals:
            self._arrivals[request.request_id] = self._clock()
        return self._digests.get(request.request_id, lambda: self._content(lora))

    def settled(self, request: Any) -> bool:
        """Whether a request's adapter is known, or cannot be, or has been waited for long enough."""
        try:
            made = self.content(request)
        except NoContentError:
            return True
        return made is not None or self._clock() - self._arrivals[request.request_id] >= PATIENCE_S

    def told(self, request: Any) -> bytes:
        """What two servers compare of a request's adapter; `RefusedError` where it is not known."""
        try:
            made = self.content(request)
        except NoContentError as error:
            raise RefusedError("adapter_uncertain", str(error)) from error
        if made is None:
            raise RefusedError("adapter_uncertain", "the files of its adapter are not read yet")
        return made

    def certain(self, request: Any) -> None:
        """Raises NoContentError where KV that this server has of a request may be of another adapter of the
        same name."""
        lora = getattr(request, "lora_request", None)
        if lora and self._names.get(str(lora.lora_name)) == b"":
            raise _changed(str(lora.lora_name))

    def check(self, request: Any) -> None:
        """Whether KV of a request may be handed over: `RefusedError` where it is not `certain`."""
        try:
            self.certain(request)
        except NoContentError as error:
            raise RefusedError("adapter_uncertain", str(error)) from error

    def forget(self, request: Any) -> None:
        """A request has ended."""
        self._arrivals.pop(request.request_id, None)
        self._digests.forget(request.request_id)

    # On the thread of the digests.

    def _content(self, lora: Any) -> bytes:
        """An adapter's bytes; what was called by one name is remembered for `certain`."""
        number, name = int(lora.lora_int_id), str(lora.lora_name)
        if getattr(lora, "load_inplace", False):
            self._names[name] = b""
            raise NoContentError(f"adapter {name!r} is loaded in place of another: its bytes are not known")
        path = _folder(str(lora.lora_path))
        told = signature(path)
        if number not in self._adapters and len(self._adapters) >= MOST_ADAPTERS:
            raise NoContentError(f"adapter {name!r}: more than {MOST_ADAPTERS} adapters were used")
        if self._adapters.setdefault(number, (path, told)) != (path, told):
            self._names[name] = b""
            raise _changed(name)
        # By the files and not by the number: of the same files it is made once.
        if (path, told) not in self._made:
            while len(self._made) >= MOST_DIGESTS:
                self._made.pop(next(iter(self._made)))
            self._made[path, told] = files_digest(path)
        made = self._made[path, told]
        if self._names.setdefault(name, made) != made:
            self._names[name] = b""
        return made


def _folder(path: str) -> str:
    """Where an adapter's files are: its path, or what was downloaded of its name."""
    here = Path(path).expanduser()
    if here.is_absolute() or here.exists():
        return str(here)
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(path, local_files_only=True))
    except Exception as error:  # whatever it is, there is no folder
        raise NoContentError(f"the files of adapter {path!r} were not found ({error})") from error


def _changed(name: str) -> NoContentError:
    return NoContentError(
        f"adapter {name!r}: its files have changed since this server first used that name; load it anew "
        "under another name, or restart the server"
    )
