"""The environment variables: which there are, and which names that begin with KVIK_ are not ours."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from kvik.config import file
from kvik.config.schema import ENGINE_SECTION, PREFIX, Option
from kvik.config.words import option_meant, shown, slip

OTHERS = frozenset({file.VARIABLE, "KVIK_SCHEDULES", "KVIK_SEED"})
"""Names that are no options: the configuration file, and what kvik's simulator takes."""
TESTS = "KVIK_TEST_"
"""What the names of all others begin with that kvik's own build and tests use."""

# What Kubernetes sets in every container for a service whose name begins with `kvik`; for `kvik-router` it is
# KVIK_ROUTER_PORT=tcp://10.0.0.1:8000. See "Environment variables" of its documentation of services.
_SERVICE = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Until the end of the block the user's settings of kvik, the file among them, reach neither this process
    nor what it starts: what is shown or measured is what it is said to be."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX)}
    os.environ[file.VARIABLE] = os.devnull
    try:
        yield
    finally:
        del os.environ[file.VARIABLE]
        os.environ.update(kept)


def given(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that begin with KVIK_ and mean kvik. An empty one is as good as none."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(PREFIX) and value and not _of_kubernetes(name, value)
    }


def _of_kubernetes(name: str, value: str) -> bool:
    return bool(_SERVICE.search(name) or (name.endswith("_PORT") and _SERVICE_URL.match(value)))


def unknown(names: Iterable[str], options: Collection[Option]) -> list[str]:
    """A line for each variable that no option has. Its value is not shown: it may be a secret."""
    known = {option.variable for option in options}
    problems = []
    for name in sorted(set(names) - known - OTHERS):
        if name.startswith(TESTS):
            continue
        near = _meant(name, options)
        advice = f"; did you mean {near}?" if near else ": unset it"
        problems.append(f"{shown(name)}: kvik has no such variable{advice} (`kvik config` shows all)")
    return problems


def _meant(name: str, options: Collection[Option]) -> str | None:
    known = sorted({option.variable.removeprefix(PREFIX) for option in options} | {"CONFIG"})
    word = name.removeprefix(PREFIX)
    if near := slip(word, known):
        return PREFIX + near
    first, _, rest = word.lower().partition("_")
    if first in {option.section for option in options}:
        option = option_meant(rest, first, options)
    else:
        option = option_meant(word.lower(), ENGINE_SECTION, options)
    return option.variable if option else None
