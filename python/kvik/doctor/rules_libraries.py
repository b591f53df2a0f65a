"""Rules about libraries: two copies of one in a process, and a plug-in of NCCL's that its libfabric is too
old for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvik.doctor.model import Cost, Finding, Library, Nic

_TWO_FABRICS = (
    "kvcache-ai/Mooncake, pull request 2271: whichever copy is first has the devices, and NCCL goes over TCP "
    "in silence"
)
_TWO_VERBS = (
    "ai-dynamo/nixl, pull request 1929: a copy beside the host's, whose drivers are looked for in another "
    "place"
)
_TOO_OLD = (
    "awslabs/awsome-distributed-ai, issue 292: the linker refuses the plug-in, and NCCL goes over TCP sockets"
)


def library_findings(libraries: Sequence[Library], nics: Iterable[Nic]) -> Iterator[Finding]:
    """All of this module; a machine whose only NICs are in software has no device that a copy could take."""
    drivers = {nic.driver for nic in nics if nic.address}
    if not drivers:
        return
    if "efa" in drivers:
        yield from _twice(libraries, "libfabric", _TWO_FABRICS)
    yield from _twice(libraries, "libibverbs", _TWO_VERBS)
    yield from _unmet(libraries)


def of_host(libraries: Sequence[Library], name: str) -> Library | None:
    """The copy that kvik, and whoever asks for the plain name, gets: the vendor's before the system's."""
    copies = [library for library in libraries if library.name == name and not library.bundled]
    order = {origin: place for place, origin in enumerate(("loaded", "efa", "system"))}
    known = [library for library in copies if library.origin in order]
    return min(known, key=lambda library: order[library.origin], default=None)


def _twice(libraries: Sequence[Library], name: str, source: str) -> Iterator[Finding]:
    """A copy of a wheel's under a name of its own: the linker loads it beside the host's."""
    host = of_host(libraries, name)
    if host is None:
        return
    for copy in libraries:
        if copy.name != name or not copy.bundled:
            continue
        blind = copy.driver_folder is not None and not copy.drivers
        yield Finding(
            "library-twice",
            copy.path,
            f"the package {copy.package} brings a {name} of its own ({copy.version}); a process that uses it "
            f"has {host.path} ({host.version or 'version not said'}) beside it"
            + (f"; it looks for drivers of NICs in {copy.driver_folder}, and none is there" if blind else ""),
            Cost(None, source, fails=blind or name == "libfabric"),
            f"Use a build of {copy.package.removesuffix('.libs')} that takes the host's {name}, or keep it "
            f"out of the process that has kvik: kvik takes the copy that is loaded first, and no second one.",
            "kv,collectives",
        )


def _unmet(libraries: Sequence[Library]) -> Iterator[Finding]:
    """A plug-in of NCCL's that needs a later interface than the libfabric has that it gets."""
    for plugin in libraries:
        folder = plugin.path.rpartition("/")[0]
        if not plugin.name.startswith("libnccl-net") or plugin.interface is None:
            continue
        beside = [one for one in libraries if one.name == "libfabric" and one.path.startswith(f"{folder}/l")]
        gets = next(iter(beside), None) or of_host(libraries, "libfabric")
        if gets is None or gets.interface is None or gets.interface >= plugin.interface:
            continue
        yield Finding(
            "nccl-plugin-unmet",
            plugin.path,
            f"it needs FABRIC_1.{plugin.interface}, and {gets.path} ({gets.version or 'version not said'}) "
            f"has FABRIC_1.{gets.interface} at most",
            Cost(None, _TOO_OLD, fails=True),
            "Update libfabric (on AWS: the EFA installer), or take a plug-in that was built for this one.",
            "collectives",
        )
