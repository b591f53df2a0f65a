"""One schema for all options: of `kvik.Engine`, of the connector, of the commands.

An option is given directly (argument, flag, `kv_connector_extra_config`), or by its variable, or in the
configuration file, or has its default: the first of these counts. `kvik config` shows each value and where it
comes from.

`tables` has the options, `schema` and `kinds` say what an option is, `variables` and `file` read what was
set, `resolve` decides. `flags` makes flags of a command from a table, `page` the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvik.config.cache import CACHE
from kvik.config.object_store import OBJECT
from kvik.config.resolve import given_values, settings, values
from kvik.config.schema import Entry, Option
from kvik.config.tables import CONNECTOR, EMULATOR, ENGINE, ENTRIES, ROUTER, STORE
from kvik.config.words import meant
from kvik.errors import InvalidArgument

__all__ = [
    "CACHE",
    "CONNECTOR",
    "EMULATOR",
    "ENGINE",
    "ENTRIES",
    "OBJECT",
    "ROUTER",
    "STORE",
    "Entry",
    "Option",
    "engine_arguments",
    "given_values",
    "settings",
    "values",
]


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an engine, for `kvik.Engine`: those that are given, as they are, and the others."""
    names = [option.name for option in ENGINE.options]
    for name in given:
        if name not in names:
            near = meant(name, names)
            advice = f"did you mean {near}?" if near else f"the options are {', '.join(names)}"
            raise InvalidArgument(f"Engine has no option {name}: {advice}")
    return values(ENGINE, given)
