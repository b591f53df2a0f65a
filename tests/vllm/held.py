"""What a server holds, by its own metrics and those of its kvik engines."""

import contextlib
from dataclasses import dataclass

from kvik.demo import client
from kvik.roles.processes import HttpServer, descendants
from kvik.stat import engines as stat
from kvik.stat.snapshot import Samples
from tests.vllm.pairs import used


@dataclass(frozen=True)
class Held:
    """What a server holds: KV blocks in use (a share), live grants, open transfers, pages in quarantine, and
    requests that run or wait."""

    blocks: float
    grants: int
    transfers: int
    quarantined: int
    requests: int

    def within(self, other: "Held") -> bool:
        """Whether it is nowhere more than another one."""
        return all(value <= vars(other)[name] for name, value in vars(self).items())


def held(server: HttpServer) -> Held:
    """As it is now."""
    blocks = used(server)
    counts = client.metrics(server.url)
    requests = counts["vllm:num_requests_running"] + counts["vllm:num_requests_waiting"]
    pids = descendants(server.pid)
    seen = [sample for about, sample in _engines() if about.pid in pids]
    if not seen:
        raise RuntimeError(f"no kvik engine in {server.name}")
    names = ("kvik_grants_live", "kvik_transfers_open", "kvik_quarantined_pages")
    grants, transfers, quarantined = (int(sum(one.total(name) for one in seen)) for name in names)
    return Held(blocks, grants, transfers, quarantined, int(requests))


def _engines() -> list[tuple[stat.About, Samples]]:
    """Those that answer; one that was killed may still have its name for a moment."""
    found = []
    for name in stat.names():
        with contextlib.suppress(stat.StatError):
            about, text = stat.snapshot(name)
            found.append((about, Samples(text)))
    return found
