"""The reference of all metrics in Markdown.

``python -m kvik.stat.page > docs/reference/metrics.md`` writes it anew.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator

from kvik._native import engine_metrics, store_metrics

_HEAD = """\
# Metrics

<!-- Made by `python -m kvik.stat.page`; change crates/kvik-engine/src/metrics/table.rs or
crates/kvik-store/src/metrics.rs instead. -->

What `Engine.metrics()` and `kvik stat --prometheus` print, in the Prometheus text format 0.0.4.
[Watching an engine](../observability.md) says how to get at them. Counters begin at 0 when the engine starts.

Series are bounded. A peer is labelled by its engine id and by its name if it has one. A peer that has a
session is kept; of all others the 256 that were heard of last are. What was counted for any other goes on as
`peer="gone"`, so totals never fall; but a rate of `peer="gone"` means nothing, as it rises when a peer is
forgotten. Those of a [store](#of-a-store) follow.
"""

_STORE = """
## Of a store

What `Store.metrics()`, `kvik store stat --prometheus` and, with `--metrics`, `/metrics` of a store server
give; the last one with the metrics of the server's engine. Counters begin at 0 when the store starts.

Tenants that the store was started with have series of their own, and so have the first 64 others; the rest is
counted as `tenant="other"`. Where there is no log, nothing has `tier="log"`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(line for part in _parts() for line in part) + "\n"


def _parts() -> Iterator[list[str]]:
    yield _HEAD.splitlines()
    yield from _all(engine_metrics(), "##")
    yield _STORE.splitlines()
    yield from _all(store_metrics(), "###")


def _all(metrics: Iterable[tuple[str, str, list[str], str]], heading: str) -> Iterator[list[str]]:
    for name, kind, labels, text in metrics:
        of = ", ".join(f"`{label}`" for label in labels) or "none"
        yield ["", f"{heading} `{name}`", "", *textwrap.wrap(text, 110), "", f"A {kind}; labels: {of}."]


if __name__ == "__main__":
    sys.stdout.write(page())
