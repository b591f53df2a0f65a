"""Images by their bytes, and what a server's own caches may have under their names."""

from __future__ import annotations

import threading
import time
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvik.handover.items import Items, NoContentError

PATIENCE_S = 60.0


class Data(UserDict[str, bytes]):
    """An engine's object for the data of an item."""


def asking(request_id: str, *named: tuple[str, Data]) -> Any:
    """A request with these items."""
    features = [SimpleNamespace(identifier=name, modality="image", data=data) for name, data in named]
    return SimpleNamespace(request_id=request_id, mm_features=features)


def data(text: bytes) -> Data:
    return Data(data=text)


def reading(feature: Any) -> bytes:
    found: bytes = feature.data["data"]
    if found == b"nothing":
        raise NoContentError("nothing is there")
    return found


def until(good: Callable[[], bool]) -> None:
    """Wait for a thread that says nothing when it is done."""
    end = time.monotonic() + PATIENCE_S
    while not good():
        assert time.monotonic() < end
        time.sleep(0.001)


def read(items: Items, request: Any) -> list[bytes]:
    """The contents of a request, once they are read."""
    until(lambda: items.contents(request) is not None)
    found = items.contents(request)
    assert found is not None
    return found


def test_content_is_of_bytes_and_not_of_names() -> None:
    items = Items(reading)
    one, same, other = (data(text) for text in (b"one", b"one", b"other"))
    first = read(items, asking("1", ("a", one), ("b", other)))
    assert read(items, asking("2", ("c", same), ("a", one))) == [first[0], first[0]]
    assert first[0] != first[1]


def test_an_object_is_read_once() -> None:
    """As long as it is there: what comes later at its place in memory is another one."""
    count = 0

    def counting(feature: Any) -> bytes:
        nonlocal count
        count += 1
        return reading(feature)

    items, one = Items(counting), data(b"one")
    first = read(items, asking("1", ("a", one)))
    assert read(items, asking("2", ("a", one))) == first
    assert count == 1
    assert read(items, asking("3", ("a", data(b"one")))) == first
    assert read(items, asking("4", ("b", one))) == first
    assert count == 3


def test_a_name_of_two_contents_is_certain_no_more() -> None:
    """Also for who came before, and when the first content comes again."""
    items = Items(reading)
    before = asking("1", ("a", data(b"one")), ("b", data(b"b")))
    read(items, before)
    assert items.certain(before)
    read(items, asking("2", ("a", data(b"two"))))
    again = asking("3", ("a", data(b"one")))
    read(items, again)
    for one in (before, again):
        with pytest.raises(NoContentError, match="image 'a' was not always the same here"):
            items.certain(one)
    apart = asking("4", ("b", data(b"b")))
    read(items, apart)
    assert items.certain(apart)


def test_what_is_not_read_yet_may_be_another_content() -> None:
    """And it may have been computed with, even where its request is gone."""
    gate, came = threading.Event(), threading.Event()

    def waiting(feature: Any) -> bytes:
        if feature.data["data"] == b"late":
            came.set()
            assert gate.wait(PATIENCE_S)
        return reading(feature)

    items, one = Items(waiting), asking("1", ("a", data(b"one")))
    read(items, one)
    late = asking("2", ("a", data(b"late")))
    items.arrived(late)
    items.forget(late)
    assert came.wait(PATIENCE_S)
    assert not items.certain(one)
    assert items.contents(one)
    gate.set()

    def certain() -> bool:
        try:
            return items.certain(one)
        except NoContentError:
            return True

    until(certain)
    with pytest.raises(NoContentError):
        items.certain(one)


def test_what_cannot_be_read_leaves_its_name_uncertain() -> None:
    items, one = Items(reading), asking("1", ("a", data(b"one")))
    read(items, one)
    nothing = asking("2", ("a", data(b"nothing")))
    with pytest.raises(NoContentError, match="nothing is there"):
        read(items, nothing)
    with pytest.raises(NoContentError, match="was not always the same"):
        items.certain(one)


def test_what_two_servers_compare() -> None:
    """Bytes where they can be read, read at once if need be; else the name."""
    gate, came = threading.Event(), threading.Event()

    def waiting(feature: Any) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            came.set()
            assert gate.wait(PATIENCE_S)
        return reading(feature)

    items = Items(waiting)
    one, other = asking("1", ("a", data(b"one"))), asking("2", ("b", data(b"one")), ("c", data(b"nothing")))
    items.arrived(one)
    assert came.wait(PATIENCE_S)
    assert not items.are_read(one)
    told = items.told(one)
    assert items.are_read(one)
    assert items.certain(one)
    assert items.told(other) == [*told, "named c"]
    gate.set()
    until(lambda: not items._waiting.qsize())
    assert items.certain(other)
    assert Items(reading).told(asking("1", ("b", data(b"two")))) != told


def test_names_are_bounded_and_the_longest_unused_is_forgotten() -> None:
    """A request that is there still is uncertain then."""
    items, kept, lost = Items(reading, most_names=2), data(b"kept"), data(b"lost")
    first, second = asking("1", ("kept", kept)), asking("2", ("lost", lost))
    for request in (first, second, asking("3", ("kept", kept)), asking("4", ("new", data(b"new")))):
        read(items, request)
    assert items.certain(first)
    with pytest.raises(NoContentError):
        items.certain(second)
