"""What kvik's engines of a study's roles count, as JSON {role: {engine: text}}: `python told.py MARK`.

Texts are Prometheus'. A role's processes have the study's mark and the role's name in their environment.
This file needs kvik and not the lab, so that its text can be sent to any machine that runs roles; where kvik
is not, as with engines of others, no role has one of its engines.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

VARIABLE = "KVIKLAB_ROLE"
STUDY = "KVIKLAB_STUDY"


def main(mark: str) -> int:
    """Print it; an engine that does not answer is left out."""
    found: dict[str, dict[str, str]] = {}
    try:
        from kvik.stat import engines
    except ModuleNotFoundError:
        print(json.dumps(found))
        return 0
    for name in engines.names():
        with contextlib.suppress(engines.StatError, OSError):
            about, text = engines.snapshot(name)
            pairs = Path(f"/proc/{about.pid}/environ").read_bytes().decode(errors="replace").split("\0")
            known = dict(pair.partition("=")[::2] for pair in pairs)
            if known.get(STUDY) == mark and VARIABLE in known:
                found.setdefault(known[VARIABLE], {})[about.engine] = text
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
