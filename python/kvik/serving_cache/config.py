"""The options of a serving engine's store: `store` in `kv_connector_extra_config`, variables, and the
file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvik.config import CACHE, given_values, values
from kvik.config.resolve import look_around
from kvik.errors import InvalidArgument

_DEFAULTS = CACHE.defaults()


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a serving engine's store is. Times are in seconds, `host_cache` in bytes of each rank,
    `prefill_rate` in tokens a second, or "measured", or "off"."""

    address: str | None = None
    copies: int = _DEFAULTS["copies"]
    host_cache: int | None = None
    deadline: float = _DEFAULTS["deadline"]
    save_deadline: float = _DEFAULTS["save_deadline"]
    prefill_rate: float | str = _DEFAULTS["prefill_rate"]
    tenant: str = _DEFAULTS["tenant"]
    weights: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is a store at all."""
        return self.address is not None or self.host_cache is not None

    @classmethod
    def from_extra(cls, given: Any, where: str, env: Mapping[str, str] = os.environ) -> CacheConfig:
        """Build from what was given directly: an object with the options as keys, or the address alone; None
        for neither. `where` begins each error.

        Raises `kvik.InvalidArgument` with a line for each thing that is wrong, and what was meant.
        """
        if isinstance(given, str):
            given = {"address": given}
        if given is not None and not isinstance(given, Mapping):
            raise InvalidArgument(
                f"{where}: it is HOST:PORT of a `kvik store serve`, or an object with keys of "
                f"{', '.join(_DEFAULTS)}; not {given!r}"
            )
        return cls(**values(CACHE, given_values(CACHE, given or {}, where), look_around(env)))
