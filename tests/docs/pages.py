"""The Markdown pages of the repository, as far as tests look at them: code blocks, links, headings.

A comment on the line before a code block says what the test of commands does with it:

    <!-- run: background until "listening on" -->   start it, wait for that text, end it with the page
    <!-- run: on the other host -->                 on the second of two hosts
    <!-- run: status 1 -->                          that exit status is right
    <!-- run: continues -->                         Python: joins the Python block before
    <!-- file: kvik.toml -->                        save it under that name
    <!-- not run: takes a GPU -->                   with the reason; its commands are still checked
"""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = ("sh", "python")
_MARKER = re.compile(r"<!-- (run|not run|file): (.+?) -->")
_RUN = re.compile(r'background until "(?P<until>[^"]+)"|on the other host|status (?P<status>\d+)|continues')


class PageError(Exception):
    """A page says something that the tests do not understand; the text has its place."""


@dataclass(frozen=True)
class Block:
    """One code block. `line` is that of its first fence, counted from 1."""

    page: Path
    line: int
    language: str
    text: str
    until: str | None = None
    other_host: bool = False
    status: int = 0
    continues: bool = False
    file: str | None = None
    not_run: str | None = None

    @property
    def place(self) -> str:
        """For messages: `docs/errors.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the test of commands runs it."""
        return self.language in RUNNABLE and self.not_run is None and self.file is None


@dataclass(frozen=True)
class Link:
    """One link or picture, as it is written."""

    page: Path
    line: int
    target: str
    text: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page that was read."""

    path: Path
    blocks: tuple[Block, ...]
    links: tuple[Link, ...]
    headings: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def anchors(self) -> set[str]:
        """The anchors of its headings: lower case, hyphens for spaces, numbers after repeated ones."""
        found: set[str] = set()
        for _, text in self.headings:
            slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
            number = 0
            while (anchor := slug + (f"-{number}" if number else "")) in found:
                number += 1
            found.add(anchor)
        return found


@cache
def pages() -> tuple[Page, ...]:
    """Every Markdown file that belongs to the repository."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard", "--", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    return tuple(
        read(ROOT / name) for name in sorted(set(listed.split("\0")) - {""}) if (ROOT / name).is_file()
    )


def page(name: str) -> Page:
    """The page with this path in the repository."""
    return read(ROOT / name)


@cache
def read(path: Path) -> Page:
    """Read a page."""
    blocks: list[Block] = []
    links: list[Link] = []
    headings: list[tuple[int, str]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    for index, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence" and not token.info.startswith("{"):
            comment = tokens[index - 1].content if index and tokens[index - 1].type == "html_block" else ""
            blocks.append(_block(path, line, token, comment))
        elif token.type == "inline":
            links += _links(path, line, token)
            if index and tokens[index - 1].type == "heading_open":
                headings.append((int(tokens[index - 1].tag[1]), _text(token)))
    return Page(path, tuple(blocks), tuple(links), tuple(headings))


def _block(path: Path, line: int, token: Token, comment: str) -> Block:
    block = Block(path, line, token.info.strip(), token.content)
    changes: dict[str, object] = {}
    for kind, text in _MARKER.findall(comment):
        if kind != "run":
            changes["file" if kind == "file" else "not_run"] = text
            continue
        for order in text.split(", "):
            match = _RUN.fullmatch(order)
            if match is None:
                raise PageError(f"{block.place}: no test understands {order!r}")
            if match["until"]:
                changes["until"] = match["until"]
            elif match["status"]:
                changes["status"] = int(match["status"])
            else:
                changes["continues" if order == "continues" else "other_host"] = True
    return Block(path, line, block.language, block.text, **changes)  # type: ignore[arg-type]


def _links(path: Path, line: int, token: Token) -> list[Link]:
    found = []
    for child in token.children or ():
        target = child.attrGet("href") or child.attrGet("src")
        if child.type in ("link_open", "image") and target is not None:
            found.append(Link(path, line, str(target), token.content))
    return found


def _text(token: Token) -> str:
    return "".join(child.content for child in token.children or () if child.type in ("text", "code_inline"))
