"""The README says the same in three languages, as far as its form shows it."""

from collections import Counter

import pytest
from markdown_it import MarkdownIt

from tests.docs.pages import ROOT, Page, page

ENGLISH = "README.md"
OTHERS = ("README.ja.md", "README.zh.md")


def form(name: str) -> Counter[str]:
    """How many paragraphs, entries of lists, rows and cells of tables there are."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse((ROOT / name).read_text(encoding="utf-8"))
    return Counter(token.type for token in tokens if token.type.endswith("_open"))


def led_to(readme: Page) -> list[str]:
    """Where its links go, apart from those to the other languages."""
    return [link.target for link in readme.links if not link.target.startswith("README")]


@pytest.mark.parametrize("name", OTHERS)
def test_a_translation_has_the_same_form(name: str) -> None:
    """Headings of the same levels, the same code, the same links, as many paragraphs and rows."""
    english, other = page(ENGLISH), page(name)
    assert [level for level, _ in other.headings] == [level for level, _ in english.headings]
    assert [(b.language, b.text) for b in other.blocks] == [(b.language, b.text) for b in english.blocks]
    assert led_to(other) == led_to(english)
    assert form(name) == form(ENGLISH)


@pytest.mark.parametrize("name", [ENGLISH, *OTHERS])
def test_each_leads_to_the_others(name: str) -> None:
    """At the top, before the text."""
    first = [link.target for link in page(name).links[:2]]
    assert sorted(first) == sorted({ENGLISH, *OTHERS} - {name})
