"""Mutations for servers with two ranks: tickets swapped between them, and between prompts rank by rank."""

import itertools
import random
from collections.abc import Callable
from typing import Any

from tests.vllm.params.mutations import Mutation, Params, intact

Entries = list[dict[str, Any]]


def ranks() -> list[Mutation]:
    """All of them; one prefill server."""
    found = intact(1)
    within: dict[str, Callable[[Entries], Entries]] = {
        "their texts swapped": lambda e: _texts(e, 1, 0),
        "both of rank 0": lambda e: _texts(e, 0, 0),
        "both of rank 1": lambda e: _texts(e, 1, 1),
        "their rank numbers swapped": lambda e: [{**e[0], "tp": 1}, {**e[1], "tp": 0}],
        "both are called rank 0": lambda e: [e[0], {**e[1], "tp": 0}],
        "both are called rank 1": lambda e: [{**e[0], "tp": 1}, e[1]],
        "rank 1 is called rank 2": lambda e: [e[0], {**e[1], "tp": 2}],
        "only rank 0": lambda e: e[:1],
        "only rank 1": lambda e: e[1:],
        "a third of rank 0": lambda e: [*e, {**e[0], "tp": 2}],
        "rank 0 is called of the second stage": lambda e: [{**e[0], "pp": 1}, e[1]],
        "rank 1 is called of the second group": lambda e: [e[0], {**e[1], "group": 1}],
        "rank 1 is called of the second replica": lambda e: [e[0], {**e[1], "dp": 1}],
    }
    harmless = {"rank 1 is called of the second replica"}
    found += [
        Mutation("two ranks", f"tickets: {name}", _tickets(edit), loads=name in harmless)
        for name, edit in within.items()
    ]
    found.append(Mutation("two ranks", "tickets: in another order", _tickets(lambda e: e[::-1]), loads=True))
    for which, swapped, ids, kind in itertools.product(
        ((0,), (1,), (0, 1)), (False, True), (False, True), ("other", "shares")
    ):
        name = f"rank {' and '.join(map(str, which))} of a prompt ({kind})"
        name += ", from the other rank" * swapped + ", with its ids" * ids
        found.append(
            Mutation("two ranks", name, _of_other(which, swapped, ids), ("fresh", kind), (0, 0), kept=True)
        )
    said: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "one rank with all heads": lambda s: {
            "tp": 1, "heads": s["kv_heads"], "block_bytes": s["block_bytes"] * 2
        },
        "four ranks": lambda s: {"tp": 4, "heads": s["heads"] // 2, "block_bytes": s["block_bytes"] // 2},
        "one head less a rank": lambda s: {"heads": s["heads"] - 1},
        "half the heads in all": lambda s: {
            "kv_heads": s["kv_heads"] // 2, "heads": s["heads"] // 2, "block_bytes": s["block_bytes"] // 2
        },
    }  # fmt: skip
    for name, says in said.items():
        for take in (False, True):
            found.append(
                Mutation("two ranks", f"shape: {name}{', and the tickets to it' * take}", _said(says, take))
            )
    return found


def _texts(entries: Entries, *of: int) -> Entries:
    return [{**entry, "ticket": entries[other]["ticket"]} for entry, other in zip(entries, of, strict=True)]


def _tickets(edit: Callable[[Entries], Entries]) -> Callable[[list[Params], random.Random], Params]:
    def change(offers: list[Params], _rng: random.Random) -> Params:
        offers[0]["kvik"]["tickets"] = edit(offers[0]["kvik"]["tickets"])
        return offers[0]

    return change


def _of_other(
    which: tuple[int, ...], swapped: bool, ids: bool
) -> Callable[[list[Params], random.Random], Params]:
    def change(offers: list[Params], _rng: random.Random) -> Params:
        own, other = offers
        for rank in which:
            source = 1 - rank if swapped else rank
            own["kvik"]["tickets"][rank]["ticket"] = other["kvik"]["tickets"][source]["ticket"]
        if ids:
            own["remote_block_ids"] = other["remote_block_ids"]
        return own

    return change


def _said(
    says: Callable[[dict[str, Any]], dict[str, Any]], take: bool
) -> Callable[[list[Params], random.Random], Params]:
    def change(offers: list[Params], _rng: random.Random) -> Params:
        part = offers[0]["kvik"]
        (shape,) = part["shapes"]
        shape |= says(dict(shape))
        if take:
            entries = part["tickets"]
            part["tickets"] = [{**entries[rank % 2], "tp": rank} for rank in range(max(1, shape["tp"]))]
        return offers[0]

    return change
