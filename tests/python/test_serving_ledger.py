"""What is told of a serving engine's store: by which events, and when; what has left a process' memory; and
how fast an engine computes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvik.serving_cache.ledger import Event, Ledger, RemovedBlocks, StoredBlocks
from kvik.serving_cache.plan import LINK_BYTES, Answer, Kept
from kvik.serving_cache.rate import MOST_OPEN, StepRate
from kvik.serving_cache.residents import Residents

NUMBER = 10


class Prompt:
    """A request: the links of its blocks, and the names that the engine has for them."""

    def __init__(self, text: str, blocks: int, called: str = "") -> None:
        self.links = b"".join(digest(f"{text}{place}") for place in range(blocks))
        self.names = [digest(f"{called or text} name {place}") for place in range(blocks)]


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def ledger(ranks: int = 1, **more: int) -> Ledger:
    return Ledger(ranks, lambda request, count: request.names[:count], **more)


def save(book: Ledger, prompt: Prompt, *reports: Kept, number: int = NUMBER) -> list[Event]:
    """The events of a save that each rank reports so."""
    book.saving("save", prompt, prompt.links, number)
    for rank, report in enumerate(reports):
        book.kept(rank, [report], number)
    return book.take()


def removed(events: Sequence[Event], host: bool) -> list[bytes]:
    return [
        name
        for event in events
        if isinstance(event, RemovedBlocks) and event.host == host
        for name in event.names
    ]


def test_blocks_are_told_once_and_by_runs() -> None:
    book, prompt = ledger(), Prompt("a", 4)
    assert save(book, prompt, Kept("save", 2, 4)) == [
        StoredBlocks(True, prompt, 0, 2), StoredBlocks(False, prompt, 0, 4),
    ]  # fmt: skip
    assert save(book, prompt, Kept("save", 4, 4)) == [StoredBlocks(True, prompt, 2, 4)]
    assert save(book, prompt, Kept("save", 4, 4)) == []


def test_a_block_is_told_when_all_ranks_have_it() -> None:
    book, prompt = ledger(ranks=2), Prompt("a", 4)
    book.saving("save", prompt, prompt.links, NUMBER)
    book.kept(1, [Kept("save", 4, 3)], NUMBER)
    assert book.take() == []
    book.kept(0, [Kept("save", 2, 4)], NUMBER)
    assert book.take() == [StoredBlocks(True, prompt, 0, 2), StoredBlocks(False, prompt, 0, 3)]


def test_a_block_that_one_rank_has_lost_is_removed() -> None:
    """It comes back when that rank has it again; another rank's loss of it is told once."""
    book, prompt = ledger(ranks=2), Prompt("a", 2)
    both = Kept("save", 2, 0), Kept("save", 2, 0)
    save(book, prompt, *both)
    last = prompt.links[LINK_BYTES:]
    book.kept(0, [Kept("another", 0, 0, last)], NUMBER)
    assert removed(book.take(), True) == [prompt.names[1]]
    book.kept(1, [Kept("another", 0, 0, last)], NUMBER)
    assert book.take() == []
    assert save(book, prompt, both[0], Kept("save", 1, 0)) == []
    assert save(book, prompt, *both) == [StoredBlocks(True, prompt, 1, 2)]


def test_what_a_save_itself_has_driven_out_is_not_told() -> None:
    book, prompt = ledger(), Prompt("a", 3)
    events = save(book, prompt, Kept("save", 3, 0, prompt.links[2 * LINK_BYTES :]))
    assert events == [StoredBlocks(True, prompt, 0, 2)]


def test_a_lookup_tells_what_the_server_has_and_has_not() -> None:
    book, prompt = ledger(), Prompt("a", 4)
    book.looked(prompt, prompt.links, 1, Answer(3, 1, asked=1, sure=True))
    assert book.take() == [StoredBlocks(False, prompt, 1, 3)]
    book.looked(prompt, prompt.links, 2, Answer(1, 1, asked=1, sure=False))
    assert book.take() == []
    book.looked(prompt, prompt.links, 3, Answer(2, 0, sure=True))
    assert removed(book.take(), False) == [prompt.names[2]]


def test_an_old_answer_removes_nothing_that_was_told_since_it_was_asked() -> None:
    book, prompt = ledger(), Prompt("a", 2)
    save(book, prompt, Kept("save", 0, 2), number=7)
    book.looked(prompt, prompt.links, 7, Answer(0, 0, sure=True))
    assert book.take() == []
    save(book, prompt, Kept("save", 0, 2), number=9)  # it was put again
    book.looked(prompt, prompt.links, 8, Answer(0, 0, sure=True))
    assert book.take() == []
    book.looked(prompt, prompt.links, 10, Answer(0, 0, sure=True))
    assert removed(book.take(), False) == prompt.names[::-1]
    book.looked(prompt, prompt.links, 9, Answer(2, 0, sure=True))  # asked before the one that found nothing
    assert book.take() == []


def test_a_name_is_told_with_its_first_block_and_removed_with_its_last() -> None:
    book, one, another = ledger(), Prompt("a", 1, "same"), Prompt("b", 1, "same")
    assert save(book, one, Kept("save", 1, 0)) == [StoredBlocks(True, one, 0, 1)]
    assert save(book, another, Kept("save", 1, 0)) == []
    assert save(book, another, Kept("save", 0, 0, one.links)) == []
    assert removed(save(book, one, Kept("save", 0, 0, another.links)), True) == one.names


