"""What a stranger does first with the wheel: prints, as JSON, what became of each transport."""

import json
import sys
from collections.abc import Callable

import kvik

LAYOUT = kvik.Layout(pages=8, run_bytes=4096)


def moves(make: Callable[[], kvik.Engine]) -> str:
    """Reads pages of one engine into another: the transport that they went over."""
    with make() as owner, make() as reader:
        here, there = reader.allocate(LAYOUT.nbytes), owner.allocate(LAYOUT.nbytes)
        memoryview(there)[:] = bytes(index % 251 for index in range(LAYOUT.nbytes))
        grant = owner.grant(there.pages(LAYOUT, range(8)))
        report = reader.read(here.pages(LAYOUT, range(8)), grant.ticket).wait(30)
        if bytes(memoryview(here)) != bytes(memoryview(there)):
            raise SystemExit("the pages differ")
        return f"{report.transport} by {report.mechanism}"


def attempt(make: Callable[[], kvik.Engine]) -> str:
    """The same, or the error's name and text."""
    try:
        return moves(make)
    except kvik.KvikError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Over what every machine has, and over each kind of NIC."""
    told = {
        "tcp": attempt(lambda: kvik.Engine(transport="tcp")),
        "local": attempt(lambda: kvik.Engine(transport="local")),
    }
    for nics in ("efa", "verbs", "libfabric:tcp"):
        told[nics] = attempt(lambda nics=nics: kvik.Engine(transport="nics", nics=nics))  # type: ignore[misc]
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
