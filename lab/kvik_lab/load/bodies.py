"""The bodies of requests, made before the first is sent: in memory, or beyond a bound in a file without a
name."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from typing import Any

from kvik_lab.load.spec import LoadSpec
from kvik_lab.load.tokens import Content

IN_MEMORY = 256 << 20


@dataclass(frozen=True)
class Slot:
    """Where a body lies."""

    offset: int
    length: int


class Bodies:
    """Made once, read once each."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  (closed by `close`)
        self._end = 0

    def put(self, body: bytes) -> Slot:
        """Keep one."""
        self._file.seek(self._end)
        self._file.write(body)
        slot = Slot(self._end, len(body))
        self._end += len(body)
        return slot

    def get(self, slot: Slot) -> bytes:
        """Give one back."""
        self._file.seek(slot.offset)
        return self._file.read(slot.length)

    def close(self) -> None:
        """Let all of them go."""
        self._file.close()


class Form:
    """How a load's requests are written."""

    def __init__(self, spec: LoadSpec, model: str) -> None:
        self.path = "/v1/completions" if spec.endpoint == "completions" else "/v1/chat/completions"
        self._chat = spec.endpoint == "chat"
        self._system = spec.prompt.system
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": spec.temperature,
            "ignore_eos": True,
            **({"return_token_ids": True} if spec.token_ids else {}),
            **spec.body,
        }

    def write(self, prompt: Content, output: int, said: tuple[tuple[str, str], ...] = ()) -> bytes:
        """One request. said: role and text of the messages before this one, of chat."""
        length = "max_completion_tokens" if self._chat else "max_tokens"
        asked: dict[str, Any] = {**self._fields, length: output}
        if self._chat:
            before = (("system", self._system),) if self._system else ()
            lines = (*before, *said, ("user", prompt))
            asked["messages"] = [{"role": role, "content": text} for role, text in lines]
        else:
            asked["prompt"] = prompt
        return json.dumps(asked, separators=(",", ":")).encode()
