"""vLLM servers with kvik's connector under load, of which one or the other is killed again and again.

    PYTHONPATH=. .venv/vllm/bin/python bench/vllm_soak.py [--minutes 30] [--clients 6] [--every 25]

A prefill and a decode server, on CPU, each with kvik's connector as one of two of vLLM's `MultiConnector`, a
router before them, and a relay between them that slows the KV at times, and spoils a bit of it. Clients ask
with prompts of random length, some of which were asked before or begin like others, through the router or
both servers by hand. Some leave: at any time, between prefill and decode, while decode loads or answers. Some
send what is no request, or `kv_transfer_params` that somebody has changed. Every `--every` seconds, about,
prefill, decode or both get SIGKILL, all their processes at once, and are started again where they were.

Every token that comes back, also of an answer that is left half-way, is compared with that of an engine
without a connector and without a prefix cache. Every `--check` minutes, and at the end, the clients pause:
then both servers have to use as few KV blocks as at the start, and to have as few grants live, and no
request. Nobody kills in the last quarter of the time before.

Exit status 1: a wrong token; a request that did not end in time; an error that none of the servers it
concerns had just been killed for; a server that ended by itself; blocks or grants that did not come back; or
a run in which one of these things has not happened. Prints the seed, a line a minute, and results as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm import pairs
from tests.vllm.forked import ForkParent
from tests.vllm.held import Held, held
from tests.vllm.leaving import ask_and_leave
from tests.vllm.malformed import malformed, send
from tests.vllm.pairs import ASK_PREFILL, ENGINES, START_LIMIT, Pair, PairSpec
from tests.vllm.params import catalogue
from tests.vllm.params.mutations import Mutation
from tests.vllm.params.trial import REFUSED, prompts_of

from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, ensure_checkpoint
from kvik.demo.engines import EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer, ProcessError

EXPIRY, DEADLINE = 8.0, 6.0  # seconds: of an offer that nobody takes, of a load
LIMIT = 120.0  # seconds in which each request has to end
GRACE = 5.0  # seconds after a start in which the router may not know of it yet
BACK = EXPIRY + 30.0  # seconds in which everything has to be back once the clients pause
LONGEST = 3000  # tokens of a prompt
REMEMBERED = 200  # prompts that may be asked again
SPEC = PairSpec(
    "soak", several=True, wired=True, prefix_caching=True, extra={"expiry": EXPIRY, "deadline": DEADLINE}
)
RATES = (None, None, None, 8e6, 2e6, 0.5e6)  # bytes a second of the KV between the servers
FAILED = (OSError, http.client.HTTPException, client.RequestError)
PREFILL, DECODE, BOTH = ("prefill",), ("decode",), ENGINES


class Absence:
    """When servers were last away: killed, or not up again."""

    def __init__(self) -> None:
        self._back = dict.fromkeys(ENGINES, 0.0)  # until when, of the monotonic clock
        self._changed = threading.Condition()

    def begins(self, name: str) -> None:
        with self._changed:
            self._back[name] = float("inf")

    def ends(self, name: str) -> None:
        with self._changed:
            self._back[name] = time.monotonic() + GRACE
            self._changed.notify_all()

    def excuses(self, names: tuple[str, ...], began: float) -> bool:
        """Whether one of these was away at some time since then."""
        return any(self._back[name] >= began for name in names)

    def wait(self, names: tuple[str, ...], within: float) -> None:
        """Until these are back, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: max(self._back[name] for name in names) < float("inf"), within)


@dataclass
class Counts:
    """What clients saw. `notes` are texts about what must not be."""

    sent: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    malformed: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    left: int = 0
    compared: int = 0
    tokens: int = 0
    wrong: int = 0
    stuck: int = 0
    flips: int = 0
    checks: int = 0
    not_back: int = 0
    died: int = 0
    slowest_s: float = 0.0
    slowest_start_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counter: Counter[str], key: str) -> None:
        """One more of these."""
        with self.lock:
            counter[key] += 1

    def note(self, text: str) -> None:
        """Say at once what must not be."""
        self.notes.append(text)
        print(text, flush=True)

    def results(self) -> dict[str, Any]:
        """All of it, for JSON."""
        plain = {name: value for name, value in vars(self).items() if name not in ("lock", "notes")}
        return {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in plain.items()}


