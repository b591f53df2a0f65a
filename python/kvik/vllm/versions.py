"""Which vLLM this adapter was tested with.

vLLM calls its connector API experimental, and KV tensor layouts have changed between minor releases without
any change of that API. So an unknown release is refused at start: a refusal costs a pip command, a wrong
guess costs answers.
"""

from __future__ import annotations

import re

OLDEST = (0, 28)
NEWEST = (0, 33)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


class UnsupportedVllmError(ImportError):
    """The installed vLLM is outside the range that this adapter was tested with."""


def check(version: str) -> tuple[int, int]:
    """Return (major, minor) of a supported `version`; an error names the range for any other."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not OLDEST <= found <= NEWEST:
        raise UnsupportedVllmError(
            f"kvik.vllm supports vLLM {SUPPORTED}; this is vLLM {version!r}. Install one of these: "
            f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
    return found


def check_installed() -> tuple[int, int]:
    """Check the vLLM of this process, by its module: repackaged builds carry another distribution name."""
    import vllm

    return check(str(vllm.__version__))
