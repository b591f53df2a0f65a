"""What a mutation is, and the whole catalogue of them."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Params = dict[str, Any]
Change = Callable[[list[Params], random.Random], Any]


@dataclass(frozen=True)
class Mutation:
    """One way to change valid parameters.

    change: gets copies of the parameters of all prompts and returns what is sent with the first one.
    prompts: how each prompt is made, see `trial.prompts_of`. servers: which prefill server computes each.
    salts: of each prompt at its prefill; the first one's is asked with `asked_salt` where that is not "same".
    loads: all of it must load. forbidden: nothing of it may load, although the tokens would be right.
    batch: the first two prompts go in one request. kept: the other prompts' own offers must still load.
    slow: the owner may wait for the grant until the load's deadline.
    """

    family: str
    name: str
    change: Change
    prompts: tuple[str, ...] = ("fresh",)
    servers: tuple[int, ...] = (0,)
    salts: tuple[str | None, ...] = (None,)
    asked_salt: str | None = "same"
    loads: bool = False
    forbidden: bool = False
    batch: bool = False
    kept: bool = False
    slow: bool = False


def unchanged(offers: list[Params], _rng: random.Random) -> Params:
    """The first prompt's own parameters."""
    return offers[0]


def intact(servers: int) -> list[Mutation]:
    """Nothing is changed: everything has to load."""
    return [
        Mutation("intact", f"prompt {kind}, server {server}", unchanged, (kind,), (server,), loads=True)
        for server, kind in itertools.product(range(servers), ("fresh", "whole blocks", "short"))
    ]


def salts() -> list[Mutation]:
    """Offers computed under one cache salt, asked for under another."""
    cases: list[tuple[str | None, str | None]] = [("a", "b"), ("a", None), (None, "b")]
    found = [
        Mutation("salts", f"prefilled with {given}, asked with {asked}", unchanged, salts=(given,),
                 asked_salt=asked, forbidden=True)
        for given, asked in cases
    ]  # fmt: skip
    found += [
        Mutation("salts", f"the same prompt's offer with salt {theirs}, asked with {ours}: {_named(parts)}",
                 _swap(parts), ("fresh", "same"), (0, 0), (ours, theirs), forbidden=True, kept=True)
        for ours, theirs in cases
        for parts in (("tickets", "ids"), ("tickets",), ("tickets", "ids", "digest"))
    ]  # fmt: skip
    found.append(Mutation("salts", "the right salt", unchanged, salts=("a",), loads=True))
    return found


def batches() -> list[Mutation]:
    """Two prompts in one request with the parameters of one of them."""
    return [
        Mutation("batch", f"two prompts ({kind}), server {server}", unchanged, ("fresh", kind),
                 (server, server), batch=True)
        for kind, server in itertools.product(("other", "shares", "longer", "shorter", "same"), (0,))
    ]  # fmt: skip


# Parts of the parameters that are swapped together.
COMPONENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tickets": (("kvik", "tickets"),),
    "ids": (("remote_block_ids",),),
    "digest": (("kvik", "digest"),),
    "length": (("remote_num_tokens",),),
    "names": (("remote_request_id",), ("remote_engine_id",), ("remote_host",), ("remote_port",)),
}


def swaps_of_two(servers: int) -> list[Mutation]:
    """Every set of parts from another prompt's parameters."""
    found = []
    sets = [c for size in range(1, 6) for c in itertools.combinations(COMPONENTS, size)]
    for parts, kind, server in itertools.product(sets, ("other", "shares"), range(servers)):
        name = f"{_named(parts)} of a prompt ({kind}) on server {server}"
        kept = "tickets" in parts
        found.append(Mutation("two prompts", name, _swap(parts), ("fresh", kind), (0, server), kept=kept))
    found += [
        Mutation("two prompts", f"the offer of {what}, with the tickets of a prompt that begins alike",
                 _from_each({"tickets": 2}, base=1), ("fresh", kind, "shares"), (0, server, 0), kept=True)
        for kind, what in (("two blocks", "its first two blocks"), ("shorter", "its beginning"))
        for server in range(servers)
    ]  # fmt: skip
    wide = [c for c in sets if "tickets" in c and ("ids" in c or "length" in c)]
    for parts, kind in itertools.product(wide, ("longer", "shorter", "other length")):
        name = f"{_named(parts)} of a prompt ({kind})"
        found.append(Mutation("two lengths", name, _swap(parts), ("fresh", kind), (0, 0)))
    return found


def swaps_of_three(servers: int) -> list[Mutation]:
    """Each part from one of three prompts' parameters, with all three among them."""
    found = []
    for of in itertools.product(range(3), repeat=len(COMPONENTS)):
        if len(set(of)) < 3 or of[0] == 0:
            continue
        placed = (0, (of[1] + 1) % servers, (of[2] + of[3]) % servers)
        parts = dict(zip(COMPONENTS, of, strict=True))
        name = f"{', '.join(f'{part} of {number}' for part, number in parts.items())} on {placed}"
        found.append(
            Mutation("three prompts", name, _from_each(parts), ("fresh", "other", "other"), placed, kept=True)
        )
    return found


def _named(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def _swap(parts: Iterable[str]) -> Change:
    return _from_each(dict.fromkeys(parts, 1))


def _from_each(parts: dict[str, int], base: int = 0) -> Change:
    def change(offers: list[Params], _rng: random.Random) -> Params:
        made = deepcopy(offers[base])
        for part, number in parts.items():
            for path in COMPONENTS[part]:
                put(made, path, get(offers[number], path))
        return made

    return change


def get(params: Any, path: Sequence[str | int]) -> Any:
    """What lies at a path."""
    for key in path:
        params = params[key]
    return params


def put(params: Any, path: Sequence[str | int], value: Any) -> None:
    """Set what lies at a path; `REMOVED` takes it away."""
    *before, last = path
    holder = get(params, before)
    if value is REMOVED:
        del holder[last]
    else:
        holder[last] = value


REMOVED = object()
