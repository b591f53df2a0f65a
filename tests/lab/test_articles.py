"""What a person counted in the articles holds as arithmetic, and is paired rightly with an audit."""

import pytest

from kvik_lab.audit import audit_text
from tests.lab.articles.listing import Article, Item, articles, evaluate
from tests.lab.articles.match import match, values

ARTICLES = articles()


def test_the_counts_are_those_of_the_readme() -> None:
    counted = {
        article.name: (
            len(article.tables),
            sum(item.kind == "cell" for item in article.items),
            sum(item.kind == "claim" for item in article.items),
        )
        for article in ARTICLES
    }
    assert counted == {
        "S0": (14, 35, 21),
        "S1": (3, 50, 11),
        "S2": (15, 3, 40),
        "S3": (3, 12, 0),
        "S4": (6, 67, 4),
    }


@pytest.mark.parametrize("article", ARTICLES, ids=lambda article: article.name)
def test_every_entry_follows_or_not_as_it_says(article: Article) -> None:
    for item in (*article.items, *article.optional):
        assert item.meets(item.printed) == (item.follows == "yes"), item
        assert (item.right is None) == (item.follows == "yes"), item
        if item.right is not None:
            assert item.meets(item.right), item
        if item.follows == "cut":
            assert 0 < item.bounds()[0] - item.value < 1, item


@pytest.mark.parametrize("article", ARTICLES, ids=lambda article: article.name)
def test_every_table_is_as_wide_as_its_header(article: Article) -> None:
    for table in article.tables:
        assert all(len(row) == len(table.header) for row in table.rows), table.title


def test_bounds_come_from_the_digits_and_whole_numbers_are_exact() -> None:
    assert evaluate("0.56 / 0.13") == pytest.approx((0.555 / 0.135, 0.565 / 0.125))
    assert evaluate("3 * 9 - 2 ** 4") == (11, 11)
    assert evaluate("-(1.0 + 2)") == pytest.approx((-3.05, -2.95))
    assert evaluate("mean(1, 2, 6)") == (3, 3)
    assert evaluate("max(1.5, 2, min(7, 3))") == (3, 3)
    with pytest.raises(ValueError, match="not arithmetic"):
        evaluate("open(1)")


def test_numbers_are_read_from_what_is_printed() -> None:
    assert values("TE: 41.12 (↓22.4%)") == [41.12, 22.4]
    assert values("-1m26.002s")[0] == pytest.approx(86.002)
    assert values("1,313") == [1313.0]


def _article(items: tuple[Item, ...]) -> Article:
    return Article("T", "a test", "t.md", (), items, ())


def test_entries_are_paired_by_line_and_number_and_the_rest_is_said() -> None:
    text = """| size | A (ms) | B (ms) | B - A (ms) |
|---|---|---|---|
| 1 | 110.5 | 143.7 | 33.2 |
| 2 | 128.4 | 200.9 | 72.5 |
| 3 | 171.9 | 211.3 | 93.4 |
| 4 | 250.2 | 391.6 | 141.4 |
| 5 | 313.8 | 402.1 | 77.3 |
"""
    known = [
        Item("cell", 3, "33.2", "B - A", "143.7 - 110.5", "yes", None, None, ""),
        Item("cell", 4, "72.5", "B - A", "200.9 - 128.4", "yes", None, None, ""),
        Item("cell", 5, "93.4", "B - A", "211.3 - 171.9", "no", "39.4", None, ""),
        Item("claim", 6, "999", "nowhere", "999", "yes", None, None, ""),
    ]
    result = match(_article(tuple(known)), audit_text(text, "t"))
    assert [item.line for item, _ in result.pairs] == [3, 4, 5]
    assert [item.printed for item in result.missed] == ["999"]
    assert [check.place.line for check in result.beyond] == [7]
    assert result.recognised == 0.75
    lines = "\n".join(result.lines())
    assert "found: line 5: printed 93.4" in lines
    assert "not in the list: line 7" in lines
