"""Links lead somewhere: between pages by file and anchor, in the site by page and id.

Tests reach this machine only, so an address in the world is checked as far as its text goes.
"""

import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT, Page, pages, read

SITE = Path(os.environ.get("KVIK_TEST_SITE", ROOT / "target" / "docs"))
# Made by tools that do not call themselves ours, with links of their own into the world.
MADE_BY_OTHERS = ("rust", "_static")
_HOST = re.compile(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}(:\d+)?")


def outside(target: str) -> bool:
    """Whether it is an address in the world."""
    return bool(urlsplit(target).scheme)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Page) -> None:
    """To a file of the repository, and to a heading in it where one is named."""
    wrong = []
    for link in page.links:
        if outside(link.target):
            continue
        name, _, anchor = unquote(link.target).partition("#")
        there = (page.path.parent / name).resolve() if name else page.path
        if not there.exists() or not there.is_relative_to(ROOT):
            wrong.append(f"{link.place}: there is no {link.target}")
        elif anchor and (there.suffix != ".md" or anchor not in read(there).anchors):
            wrong.append(f"{link.place}: no heading of {name or page.name} has the anchor #{anchor}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_addresses_in_the_world_are_well_formed(page: Page) -> None:
    """https, with the name of a host and without spaces."""
    for link in page.links:
        if outside(link.target):
            parts = urlsplit(link.target)
            fine = parts.scheme == "https" and _HOST.fullmatch(parts.netloc) and " " not in link.target
            assert fine, f"{link.place}: {link.target}"


class Html(HTMLParser):
    """The ids of a page of the site, and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Collect."""
        for name, value in attributes:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


@cache
def html(path: Path) -> Html:
    """Read a page of the site."""
    found = Html()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def site_pages() -> list[Path]:
    """The pages of the site that are made from ours."""
    inner = (path.relative_to(SITE) for path in SITE.rglob("*.html"))
    return sorted(path for path in inner if path.parts[0] not in MADE_BY_OTHERS)


def test_every_page_is_in_the_site() -> None:
    """The site is there, and so is each page of `docs`."""
    assert (SITE / "index.html").is_file(), f"no site in {SITE}: `make docs` builds it"
    for page in pages():
        if page.path.is_relative_to(ROOT / "docs"):
            made = SITE / page.path.relative_to(ROOT / "docs").with_suffix(".html")
            assert made.is_file(), f"{page.name} is not in the site"
            assert made.stat().st_mtime >= page.path.stat().st_mtime, (
                f"the site has an older {page.name}: make docs"
            )


def test_links_of_the_site_lead_somewhere() -> None:
    """To a file of the site, and to an id in it where one is named."""
    wrong = []
    for name in site_pages():
        page = html(SITE / name)
        for target in page.targets:
            if outside(target) or (target.startswith("#") and len(target) == 1):
                continue
            path, _, anchor = unquote(target.split("?")[0]).partition("#")
            there = (SITE / name).parent / path if path else SITE / name
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                wrong.append(f"{name}: there is no {target}")
            elif anchor and there.suffix == ".html" and anchor not in html(there.resolve()).ids:
                wrong.append(f"{name}: {path or name} has no #{anchor}")
    assert not wrong, "\n".join(sorted(set(wrong)))
