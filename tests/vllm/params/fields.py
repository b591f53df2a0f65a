"""Mutations of single fields: the top of the parameters, the `kvik` part, tickets, shape and block ids."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import kvik
from tests.vllm.params.mutations import REMOVED, Change, Mutation, Params, get, put

Edit = Callable[[Any, random.Random], Any]
Path = tuple[str | int, ...]
LAST_TOKEN = 511  # of the tiny model's vocabulary; any number that is no block id does
KVIK: Path = ("kvik",)
SHAPE: Path = ("kvik", "shapes", 0)

NUMBER: Mapping[str, Edit] = {
    "removed": lambda _v, _r: REMOVED,
    "null": lambda _v, _r: None,
    "a string": lambda v, _r: str(v),
    "a list": lambda v, _r: [v],
    "minus one": lambda _v, _r: -1,
    "zero": lambda _v, _r: 0,
    "one more": lambda v, _r: v + 1,
    "one less": lambda v, _r: v - 1,
    "twice": lambda v, _r: v * 2,
    "half": lambda v, _r: v // 2,
    "huge": lambda _v, _r: 2**63,
}
TEXT: Mapping[str, Edit] = {
    "removed": lambda _v, _r: REMOVED,
    "null": lambda _v, _r: None,
    "a number": lambda _v, _r: 7,
    "empty": lambda _v, _r: "",
    "long": lambda _v, _r: "x" * 3000,
    "one character changed": lambda v, r: _one_changed(v, r),
    "cut": lambda v, _r: v[: len(v) // 2],
}
FLAG: Mapping[str, Edit] = {
    "removed": lambda _v, _r: REMOVED,
    "null": lambda _v, _r: None,
    "turned": lambda v, _r: not v,
    "a list": lambda v, _r: [v],
}
OBJECT: Mapping[str, Edit] = {
    "removed": lambda _v, _r: REMOVED,
    "null": lambda _v, _r: None,
    "a list": lambda v, _r: [v],
    "empty": lambda v, _r: type(v)(),
    "a string": lambda v, _r: str(v),
}
# Nothing reads these, whatever stands there.
UNREAD = {
    "remote_port": NUMBER, "tp_size": NUMBER, "pp_size": NUMBER, "dcp_size": NUMBER, "remote_host": TEXT,
    "transfer_mode": TEXT,
    "remote_blocks_expiry_time": {"a number": lambda _v, _r: 1.0, "null": FLAG["null"]},
}  # fmt: skip
# Names for people: any text of a usual length does.
NAMED = frozenset({"one character changed", "cut"})


def fields() -> list[Mutation]:
    """Every field outside the shape, in every way."""
    found = [
        _field("fields", (name,), edit, edits[edit], loads=True)
        for name, edits in UNREAD.items()
        for edit in edits
    ]
    found += _each("fields", ("do_remote_prefill",), FLAG)
    found += _each("fields", ("do_remote_decode",), FLAG, harmless=frozenset(FLAG))
    found += _each("fields", ("remote_num_tokens",), NUMBER)
    for name in ("remote_request_id", "remote_engine_id"):
        found += _each("fields", (name,), TEXT, harmless=NAMED)
    found += _each("fields", KVIK, OBJECT)
    found += _each("fields", (*KVIK, "version"), NUMBER)
    found += _each("fields", (*KVIK, "digest"), TEXT)
    found += _each("fields", (*KVIK, "namespace"), TEXT)
    found += _each("fields", (*KVIK, "model"), TEXT, harmless=NAMED)
    found += _each(
        "fields", (*KVIK, "expires_in"), NUMBER, harmless=frozenset({"zero", "one more", "one less", "half"})
    )
    found += [
        Mutation("fields", f"an unknown key in {'.'.join(map(str, path)) or 'the parameters'}",
                 _with((*path, "more"), lambda: {"a": [1]}), loads=True)
        for path in ((), KVIK, SHAPE, (*KVIK, "tickets", 0))
    ]  # fmt: skip
    return found


def tickets() -> list[Mutation]:
    """The list of tickets, and every field of a ticket."""
    entry: Path = (*KVIK, "tickets", 0)
    found = _each("tickets", (*KVIK, "tickets"), OBJECT)
    found += _each("tickets", (*KVIK, "tickets"), {
        "twice": lambda v, _r: v + v,
        "one of rank 1 added": lambda v, _r: [*v, {**v[0], "tp": 1}],
        "one that is null added": lambda v, _r: [*v, None],
        "5000 of them": lambda v, _r: v * 5000,
    })  # fmt: skip
    found += _each("tickets", entry, OBJECT)
    for name in ("group", "tp", "pp"):
        found += _each("tickets", (*entry, name), NUMBER)
    found += _each("tickets", (*entry, "dp"), NUMBER, harmless=frozenset({"zero", "one more"}))
    text = (*entry, "ticket")
    found += _each("tickets", text, TEXT)
    found += _each("tickets", text, {
        "another character changed": lambda v, r: _one_changed(v, r),
        "longer": lambda v, _r: v + "A",
        "the grant id of nobody": lambda v, r: _with_grant(v, r.randbytes(16).hex()),
    }, slow=True)  # fmt: skip
    found += [
        Mutation("tickets", f"the grant id of another prompt on server {server}, in the own ticket",
                 _other_grant, ("fresh", "other"), (0, server), kept=True, slow=bool(server))
        for server in (0, 1)
    ]  # fmt: skip
    return found


def shape() -> list[Mutation]:
    """Every field of the shape, and shapes that are changed so that they agree with themselves."""
    found = _each("shape", SHAPE[:-1], OBJECT)
    found += _each("shape", SHAPE, OBJECT)
    found += _each("shape", (*SHAPE, "stages"), OBJECT)
    found += _each("shape", (*KVIK, "firsts"), OBJECT)
    for path in ((*KVIK, "firsts", 0), (*SHAPE, "window")):
        found += _each("shape", path, NUMBER, harmless=frozenset({"zero"}))
    for name in ("layers", "kv_heads", "content", "tp", "heads", "block_tokens", "block_bytes"):
        found += _each("shape", (*SHAPE, name), NUMBER)
    for name in ("kind", "dtype", "order"):
        found += _each("shape", (*SHAPE, name), TEXT)
    said: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "blocks of half the tokens": lambda s: _blocks(s, s["block_tokens"] // 2),
        "blocks of twice the tokens": lambda s: _blocks(s, s["block_tokens"] * 2),
        "blocks of one token": lambda s: _blocks(s, 1),
        "twice the ranks, half the heads each": lambda s: _heads(s, 2),
        "as many ranks as heads": lambda s: _heads(s, s["kv_heads"]),
        "half the layers": lambda s: {"layers": s["layers"] // 2},
        "half the heads in all": lambda s: {
            "kv_heads": s["kv_heads"] // 2, "heads": s["heads"] // 2, "block_bytes": s["block_bytes"] // 2
        },
        "half the content, twice the heads": lambda s: {
            "content": s["content"] // 2, "kv_heads": s["kv_heads"] * 2, "heads": s["heads"] * 2
        },
        "half the content, twice the tokens": lambda s: {
            "content": s["content"] // 2, "block_tokens": s["block_tokens"] * 2
        },
        "two bytes an element": lambda s: {"dtype": "bfloat16", "block_bytes": s["block_bytes"] // 2},
        "mla": lambda _s: {"kind": "mla", "kv_heads": 1, "heads": 1},
        "HNC": lambda _s: {"order": "HNC"},
        "NHC": lambda _s: {"order": "NHC"},
        "HCN": lambda _s: {"order": "HCN"},
        "another kernel": lambda _s: {"order": "H[cpu amx]"},
    }  # fmt: skip
    for name, says in said.items():
        found.append(Mutation("shape", name, _shaped(says)))
        found.append(Mutation("shape", f"{name}, and the ids to it", _shaped(says, ids=True)))
    return found


def block_ids(servers: int) -> list[Mutation]:
    """`remote_block_ids`: permuted, repeated, shortened, extended, and none. Nothing may read them."""
    edits: dict[str, Edit] = {
        "reversed": lambda v, _r: [v[0][::-1]],
        "turned by one": lambda v, _r: [[*v[0][1:], v[0][0]]],
        "the first two swapped": lambda v, _r: [[v[0][1], v[0][0], *v[0][2:]]],
        "the last two swapped": lambda v, _r: [[*v[0][:-2], v[0][-1], v[0][-2]]],
        "shuffled": lambda v, r: [_shuffled(v[0], r)],
        "the first repeated": lambda v, _r: [[v[0][0]] * len(v[0])],
        "the last repeated": lambda v, _r: [[v[0][-1]] * len(v[0])],
        "the second is the first": lambda v, _r: [[v[0][0], v[0][0], *v[0][2:]]],
        "without the first": lambda v, _r: [v[0][1:]],
        "without the last": lambda v, _r: [v[0][:-1]],
        "only the first": lambda v, _r: [v[0][:1]],
        "with one more": lambda v, _r: [[*v[0], v[0][-1] + 1]],
        "with one more in front": lambda v, _r: [[v[0][-1] + 1, *v[0]]],
        "twice": lambda v, _r: [v[0] + v[0]],
        "each one more": lambda v, _r: [[block + 1 for block in v[0]]],
        "each one less": lambda v, _r: [[max(block - 1, 0) for block in v[0]]],
        "zeros": lambda v, _r: [[0] * len(v[0])],
        "random": lambda v, r: [[r.randrange(LAST_TOKEN) for _ in v[0]]],
        "huge": lambda v, _r: [[2**40] * len(v[0])],
        "negative": lambda v, _r: [[-block - 1 for block in v[0]]],
        "strings": lambda v, _r: [[str(block) for block in v[0]]],
        "fractions": lambda v, _r: [[block + 0.5 for block in v[0]]],
        "null": lambda _v, _r: None,
        "removed": lambda _v, _r: REMOVED,
        "empty": lambda _v, _r: [],
        "an empty group": lambda _v, _r: [[]],
        "two groups": lambda v, _r: [v[0], v[0]],
        "flat": lambda v, _r: v[0],
        "nested": lambda v, _r: [v],
        "100000 of them": lambda v, _r: [v[0] * 100_000],
    }
    found = _each("block ids", ("remote_block_ids",), edits, harmless=frozenset(edits))
    for name in ("reversed", "shuffled", "turned by one", "the first repeated"):
        for server in range(servers):
            found.append(
                Mutation("block ids", f"{name}, of another prompt with its tickets on server {server}",
                         _others(edits[name]), ("fresh", "other"), (0, server), kept=True)
            )  # fmt: skip
    return found


def _each(
    family: str,
    path: Path,
    edits: Mapping[str, Edit],
    harmless: frozenset[str] = frozenset(),
    slow: bool = False,
) -> list[Mutation]:
    return [
        _field(family, path, name, edit, loads=name in harmless, slow=slow) for name, edit in edits.items()
    ]


def _field(
    family: str, path: Path, name: str, edit: Edit, loads: bool = False, slow: bool = False
) -> Mutation:
    def change(offers: list[Params], rng: random.Random) -> Params:
        put(offers[0], path, edit(get(offers[0], path), rng))
        return offers[0]

    return Mutation(family, f"{'.'.join(map(str, path))}: {name}", change, loads=loads, slow=slow)


def _with(path: Path, value: Callable[[], Any]) -> Change:
    def change(offers: list[Params], _rng: random.Random) -> Params:
        put(offers[0], path, value())
        return offers[0]

    return change


def _others(edit: Edit) -> Change:
    def change(offers: list[Params], rng: random.Random) -> Params:
        own, other = offers
        own["remote_block_ids"] = edit(other["remote_block_ids"], rng)
        own["kvik"]["tickets"] = other["kvik"]["tickets"]
        return own

    return change


def _shaped(says: Callable[[dict[str, Any]], dict[str, Any]], ids: bool = False) -> Change:
    """Change the shape; with `ids` also tickets and block ids, so that their numbers fit it."""

    def change(offers: list[Params], _rng: random.Random) -> Params:
        made = offers[0]
        part = made["kvik"]
        (shape,) = part["shapes"]
        shape |= says(dict(shape))
        if ids:
            tokens, ranks = shape["block_tokens"], shape["tp"]
            part["tickets"] = [
                {**part["tickets"][rank % len(part["tickets"])], "tp": rank} for rank in range(ranks)
            ]
            have = made["remote_block_ids"][0]
            count = -(-made["remote_num_tokens"] // max(tokens, 1))
            made["remote_block_ids"] = [[have[number % len(have)] for number in range(count)]]
            made["tp_size"] = ranks
        return made

    return change


def _blocks(shape: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {"block_tokens": tokens, "block_bytes": shape["block_bytes"] // shape["block_tokens"] * tokens}


def _heads(shape: dict[str, Any], ranks: int) -> dict[str, Any]:
    more = max(1, ranks // shape["tp"])
    return {"tp": ranks, "heads": shape["heads"] // more, "block_bytes": shape["block_bytes"] // more}


def _other_grant(offers: list[Params], _rng: random.Random) -> Params:
    own, other = offers
    grant = kvik.Ticket(other["kvik"]["tickets"][0]["ticket"]).grant_id
    entry = own["kvik"]["tickets"][0]
    entry["ticket"] = _with_grant(entry["ticket"], grant)
    return own


def _with_grant(ticket: str, grant_id: str) -> str:
    return str(kvik.Ticket(ticket).with_grant(grant_id, 60.0))


def _one_changed(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    letter = rng.choice([c for c in "0123456789abcdefghjkmnpqrstvwxyz" if c != text[place].lower()])
    return text[:place] + letter + text[place + 1 :]


def _shuffled(values: list[int], rng: random.Random) -> list[int]:
    """In another order, where there is one."""
    mixed = list(values)
    while mixed == values and len(values) > 1:
        rng.shuffle(mixed)
    return mixed
