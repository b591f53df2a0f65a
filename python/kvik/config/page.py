"""The reference of all options in Markdown.

``python -m kvik.config.page > docs/reference/configuration.md`` writes it anew.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from kvik.config.schema import Entry, Option
from kvik.config.tables import ENTRIES

_HEAD = """\
# Options

<!-- Made by `python -m kvik.config.page`; change python/kvik/config/tables.py instead. -->

Every option of kvik, with its default, and why there is a choice. [Configuration](../configuration.md) says
which value counts when several are given. Names are the same everywhere: `channels` is
`kvik.Engine(channels=...)`, `KVIK_CHANNELS`, `channels` in the table `[engine]` of the configuration file,
and `channels` in the connector's extra config.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(line for part in _parts() for line in part) + "\n"


def _parts() -> Iterator[list[str]]:
    yield _HEAD.splitlines()
    for entry in ENTRIES:
        own = [option for option in entry.options if _is_own(entry, option)]
        shared = [option for option in entry.options if option not in own]
        intro = f"Given directly as {entry.where}. What counts now: `kvik config {entry.name}`."
        yield ["", f"## {entry.title}", "", intro]
        if shared:
            yield ["", *_shared(shared)]
        for name, kind in entry.direct.items():
            text = f"Given directly, `{name}` is {kind.accepts}."
            yield ["", *textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False)]
        for option in own:
            yield ["", f"### {option.section}: `{option.name}`", "", *_option(option)]


def _is_own(entry: Entry, option: Option) -> bool:
    """Whether an option is described here: at the entry point of its section, where that takes it."""
    home = next((one for one in ENTRIES if one.name == option.section), entry)
    return home is entry or option not in home.options


def _shared(shared: list[Option]) -> list[str]:
    names = ", ".join(f"[`{option.name}`](#{option.section}-{option.name})" for option in shared)
    owners = " and the ".join(dict.fromkeys(option.section for option in shared))
    return [f"It takes these options of the {owners}, with the same variables and keys: {names}."]


def _option(option: Option) -> list[str]:
    return [
        *textwrap.wrap(f"{option.help} {option.reason}", 110, break_long_words=False, break_on_hyphens=False),
        "",
        "| default | variable | in the file | accepted |",
        "|---|---|---|---|",
        f"| {_default(option)} | `{option.variable}` | `{option.name}` in `[{option.section}]` "
        f"| {option.kind.accepts} |",
    ]


def _default(option: Option) -> str:
    if option.required:
        return "none, it is required"
    text = option.shown(option.default)
    return text if text == option.unset else f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(page())
