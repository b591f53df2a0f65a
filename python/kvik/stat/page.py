"""The reference of all metrics in Markdown.

``python -m kvik.stat.page > docs/reference/metrics.md`` writes it anew.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from kvik._native import engine_metrics

_HEAD = """\
# Metrics

<!-- Made by `python -m kvik.stat.page`; change crates/kvik-engine/src/metrics/table.rs instead. -->

What `Engine.metrics()` and `kvik stat --prometheus` print, in the Prometheus text format 0.0.4.
[Watching an engine](../observability.md) says how to get at them. Counters begin at 0 when the engine starts.

Series are bounded. A peer is labelled by its engine id and by its name if it has one. A peer that has a
session is kept; of all others the 256 that were heard of last are. What was counted for any other goes on as
`peer="gone"`, so totals never fall; but a rate of `peer="gone"` means nothing, as it rises when a peer is
forgotten.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(line for part in _parts() for line in part) + "\n"


def _parts() -> Iterator[list[str]]:
    yield _HEAD.splitlines()
    for name, kind, labels, text in engine_metrics():
        of = ", ".join(f"`{label}`" for label in labels) or "none"
        yield ["", f"## `{name}`", "", *textwrap.wrap(text, 110), "", f"A {kind}; labels: {of}."]


if __name__ == "__main__":
    sys.stdout.write(page())