class Gate:
    """Lets clients in, or pauses them between two requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._open, self.ended = 0, True, False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._open or self.ended)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def pause(self, within: float) -> bool:
        """Let nobody in, and wait until all are outside."""
        with self._changed:
            self._open = False
            return self._changed.wait_for(lambda: self._inside == 0, within)

    def go_on(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody shall come again."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Prompts:
    """Prompts of random bytes: fresh ones, some that begin like an earlier one, and earlier ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._asked: list[list[int]] = []

    def next(self) -> list[int]:
        length = round(LONGEST ** self._rng.random())  # many short ones, as users have
        if self._rng.random() < 0.2:
            length = max(1, length // 128 * 128 + self._rng.choice((-1, 0, 1)))
        prompt = [self._rng.randrange(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256) for _ in range(length)]
        how = self._rng.random()
        if self._asked and how < 0.4:
            earlier = self._rng.choice(self._asked)
            if how < 0.2:
                return earlier
            prompt = (earlier[: self._rng.randrange(1, len(earlier) + 1)] + prompt)[:LONGEST]
        self._asked.append(prompt)
        del self._asked[:-REMEMBERED]
        return prompt


@dataclass(frozen=True)
class Place:
    """What all clients share."""

    pair: Pair
    alone: HttpServer
    counts: Counts
    absence: Absence
    gate: Gate
    mutations: list[Mutation]
    urls: Mapping[str, str]


class Client:
    """One client: requests of all kinds, one after the other."""

    def __init__(self, place: Place, seed: str) -> None:
        self.place, self.counts, self.urls = place, place.counts, place.urls
        self.rng = random.Random(seed)  # noqa: S311 - a workload
        self.prompts = Prompts(self.rng)
        self._away: tuple[str, ...] = ()  # servers that did not answer
        self._kinds: list[tuple[int, Callable[[], None]]] = [
            (34, self.through_the_router), (16, self.by_hand), (14, self.leave_the_router),
            (7, self.leave_between), (10, self.leave_decode), (4, self.leave_prefill),
            (8, self.changed_params), (7, self.no_request),
        ]  # fmt: skip

    def run(self) -> None:
        """Until the gate is closed for good."""
        weights = [weight for weight, _ in self._kinds]
        while True:
            with self.place.gate.inside():
                if self.place.gate.ended:
                    return
                _, kind = self.rng.choices(self._kinds, weights)[0]
                try:
                    kind()
                except Exception as error:  # a defect of this program must not look like a quiet client
                    self.counts.note(f"{kind.__name__}: {error!r}")
            # Who was not answered tries again, but not as fast as it can; most do before the server is back.
            if self._away:
                self.place.absence.wait(self._away, self.rng.random() * 4)
                self._away = ()

    def through_the_router(self) -> None:
        prompt, tokens = self.prompts.next(), self.rng.randrange(1, 33)
        self._stream("router", BOTH, prompt, tokens, LIMIT)

    def by_hand(self) -> None:
        prompt, tokens = self.prompts.next(), self.rng.randrange(1, 33)
        params = self._offer(prompt)
        time.sleep(self.rng.choice((0.0, 0.0, 0.5, EXPIRY + 1.0)) * self.rng.random())
        self._stream("decode", DECODE, prompt, tokens, LIMIT, kv_transfer_params=params)

    def leave_the_router(self) -> None:
        self._stream("router", BOTH, self.prompts.next(), 200, self.rng.random() ** 2 * 4, leaves=True)

    def leave_between(self) -> None:
        self._offer(self.prompts.next())

    def leave_decode(self) -> None:
        prompt = self.prompts.next()
        params = self._offer(prompt)
        after = self.rng.random() ** 3 * 3
        self._stream("decode", DECODE, prompt, 200, after, leaves=True, kv_transfer_params=params)

    def leave_prefill(self) -> None:
        after = self.rng.random() * 0.5
        asked = {"kv_transfer_params": ASK_PREFILL}
        self._stream("prefill", PREFILL, self.prompts.next(), 1, after, leaves=True, **asked)

    def changed_params(self) -> None:
        """Parameters of one or more prompts, changed, with the first prompt; then it again without any."""
        mutation = self.rng.choice(self.place.mutations)
        prompts = prompts_of(mutation.prompts, self.rng)
        salts = [mutation.salts[number % len(mutation.salts)] for number in range(len(prompts))]
        offers = [self._offer(prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
        given = [offer for offer in offers if offer is not None]
        if len(given) < len(offers):
            return  # prefill has just been started again
        asked = salts[0] if mutation.asked_salt == "same" else mutation.asked_salt
        asking = prompts[: 1 + mutation.batch]
        self.counts.add(self.counts.malformed, "params")
        for params in (mutation.change(deepcopy(given), self.rng), None):
            more = {"cache_salt": asked} if asked is not None else {}
            payload = client.body([], 12, **more) | {"prompt": asking if mutation.batch else asking[0]}
            payload |= {"kv_transfer_params": params} if params is not None else {}
            answer = self._post("decode", DECODE, payload, f"{mutation.family}: {mutation.name}", params)
            if answer is not None:
                choices = sorted(answer["choices"], key=lambda choice: choice["index"])
                for prompt, choice in zip(asking, choices, strict=True):
                    what = f"changed params ({mutation.family}: {mutation.name})"
                    self._compare(what, prompt, [int(token) for token in choice["token_ids"]], 12)

    def no_request(self) -> None:
        """Bytes that are no request that can be answered: refused as by a server without a connector."""
        where = self.rng.choice(("router", *ENGINES))
        sent = malformed(self.rng, self.prompts.next())
        self.counts.add(self.counts.malformed, "requests")
        alone = send(self.place.alone.url, sent, LIMIT)
        began = time.monotonic()
        names = BOTH if where == "router" else (where,)
        with self._watched(f"no request to {where}", names, began):
            status = send(self.urls[where], sent, LIMIT)
            # The router answers by itself what it can tell, with another number of the same kind. Parameters
            # of a handover are its own to set.
            reserved = where == "router" and b'"kv_transfer_params"' in sent[2]
            if status // 100 != (4 if reserved and alone == 200 else alone // 100):
                raise client.RequestError(status, f"{alone} by an engine alone: {str(sent)[:300]}")

    def _offer(self, prompt: list[int], salt: str | None = None) -> dict[str, Any] | None:
        more = {} if salt is None else {"cache_salt": salt}
        payload = client.body(prompt, 1, kv_transfer_params=ASK_PREFILL, **more)
        answer = self._post("prefill", PREFILL, payload, "an offer", None)
        params = None if answer is None else answer["kv_transfer_params"]
        if answer is not None:
            self._compare("prefill", prompt, client.tokens_of(answer), 1)
        return params if isinstance(params, dict) else None

    def _post(
        self, where: str, names: tuple[str, ...], payload: dict[str, object], what: str, changed: object
    ) -> dict[str, Any] | None:
        """The answer, or None. With `changed` parameters vLLM may refuse the request, too."""
        self.counts.add(self.counts.sent, where)
        began = time.monotonic()
        with self._watched(what, names, began):
            try:
                return client.post(self.urls[where], payload, LIMIT)
            except client.RequestError as error:
                if changed is None or error.status not in REFUSED:
                    raise
        return None

    def _stream(
        self, where: str, names: tuple[str, ...], prompt: list[int], tokens: int, after: float,
        leaves: bool = False, **more: object,
    ) -> None:  # fmt: skip
        self.counts.add(self.counts.sent, where)
        began = time.monotonic()
        came: tuple[list[int], int | None] | None = None
        with self._watched(where, names, began):
            answer, left = ask_and_leave(self.urls[where], prompt, tokens, after, **more)
            if left and not leaves:
                raise TimeoutError(f"{where}: {len(answer.tokens)} of {tokens} tokens after {after} s")
            came = answer.tokens, None if left else tokens
        if came is not None:
            with self.counts.lock:
                self.counts.left += came[1] is None
            self._compare(where, prompt, *came)

    @contextlib.contextmanager
    def _watched(self, what: str, names: tuple[str, ...], began: float) -> Iterator[None]:
        """Count how a request failed, and whether it may have."""
        counts = self.counts
        try:
            yield
        except FAILED as error:
            kind = _kind(error)
            excused = self.place.absence.excuses(names, began)
            with counts.lock:
                counts.errors[kind] += 1
                counts.allowed[kind] += excused
                counts.stuck += isinstance(error, TimeoutError)
            if not excused or isinstance(error, TimeoutError):
                counts.note(f"NOT ALLOWED: {what}: {error!r}")
            self._away = names
        with counts.lock:
            counts.slowest_s = max(counts.slowest_s, time.monotonic() - began)

    def _compare(self, what: str, prompt: list[int], tokens: list[int], whole: int | None) -> None:
        """With the engine alone; `whole`: that many there have to be."""
        if not tokens and whole is None:
            return  # left before the first one
        truth = client.complete(self.place.alone.url, prompt, max(len(tokens), whole or 0)).tokens
        counts = self.counts
        with counts.lock:
            counts.compared += 1
            counts.tokens += len(tokens)
        if tokens != truth:
            with counts.lock:
                counts.wrong += 1
            counts.note(f"WRONG: {what}: {examined(self.place.alone, prompt, tokens, truth)}")


def examined(alone: HttpServer, prompt: list[int], tokens: list[int], truth: list[int]) -> str:
    """Where an answer differs, and by how much the right token is more likely than the next one there."""
    both = list(zip(tokens, truth, strict=False))
    at = next((number for number, (one, other) in enumerate(both) if one != other), len(both))
    again = client.complete(alone.url, prompt, len(truth)).tokens
    payload = client.body([*prompt, *truth[:at]], 1, logprobs=2)
    choices = client.post(alone.url, payload)["choices"]
    assert isinstance(choices, list)  # noqa: S101 - what the type says of a dict's value
    likely = sorted(choices[0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
    said = "so again" if again == truth else "OTHERWISE"
    return (
        f"{len(prompt)} tokens, {len(tokens)} of {len(truth)} came, they differ from the {at}. on "
        f"({tokens[at:][:4]}, not {truth[at:][:4]}); the engine alone says {said}, "
        f"its likeliest tokens there: {likely[:2]}"
    )


def _kind(error: Exception) -> str:
    if isinstance(error, client.RequestError):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return f"HTTP {error.status} {json.loads(error.text)['error']['code']}"
        return f"HTTP {error.status} {error.text[:40]}"
    return type(error).__name__


class Soak:
    """The servers, their clients, and what happens to them."""

    def __init__(self, arguments: argparse.Namespace, pair: Pair, alone: HttpServer) -> None:
        urls = {name: getattr(pair, name).url for name in ("router", *ENGINES)}
        self.place = Place(pair, alone, Counts(), Absence(), Gate(), catalogue.one_rank(servers=1), urls)
        self.pair, self.counts, self.arguments = pair, self.place.counts, arguments
        self._rng = random.Random(arguments.seed)  # noqa: S311 - a schedule
        self._over = threading.Event()
        self._turns: list[tuple[str, ...]] = []

    def run(self) -> None:
        """All of it; what came is in `counts`."""
        first = self._begin()
        work: list[Callable[[], None]] = [
            Client(self.place, f"{self.arguments.seed}/{number}").run
            for number in range(self.arguments.clients)
        ]
        threads = [threading.Thread(target=job) for job in [*work, self._wire, self._tell]]
        for thread in threads:
            thread.start()
        try:
            rounds = max(1, round(self.arguments.minutes / self.arguments.check))
            for _ in range(rounds):
                self._kill_for(self.arguments.minutes * 60 / rounds)
                self._check(first)
        finally:
            self._over.set()
            self.place.gate.end()
            for thread in threads:
                thread.join()

    def _begin(self) -> dict[str, Held]:
        """Each server has heard of its ranks, which takes a step, and rests: what they hold then."""
        for number in range(2):
            client.complete(self.pair.router.url, [FIRST_BYTE_TOKEN + number] * 200, 4)
        first = {server.name: held(server) for server in self.pair.engines()}
        deadline = time.monotonic() + BACK
        while any(one.grants or one.blocks for one in first.values()) and time.monotonic() < deadline:
            first = {server.name: held(server) for server in self.pair.engines()}
        print(f"at the start: {first}", flush=True)
        return first

    def _kill_for(self, seconds: float) -> None:
        """Kill now and then, but not towards the end; look whether servers have ended by themselves."""
        self.place.gate.go_on()
        end = time.monotonic() + seconds
        quiet = end - seconds / 4
        next_kill = time.monotonic() + self.arguments.every * self._rng.random()
        while (now := time.monotonic()) < end:
            for server in self.pair.engines():
                if not server.alive:
                    self.counts.died += 1
                    self.counts.note(f"{server.name} HAS ENDED BY ITSELF\n{server.tail()}")
                    self.place.absence.begins(server.name)
                    self._start((server.name,))
            if now >= next_kill and now < quiet:
                self._kill(self._turn())
                next_kill = time.monotonic() + self.arguments.every * (0.5 + self._rng.random())
            self._over.wait(0.5)

    def _turn(self) -> tuple[str, ...]:
        """Who is killed next: each of them as often, in random order."""
        if not self._turns:
            self._turns = [PREFILL, DECODE, PREFILL, DECODE, BOTH]
            self._rng.shuffle(self._turns)
        return self._turns.pop()

    def _kill(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.place.absence.begins(name)
            with contextlib.suppress(ProcessError):  # it has just ended by itself, which the next look tells
                pairs.kill(getattr(self.pair, name))
                self.counts.kills[name] += 1
        self._over.wait(self._rng.random() * 4)
        self._start(names)

    def _start(self, names: tuple[str, ...]) -> None:
        for name in names:
            began = time.monotonic()
            self.pair.begin_again(name)
            self.place.absence.ends(name)
            self.counts.slowest_start_s = max(self.counts.slowest_start_s, time.monotonic() - began)

    def _check(self, first: Mapping[str, Held]) -> None:
        """The clients pause: everything has to come back."""
        self.counts.checks += 1
        if not self.place.gate.pause(LIMIT + 60):
            self.counts.note("NOT BACK: the clients did not come to an end")
        if self.pair.wire is not None:
            self.pair.wire.slow(None)
        for server in self.pair.engines():
            seen = [held(server)]

            def good(_: float, server: HttpServer = server, seen: list[Held] = seen) -> bool:
                seen.append(held(server))
                return seen[-1].within(first[server.name])

            began = time.monotonic()
            pairs.wait_for(lambda: 0.0, good, BACK)
            now = (
                f"{server.name} holds {seen[-1]}, at first {seen[0]}, after {time.monotonic() - began:.1f} s"
            )
            if seen[-1].within(first[server.name]):
                print(f"check {self.counts.checks}: {now}", flush=True)
            else:
                self.counts.not_back += 1
                self.counts.note(f"NOT BACK: {now}; at the start {first[server.name]}\n{server.tail()}")
        self._read_loads()

    def _wire(self) -> None:
        """Slow the KV, and spoil a bit of it, now and then."""
        rng = random.Random(f"{self.arguments.seed}/wire")  # noqa: S311 - a schedule
        wire = self.pair.wire
        while wire is not None and not self._over.wait(rng.uniform(1.0, 6.0)):
            wire.slow(rng.choice(RATES))
            if rng.random() < 0.1 and wire.flipped:
                wire.flip_one_bit()
                self.counts.flips += 1

    def _tell(self) -> None:
        """A line a minute."""
        began = time.monotonic()
        while not self._over.wait(60.0):
            self._read_loads()
            c, minutes = self.counts, (time.monotonic() - began) / 60
            print(
                f"{minutes:4.1f} min: sent {sum(c.sent.values())}, compared {c.compared}, "
                f"wrong {c.wrong}, stuck {c.stuck}, errors {sum(c.errors.values())} "
                f"(allowed {sum(c.allowed.values())}), left {c.left}, kills {sum(c.kills.values())}, "
                f"malformed {sum(c.malformed.values())}, loads {dict(c.loads)}",
                flush=True,
            )

    def _read_loads(self) -> None:
        with self.counts.lock:
            for load in self.pair.reports.new():
                self.counts.loads[
                    load.outcome if load.reason is None else f"{load.outcome} {load.reason}"
                ] += 1


def failures(result: Mapping[str, Any]) -> list[str]:
    """What does not hold."""
    found = [f"{name}: {result[name]}" for name in ("wrong", "stuck", "not_back", "died") if result[name]]
    if (rest := sum(result["errors"].values()) - sum(result["allowed"].values())) > 0:
        found.append(f"errors that are not allowed: {rest}")
    if result["noted"] and not found:
        found.append(f"notes: {result['noted']}")
    has = {
        "requests compared": result["compared"], "loads": result["loads"].get("loaded", 0),
        "clients that left": result["left"], "checks": result["checks"],
        **{f"kills of {name}": result["kills"].get(name, 0) for name in ENGINES},
        **{f"malformed {name}": result["malformed"].get(name, 0) for name in ("requests", "params")},
    }  # fmt: skip
    return found + [f"no {name} at all: the run says nothing" for name, count in has.items() if not count]


def soak(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, run, stop everything; the results."""
    model = ensure_checkpoint()
    with ForkParent(folder) as parent, Fleet() as fleet, contextlib.ExitStack() as stack:
        spec = EngineSpec("alone", prefix_caching=False)
        alone = fleet.add(pairs.start_engine(parent, model, spec, free_ports(1)[0], folder))
        pair = pairs.start_pair(SPEC, model, folder / "pair", parent=parent)
        stack.callback(pair.stop)
        alone.wait_ready(time.monotonic() + START_LIMIT)
        run = Soak(arguments, pair, alone)
        run.run()
        asked = {name: getattr(arguments, name) for name in ("seed", "minutes", "clients")}
        return run.counts.results() | {"noted": len(run.counts.notes)} | asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=25, help="seconds between kills, in the mean")
    parser.add_argument("--check", type=float, default=5, help="minutes between two looks at what came back")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--dir", type=Path, help="where logs are kept; default: a folder that is removed")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = arguments.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        result = soak(arguments, folder)
    print(json.dumps(result))
    if found := failures(result):
        sys.exit("; ".join(found))


if __name__ == "__main__":
    main()