def test_a_block_has_all_names_that_it_was_told_by() -> None:
    book, one, another = ledger(), Prompt("a", 1, "one"), Prompt("a", 1, "another")
    assert one.links == another.links
    assert save(book, one, Kept("save", 1, 0)) == [StoredBlocks(True, one, 0, 1)]
    book.looked(another, another.links, NUMBER + 1, Answer(1, 1, asked=1))  # it is found, and not saved again
    assert book.take() == [StoredBlocks(True, another, 0, 1)]
    assert removed(save(book, one, Kept("save", 0, 0, one.links)), True) == one.names + another.names


def test_a_reset_removes_all_and_what_was_on_its_way_is_not_told() -> None:
    book, prompt, late = ledger(), Prompt("a", 2), Prompt("b", 2)
    save(book, prompt, Kept("save", 2, 1))
    book.saving("late", late, late.links, NUMBER)
    book.reset()
    events = book.take()
    assert set(removed(events, True)) == set(prompt.names)
    assert removed(events, False) == prompt.names[:1]
    book.kept(0, [Kept("late", 2, 2, prompt.links)], NUMBER)
    assert book.take() == []


def test_events_that_nobody_takes_are_bounded() -> None:
    book, prompt, late = ledger(most_waiting=3), Prompt("a", 3), Prompt("b", 2)
    book.saving("save", prompt, prompt.links, NUMBER)
    book.saving("late", late, late.links, NUMBER)
    book.kept(0, [Kept("save", 3, 0), Kept("late", 2, 0)], NUMBER)
    assert book.take() == [StoredBlocks(True, prompt, 0, 3)]
    assert book.untold == 2
    assert save(book, late, Kept("save", 2, 0)) == [StoredBlocks(True, late, 0, 2)]  # with the next save


def test_what_was_told_long_ago_is_removed() -> None:
    """The end of a prompt before its beginning."""
    book, first, second = ledger(most_told=4), Prompt("a", 3), Prompt("b", 2)
    save(book, first, Kept("save", 0, 3))
    events = save(book, second, Kept("save", 0, 2))
    assert events == [StoredBlocks(False, second, 0, 2), RemovedBlocks(False, first.names[2:])]


def test_what_has_gone_is_found_from_the_ends_of_prompts_on() -> None:
    """Beside a store that drops random blocks which nothing hangs on; no more is asked than needed."""
    rng = random.Random(5)
    residents, there, after = Residents(), set[bytes](), dict[bytes, set[bytes]]()
    asked: list[bytes] = []

    def contains(keys: bytes) -> list[bool]:
        found = [keys[at : at + LINK_BYTES] for at in range(0, len(keys), LINK_BYTES)]
        asked.extend(found)
        return [key in there for key in found]

    for _ in range(300):
        texts = [f"{rng.randrange(3)}" for _ in range(rng.randrange(1, 9))]
        links = [digest("/".join(texts[: end + 1])) for end in range(len(texts))]
        residents.add(b"".join(links), b"".join(links))
        there.update(links)
        for before, link in pairwise(links):
            after.setdefault(before, set()).add(link)
        gone = set[bytes]()
        for _ in range(rng.randrange(8)):
            last = sorted(link for link in there if not after.get(link, set()) & there)
            gone.add(dropped := rng.choice(last))
            there.remove(dropped)
            if not there:
                break
        asked.clear()
        assert set(residents.gone(contains)) == gone
        assert len(residents) == len(there)
        lasts = {link for link in there if not after.get(link, set()) & there}
        assert set(asked) <= lasts | gone


@pytest.mark.parametrize(
    ("choices", "told", "loadable"),
    [
        (("faster", "faster"), "faster", 5),
        (("faster", "unknown"), "unknown", 5),
        (("faster", "slower"), "slower", 2),
        (("slower", "refresh"), "refresh", 5),
        (("refresh", "unavailable"), "unavailable", 2),
        (("", "slower"), "slower", 2),
        (("", ""), "", 5),
    ],
)
def test_all_ranks_fetch_or_none(choices: tuple[str, str], told: str, loadable: int) -> None:
    one, another = (Answer(5, 2, choice=choice) for choice in choices)
    for answer in (one.with_other(another), another.with_other(one)):
        assert (answer.choice, answer.loadable) == (told, loadable)


class TestStepRate:
    """What an engine computes in a second, by a clock that a test sets."""

    now = 0.0

    def test_steps_of_prompts_count_and_overlaps_do_not_count_twice(self) -> None:
        rate = StepRate(lambda: self.now)
        assert rate.rate is None
        rate.began([1000])
        self.now = 1.0
        rate.began([1000])  # before the first one has ended
        self.now = 2.0
        rate.ended()
        assert rate.rate == pytest.approx(500.0)
        self.now = 4.0
        rate.ended()
        assert rate.rate == pytest.approx(500.0)

    @pytest.mark.parametrize("scheduled", [[1] * 500, [100], [128] + [1] * 200, []])
    def test_steps_of_answers_or_of_little_do_not_count(self, scheduled: list[int]) -> None:
        rate = StepRate(lambda: self.now)
        rate.began(scheduled)
        self.now += 1.0
        rate.ended()
        assert rate.rate is None

    def test_the_rate_follows(self) -> None:
        rate = StepRate(lambda: self.now)
        for tokens in [500] * 5 + [5000] * 60:
            rate.began([tokens])
            self.now += 1.0
            rate.ended()
        assert rate.rate == pytest.approx(5000, rel=0.01)

    def test_steps_whose_end_is_not_told_do_not_pile_up(self) -> None:
        rate = StepRate(lambda: self.now)
        for _ in range(3 * MOST_OPEN):
            rate.began([200])
        assert len(rate._open) <= MOST_OPEN
        rate.ended()
