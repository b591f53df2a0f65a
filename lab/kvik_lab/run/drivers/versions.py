"""Versions of what an engine runs, as JSON by program: `python versions.py PROGRAM...`.

`ucx` is that of the UCX which NIXL's packages bring, or else of the host's; of unlike ones all. This file
needs nothing but the standard library, so that its text can be sent to any machine.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

UCX = "ucx"
_LIBRARY = re.compile(r"libucp\b.*\.so")


def main(wanted: list[str]) -> None:
    """Print those that are there."""
    there: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        there.setdefault(_name(one), one.version)  # the first is the one that is imported
    found = {name: there[name] for name in wanted if name in there}
    if UCX in wanted and (version := ucx()) is not None:
        found[UCX] = version
    print(json.dumps(found), flush=True)
    os._exit(0)  # UCX's destructors are none of ours, and may die


def said(by_version: Mapping[str, Sequence[str]]) -> str:
    """The version; of unlike ones each with the roles that have it."""
    if len(by_version) == 1:
        return next(iter(by_version))
    return ", ".join(f"{version} ({', '.join(roles)})" for version, roles in sorted(by_version.items()))


def ucx() -> str | None:
    """What the libraries say of themselves; None where there is none that can be loaded."""
    found = [version for path in _brought() if (version := _of(path)) is not None]
    return ", ".join(dict.fromkeys(found)) or _of("libucp.so.0")


def _of(path: str) -> str | None:
    try:
        ask = ctypes.CDLL(path).ucp_get_version_string
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    said = ask()
    return said.decode() if isinstance(said, bytes) else None


def _brought() -> Iterator[str]:
    """The libraries in NIXL's packages."""
    for one in importlib.metadata.distributions():
        if _name(one).startswith("nixl"):
            for file in one.files or ():
                if _LIBRARY.match(file.name):
                    yield str(file.locate())


def _name(one: importlib.metadata.Distribution) -> str:
    return str(one.metadata["Name"] or "").lower().replace("_", "-")


if __name__ == "__main__":
    main(sys.argv[1:])
