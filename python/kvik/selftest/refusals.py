"""Whether what must not be served is refused, by the right name, with nothing moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

import kvik
from kvik.bench.errors import CheckError
from kvik.bench.pattern import POISON
from kvik.selftest.sides import Session, Sides

PAGES, PAGE_BYTES = 4, 4096
_DEADLINE_S = 10.0
_EXPIRY_S = 0.2


def expect(begin: Callable[[], kvik.Transfer], *errors: type[kvik.KvikError]) -> str:
    """Have a transfer fail with one of these errors; `CheckError` if it is served or fails otherwise."""
    names = " or ".join(error.__name__ for error in errors)
    try:
        begin().wait()
    except errors as error:
        return f"refused as {type(error).__name__}"
    except kvik.KvikError as error:
        raise CheckError(f"it fails with {type(error).__name__}, not with {names}: {error}") from error
    raise CheckError(f"it was served, where {names} was due")


def _read(sides: Sides, ticket: str, positions: range = range(PAGES)) -> kvik.Transfer:
    local = sides.small(len(positions), PAGE_BYTES)
    return sides.engine.read(local, ticket, positions, deadline=_DEADLINE_S)


def _untouched(sides: Sides) -> None:
    if not bool((sides.memory.bytes[: PAGES * PAGE_BYTES] == POISON).all()):
        raise CheckError("a transfer that was refused has changed this side's memory")


def bad_ticket(sides: Sides) -> str:
    """Text that is no ticket, and a ticket that was cut off."""
    whole = sides.other.lend(PAGES, PAGE_BYTES).ticket
    for text in ("no ticket", whole[:-8]):
        said = expect(partial(_read, sides, text), kvik.TicketInvalid)
    return said


def consumed(sides: Sides) -> str:
    """A grant for one reader, read twice."""
    lent = sides.other.lend(PAGES, PAGE_BYTES, use=1)
    sides.judge(_read(sides, lent.ticket).wait(), PAGES * PAGE_BYTES)
    sides.memory.bytes[: PAGES * PAGE_BYTES] = POISON
    return expect(lambda: _read(sides, lent.ticket), kvik.GrantConsumed)


def expired(sides: Sides) -> str:
    """A grant whose time is over."""
    lent = sides.other.lend(PAGES, PAGE_BYTES, expiry=_EXPIRY_S)
    state = sides.other.ended(lent, _DEADLINE_S)
    if state != "expired":
        raise CheckError(f"a grant for {_EXPIRY_S} s is {state or 'still live'} after {_DEADLINE_S:g} s")
    return expect(lambda: _read(sides, lent.ticket), kvik.GrantExpired)


def revoked(sides: Sides) -> str:
    """A grant that its owner took back."""
    lent = sides.other.lend(PAGES, PAGE_BYTES)
    sides.other.revoke(lent)
    return expect(lambda: _read(sides, lent.ticket), kvik.GrantRevoked)


def wrong_right(sides: Sides) -> str:
    """A write with a grant to read."""
    ticket = sides.other.lend(PAGES, PAGE_BYTES).ticket
    local = sides.small(PAGES, PAGE_BYTES)
    return expect(
        lambda: sides.engine.write(local, ticket, range(PAGES), deadline=_DEADLINE_S), kvik.GrantWrongRight
    )


def other_pages(sides: Sides) -> str:
    """Pages that the grant does not cover."""
    ticket = sides.other.lend(PAGES, PAGE_BYTES).ticket
    return expect(lambda: _read(sides, ticket, range(PAGES, 2 * PAGES)), kvik.PageNotGranted)


REFUSALS: dict[str, Callable[[Sides], str]] = {
    "a bad ticket is refused": bad_ticket,
    "a consumed grant is refused": consumed,
    "an expired grant is refused": expired,
    "a revoked grant is refused": revoked,
    "a write by a read grant is refused": wrong_right,
    "pages that were not granted are refused": other_pages,
}


def refused(refusal: Callable[[Sides], str], sides: Sides) -> str:
    """One of them, over memory that has to stay as it is."""
    sides.memory.bytes[: PAGES * PAGE_BYTES] = POISON
    said = refusal(sides)
    _untouched(sides)
    return said


def another_secret(session: Session, sides: Sides) -> str:
    """An engine that has another secret than the other side."""
    ticket = sides.other.lend(PAGES, PAGE_BYTES).ticket
    with session.engine(secret="not " + (session.plan.secret or "")) as stranger:
        memory = np.full(PAGES * PAGE_BYTES, POISON, dtype=np.uint8)
        local = stranger.register(memory).pages(kvik.Layout(PAGES, PAGE_BYTES), range(PAGES))
        said = expect(
            lambda: stranger.read(local, ticket, range(PAGES), deadline=_DEADLINE_S), kvik.SecretMismatch
        )
        if not bool((memory == POISON).all()):
            raise CheckError("a transfer that was refused has changed this side's memory")
    return said
