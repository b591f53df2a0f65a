"""What `docs/architecture.md` names is there, and it names all threads, locks and arrows between crates."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
LONGEST = 600  # lines of a page
WHOLE = ("crates/", "python/", "tests/", "tools/")  # of paths that are written from the repository's root
_NAMED = re.compile(r"`([\w./-]+\.(?:rs|py))(?:::(\w+))?`")
_MUTANT = re.compile(r"`([\w-]+\.patch)`")
_LOCK = re.compile(r"(?<!&)\b(?:Mutex|RwLock)<")
_STRUCT = re.compile(r"(?:pub(?:\([a-z]+\))? )?struct (\w+)")
_FIELD = re.compile(r"\s+(?:pub(?:\([a-z]+\))? )?(\w+): ")
_ITEM = re.compile(r"\s*(?:pub(?:\([a-z]+\))? )?(?:type|static) (\w+)")
_SPAWNED = re.compile(r'\bspawn_named\(\s*(?:&format!\(\s*)?"(kvik-[^"]+)"')
_STARTED = re.compile(r"(?<!fn )\bspawn_named\(")
_BUILT = re.compile(r'(?:\.name\(\s*|fn thread_name\(\)[^"]*)"(kvik-[^"]+)"')
_PYTHON = re.compile(r'(?:threading\.Thread\([^"]*name=|ThreadPoolExecutor\([^"]*)"(kvik-[^"]+)"')


def section(title: str) -> str:
    """The text under a heading of the second level."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {title!r}"
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The cells of all rows of a section's tables, without their heads."""
    table: list[list[str]] = []
    for line in section(title).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|---"):
            table.pop()
        elif line.startswith("|"):
            table.append(cells)
    assert table, f"section {title!r} has no table"
    return table


def place(name: str) -> Path:
    """The file that the page means: `kvik-proto/node.rs` is `crates/kvik-proto/src/node.rs`."""
    if name.startswith(WHOLE):
        return ROOT / name
    crate, _, rest = name.partition("/")
    return ROOT / "crates" / crate / "src" / rest


def sources() -> Iterator[tuple[str, str]]:
    """Each source of a crate, as the page writes its name, without what only tests compile."""
    for path in sorted((ROOT / "crates").glob("*/src/**/*.rs")):
        if path.stem == "tests" or path.stem.endswith("_tests"):
            continue
        crate, _, *rest = path.relative_to(ROOT / "crates").parts
        text = path.read_text(encoding="utf-8")
        yield "/".join([crate, *rest]), re.split(r"#\[cfg\([^\n]*\btest\b[^\n]*\)\]\nmod ", text)[0]


def locks() -> set[tuple[str, str]]:
    """File and name of each lock that a type of the crates owns: `Struct.field`, or the name of an alias."""
    found = set()
    for name, text in sources():
        struct = ""
        for line in text.splitlines():
            struct = start[1] if (start := _STRUCT.match(line.strip())) else struct
            if not _LOCK.search(line) or line.strip().startswith("//") or re.search(r"\bfn\b", line):
                continue
            field, item = _FIELD.match(line), _ITEM.match(line)
            if item:
                found.add((name, item[1]))
            elif field or start:
                found.add((name, f"{struct}.{field[1] if field else 0}"))
            else:
                raise AssertionError(f"{name}: this test does not understand where the lock is in {line!r}")
    return found


def threads() -> set[str]:
    """The names of all threads, with N for a number."""
    found: set[str] = set()
    for name, text in sources():
        spawned = _SPAWNED.findall(text)
        assert len(spawned) == len(_STARTED.findall(text)), f"{name}: a thread whose name is not seen"
        found.update(spawned, _BUILT.findall(text))
    for path in (ROOT / "python" / "kvik").rglob("*.py"):
        found.update(_PYTHON.findall(path.read_text(encoding="utf-8")))
    return {re.sub(r"\{[^}]*\}", "N", name) for name in found}


def test_files_and_functions_are_there() -> None:
    """Whatever the page names with `.rs` or `.py`: code and tests."""
    wrong = []
    for name, function in _NAMED.findall(PAGE.read_text(encoding="utf-8")):
        file = place(name)
        if not file.is_file():
            wrong.append(f"there is no {name}")
        elif function and not re.search(rf"\b(?:fn|def) {function}\b", file.read_text(encoding="utf-8")):
            wrong.append(f"{name} has no {function}")
    assert not wrong, "\n".join(wrong)


def test_mutants_are_there() -> None:
    """By the names of their files."""
    named = set(_MUTANT.findall(PAGE.read_text(encoding="utf-8")))
    there = {path.name for path in (ROOT / "tests" / "mutants").glob("*.patch")}
    assert named
    assert not named - there


def test_each_promise_has_a_function_and_a_test() -> None:
    """Ten rows: the promise, what keeps it, and what breaks it."""
    table = rows("The promises")
    assert [row[0].split()[0] for row in table] == [f"P{number}" for number in range(1, 11)]
    for promise, kept, broken in table:
        assert any(function for _, function in _NAMED.findall(kept)), f"{promise}: no function keeps it"
        tests = [name for name, function in _NAMED.findall(broken) if function and "test" in name]
        assert tests, f"{promise}: no test breaks it"


def test_threads_are_those_of_the_sources() -> None:
    """Neither one that is not named, nor one that is gone."""
    named = [name for row in rows("Threads") for name in re.findall(r"`(kvik-[^`]+)`", row[0])]
    assert len(named) == len(set(named)), "a thread is named twice"
    assert set(named) == threads()


def test_locks_are_those_of_the_sources() -> None:
    """Each field that is a `Mutex` or a `RwLock`, in its file."""
    named = {(row[0].strip("`"), name) for row in rows("Locks") for name in re.findall(r"`([^`]+)`", row[1])}
    there = locks()
    assert named == there, f"missing on the page: {there - named}; gone: {named - there}"


def test_arrows_are_those_of_the_crates() -> None:
    """What each crate uses of the others, from its `Cargo.toml`."""
    there = {}
    for path in (ROOT / "crates").glob("*/Cargo.toml"):
        uses = tomllib.loads(path.read_text(encoding="utf-8")).get("dependencies", {})
        there[path.parent.name] = {name for name in uses if name.startswith("kvik-")}
    cells = (re.findall(r"`(kvik-[a-z-]+)`", row[0] + row[2]) for row in rows("The crates"))
    assert {crate: set(uses) for crate, *uses in cells} == there


def test_it_is_one_page() -> None:
    """As long as one may be."""
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= LONGEST
