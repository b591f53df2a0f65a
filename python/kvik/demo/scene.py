"""What the demo needs of the engines that it shows, whichever they are."""

import contextlib
import http.client
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvik.bench import facts
from kvik.demo import words
from kvik.demo.reports import ReportReader
from kvik.roles.hosts import Host, Rate, two_hosts
from kvik.roles.ports import LOOPBACK
from kvik.roles.processes import Fleet, HttpServer, ProcessError

MAX_TP = 64


class SettingError(ValueError):
    """What was asked for cannot be shown, or not on this machine; the text says why and what to do."""


@dataclass(frozen=True)
class Ranks:
    """Tensor parallelism of the prefill engine and of the decode engine; one engine alone is like decode."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "Ranks":
        """From `2` (both) or `4:2` (prefill:decode); `SettingError` for anything else."""
        found = re.fullmatch(r"(\d{1,3})(?::(\d{1,3}))?", text.strip())
        ranks = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not all(1 <= count <= MAX_TP for count in ranks):
            raise SettingError(f"--tp: {text!r} is not a number of ranks such as 2, or two such as 4:2")
        return cls(*ranks)

    def __str__(self) -> str:
        return f"tp {self.prefill}" if self.prefill == self.decode else f"tp {self.prefill} to {self.decode}"


@dataclass(frozen=True)
class Settings:
    """What the demo was asked to show. `lengths` are prompt lengths in tokens."""

    lengths: tuple[int, ...]
    model_shape: str
    ranks: Ranks
    transport: str
    fault: str | None


@dataclass(frozen=True)
class KvFacts:
    """The KV of a prompt, in decode's KV blocks: what has to come over."""

    block_tokens: int
    block_bytes: int  # of one KV block, over all layers and all ranks of decode
    vocabulary: range  # token ids for prompts

    def bytes_of(self, length: int) -> int:
        """Bytes of the KV blocks of a prompt. Of one token nothing has to move: decode computes the last
        one."""
        return 0 if length == 1 else self.blocks(length) * self.block_bytes

    def blocks(self, length: int) -> int:
        """KV blocks of a prompt."""
        return -(-length // self.block_tokens)


@dataclass(frozen=True)
class Link:
    """A cable of a stated rate between the prefill engine's host and the host of everything else."""

    rate: Rate
    prefill: Host
    rest: Host
    secret: str


@dataclass(frozen=True)
class Place:
    """Where engines are started: this host, or the two ends of a link."""

    link: Link | None = None

    def prefill_host(self) -> str:
        """The address that the prefill engine listens on."""
        return LOOPBACK if self.link is None else self.link.prefill.v4

    def environment(self) -> dict[str, str]:
        """What both engines' environments need: off loopback nobody listens without a secret."""
        return {} if self.link is None else {"KVIK_SECRET": self.link.secret}

    def at_prefill(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread is where the prefill engine is."""
        return contextlib.nullcontext() if self.link is None else self.link.prefill.inside()

    def near(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread is where all the rest is, and the client."""
        return contextlib.nullcontext() if self.link is None else self.link.rest.inside()


@dataclass(frozen=True)
class Scene:
    """Everything that runs. `what` says in a few words what kind of engines these are."""

    prefill: HttpServer
    decode: HttpServer
    alone: HttpServer
    router: HttpServer
    reports: ReportReader
    kv: KvFacts
    place: Place
    what: str
    model: str
    proof: str  # why equal tokens say that the KV is right
    note: str = ""  # what to know when reading the picture


@dataclass(frozen=True)
class StoreAct:
    """What the second act is played with. `start` returns an engine with the store that is ready; `stop` ends
    it. `ranks` are the engine's; `where` the store is, for those who read it."""

    length: int
    ranks: int
    where: str
    start: Callable[[], HttpServer]
    stop: Callable[[HttpServer], None]


class Cast(Protocol):
    """The engines that play in the demo; a module each."""

    LENGTHS: tuple[int, ...]
    STARTING: str

    def check(self, settings: Settings, /) -> None:
        """`SettingError` for what these engines cannot show, or not on this machine."""

    def facts(self, settings: Settings, /) -> KvFacts:
        """The KV that these settings move."""

    def start(self, settings: Settings, place: Place, fleet: Fleet, logs: Path) -> Scene:
        """Start everything; `ProcessError` when something does not come up."""

    def store_act(self, scene: Scene, settings: Settings, fleet: Fleet, logs: Path) -> "StoreAct | None":
        """Start a store for the second act; None for engines that have none."""


def check_memory(needed: int, what: str, instead: str) -> None:
    """`SettingError` unless `needed` bytes are free; `what` wants them, and `instead` wants less."""
    have = facts.memory_available()
    if have is not None and have < needed:
        raise SettingError(
            f"not enough memory: {what} want {words.size(needed)}, and {words.size(have)} are free; "
            f"try {instead}"
        )


@contextlib.contextmanager
def place_for(rate: Rate | None) -> Iterator[Place]:
    """This host, or two hosts with a cable of this rate; raises `CannotError`."""
    if rate is None:
        yield Place()
        return
    with two_hosts() as (left, right):
        for host in (left, right):
            host.shape(rate)
        yield Place(Link(rate, left, right, secrets.token_hex(16)))


def model_name(server: HttpServer) -> str:
    """The name under which a server serves its model; `ProcessError` when it does not say."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60.0)
    try:
        connection.request("GET", "/v1/models")
        answer = json.loads(connection.getresponse().read())
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProcessError(f"{server.name} does not say the name of its model\n{server.tail()}") from error
    finally:
        connection.close()


def report_file(logs: Path) -> Path:
    """Where the decode engine says what became of each load."""
    return logs / "loads.jsonl"


def wait_all(servers: Sequence[HttpServer], deadline: float) -> None:
    """Wait until all of them answer, at most to `deadline` (monotonic)."""
    for server in servers:
        server.wait_ready(deadline)
