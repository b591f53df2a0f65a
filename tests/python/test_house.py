"""The house command: figures of small trees, and a list of excesses that may only become shorter."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import house  # noqa: E402
from kvikhouse.code import SourceError  # noqa: E402
from kvikhouse.figures import Figures, measure  # noqa: E402
from kvikhouse.python import read_packages  # noqa: E402
from kvikhouse.rust import read_crate  # noqa: E402

Crate = Callable[..., Path]
SECONDS = 10.0  # on a quiet machine it takes under 3


@pytest.fixture
def crate(tmp_path: Path) -> Crate:
    """Makes a crate `sample` of sources by the names of their files."""

    def make(**sources: str) -> Path:
        for name, text in sources.items():
            file = tmp_path / "crates" / "sample" / "src" / f"{name.replace('__', '/')}.rs"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "crates" / "sample"

    return make


def figures(folder: Path) -> Figures:
    """Of one crate."""
    (found,) = measure([read_crate(folder)])
    return found


def circles(folder: Path) -> list[list[str]]:
    """The names of the files of each circle."""
    return [[file.stem for file in circle] for circle in figures(folder).circles]


def types(folder: Path) -> dict[str, tuple[int, int]]:
    """Each type's functions, and in how many files."""
    return {kind.name: (kind.functions, kind.files) for kind in figures(folder).types}


def test_a_circle_by_use_is_found(crate: Crate) -> None:
    """Also over three files, and not what only leads into it."""
    folder = crate(
        lib="mod a; mod b; mod c; mod d;",
        a="use crate::b::B; pub struct A(B);",
        b="use super::c::C; pub struct B(C);",
        c="use crate::{a::A, b}; pub struct C(Box<A>);",
        d="use crate::a::A; pub struct D(A);",
    )
    assert circles(folder) == [["a", "b", "c"]]


def test_a_path_without_use_is_an_import(crate: Crate) -> None:
    """In types, in expressions and within macros."""
    for text in (
        "pub struct B(crate::a::A);",
        "pub fn b() { crate::a::f(); }",
        "use super::a; pub fn b() { a::f() }",
        'pub fn b() { println!("{}", crate::a::f()); }',
        "impl crate::a::T for B {} pub struct B;",
    ):
        folder = crate(
            lib="mod a; mod b;",
            a="pub struct A; pub fn f() {} pub trait T {} use crate::b::B as Other;",
            b=text,
        )
        assert circles(folder) == [["a", "b"]], text


def test_a_name_is_followed_to_the_file_that_defines_it(crate: Crate) -> None:
    """Through re-exports, other names, stars and files of modules: only who defines something is imported."""
    folder = crate(
        lib="mod a; mod b; mod deep; pub use deep::*; pub use b::Inner as Outer;",
        a="use crate::{Deep, Outer}; pub struct A(Deep, Outer);",
        b="pub struct Inner(u8);",
        deep__mod="mod down; pub use self::down::Deep; pub struct Own;",
        deep__down="use crate::a::A; pub struct Deep(Box<A>);",
    )
    assert circles(folder) == [["a", "down"]]


def test_a_re_export_is_no_import_of_its_own(crate: Crate) -> None:
    """Until the file that makes it uses the name itself."""
    sources = {"a": "use crate::Top; pub struct A(Top);"}
    assert circles(crate(lib="mod a; pub use a::A; pub struct Top;", **sources)) == []
    used = "mod a; pub use a::A; pub struct Top; pub fn f(_: u8, a: A) {}"
    assert circles(crate(lib=used, **sources)) == [["a", "lib"]]


def test_a_star_imports_what_is_mentioned(crate: Crate) -> None:
    """And nothing else of the module."""
    sources = {
        "lib": "mod a; mod b; mod c;",
        "b": "use crate::a::A; pub struct B(A);",
        "c": "pub use crate::b::*;",
    }
    assert circles(crate(a="use crate::c::*; pub struct A;", **sources)) == []
    assert circles(crate(a="use crate::c::*; pub struct A; pub fn f(b: &B) {}", **sources)) == [["a", "b"]]


def test_what_only_tests_compile_does_not_count(crate: Crate) -> None:
    """Modules, imports and functions."""
    folder = crate(
        lib="mod a; #[cfg(test)] mod tests;",
        a="pub struct A; impl A { pub fn f(&self) {} #[cfg(test)] pub fn g(&self) {} }\n"
        "#[cfg(test)] mod inner { use crate::tests::T; impl super::A { fn h(&self) {} } }",
        tests="use crate::a::A; pub struct T(A); impl A { fn i(&self) {} }",
    )
    assert circles(folder) == []
    assert types(folder) == {"A": (1, 1)}


def test_functions_of_a_type_are_counted_over_all_files(crate: Crate) -> None:
    """Methods of every `impl`, of traits too, and free functions that take it first; under any name."""
    folder = crate(
        lib="mod a; mod b; pub use a::Big; pub type Also = Big<u8>;",
        a="pub struct Big<T>(T); impl<T> Big<T> { pub fn new() -> Self { todo!() } fn x(self) {} }\n"
        "impl<T> Drop for Big<T> { fn drop(&mut self) {} }",
        b="use crate::{Big, Also}; use std::sync::{Arc, Mutex};\n"
        "impl Big<u8> { fn y(&self) {} }\n"
        "fn by_value(b: Big<u8>) {} fn by_reference(b: &mut Big<u8>, n: u8) {}\n"
        "fn held(b: &Arc<Big<u8>>) {} fn renamed(b: &Also) {}\n"
        "fn second(n: u8, b: &Big<u8>) {} fn any<Big>(b: Big) {} impl<Big> Other<Big> { fn o(b: Big) {} }\n"
        "pub struct Other<T>(T);",
    )
    assert types(folder) == {"Big": (8, 2), "Other": (1, 1)}


def test_types_of_one_name_are_apart(crate: Crate) -> None:
    """Each is what the file that mentions it means by the name."""
    folder = crate(
        lib="mod a; mod b; mod c;",
        a="pub struct S; impl S { fn f() {} }",
        b="pub struct S; impl S { fn f() {} fn g() {} }",
        c="use crate::a::S; impl S { fn h() {} fn i() {} }",
    )
    assert [(kind.name, kind.functions) for kind in figures(folder).types] == [("S", 3), ("S", 2)]


def test_a_type_of_another_crate(tmp_path: Path) -> None:
    """What other crates add to a type counts for the crate that defines it."""
    for name, text in (
        ("kvik-low", "mod a; pub use a::Low;"),
        ("kvik-high", "use kvik_low::Low; pub fn f(low: &Low) {} pub fn g(low: Low) {}"),
    ):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src" / "lib.rs").write_text(text)
    (tmp_path / "kvik-low" / "src" / "a.rs").write_text("pub struct Low; impl Low { pub fn h(&self) {} }")
    low, high = measure([read_crate(tmp_path / "kvik-low"), read_crate(tmp_path / "kvik-high")])
    assert [(kind.name, kind.functions, kind.files) for kind in low.types] == [("Low", 3, 2)]
    assert high.types == ()


def test_a_source_that_cannot_be_read_is_named(crate: Crate) -> None:
    """Nothing is counted for a file that is half understood."""
    with pytest.raises(SourceError, match=r"lib\.rs"):
        read_crate(crate(lib="pub fn f( {"))
    with pytest.raises(SourceError, match="no file of its module gone"):
        read_crate(crate(lib="mod gone;"))


def python_figures(folder: Path, **sources: str) -> list[Figures]:
    """Of a Python package `sample`."""
    for name, text in sources.items():
        file = folder / "sample" / f"{name.replace('____', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return measure(read_packages(folder / "sample"))


def test_python_imports_of_every_form(tmp_path: Path) -> None:
    """Absolute, relative, of a module, in a function, for types only, and through a package's own names."""
    for number, text in enumerate((
        "from sample.a import A",
        "from .a import A",
        "from sample import a\nx = a.A",
        "import sample.a\nx = sample.a.A",
        "def f():\n    from sample.a import A",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample.a import A",
        "from sample import A",
        "import sample\nx = sample.A",
    )):  # fmt: skip
        (found,) = python_figures(
            tmp_path / str(number), __init__="from sample.a import A",
            a="import sample.b\nclass A(sample.b.B): ...",
            b=f"{text}\nclass B: ...",
        )  # fmt: skip
        assert [[file.stem for file in circle] for circle in found.circles] == [["a", "b"]], text


def test_python_packages_and_types(tmp_path: Path) -> None:
    """Each package within has figures of its own; functions with a class first are the class's."""
    outer, inner = python_figures(
        tmp_path, __init__="", a="class A:\n    def f(self): ...\n    async def g(self): ...\n",
        inner____b="from sample.a import A\n"
        "def h(a: A): ...\ndef i(a: 'A | None'): ...\ndef j(n: int, a: A): ...\n",
        inner______init__="",
    )  # fmt: skip
    assert (outer.name, inner.name) == ("sample", "sample.inner")
    assert [(kind.name, kind.functions, kind.files) for kind in outer.types] == [("A", 4, 2)]
    assert (inner.files, inner.lines, inner.types) == (2, 4, ())


LISTED = (
    '[lines]\nknown = {lines}\napart = ["crates/*/src/apart.rs"]\n[circles]\n{circles}\n[types]\n{types}\n'
)
FOUR = {name: f"use crate::{other}::{other.upper()}; pub struct {name.upper()}({other.upper()});"
        for name, other in ("ab", "bc", "cd", "da")}  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path, crate: Crate) -> Callable[..., int]:
    """Runs the command over a tree with a circle of four files and a type of 41 functions, and a list."""
    functions = "".join(f"fn f{n}(&self) {{}}\n" for n in range(41))
    crate(
        lib=f"mod a; mod b; mod c; mod d; mod big; // {'x' * 20}",
        big=f"pub struct Big; impl Big {{\n{functions}}}",
        **FOUR,
    )
    (tmp_path / "tools").mkdir()

    def run(circles: str = "", types: str = "", lines: int = 42_700, *options: str) -> int:
        (tmp_path / "tools" / "house.toml").write_text(
            LISTED.format(lines=lines, circles=circles, types=types)
        )
        return house.main(options, tmp_path)

    return run


def test_the_list_may_only_become_shorter(
    kept: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than is known fails, and less fails until the list says so."""
    assert kept() == 1
    said = capsys.readouterr().out
    assert "sample: a circle of 4 files (bound 3)" in said
    assert "sample::Big: 41 functions (bound 40)" in said
    assert kept("sample = [4]", '"sample::Big" = 41') == 0
    assert kept("sample = [4]", '"sample::Big" = 40') == 1
    assert kept("sample = [3]", '"sample::Big" = 41') == 1
    capsys.readouterr()
    assert kept("sample = [6, 4]", '"sample::Big" = 50\n"sample::Gone" = 60') == 1
    said = capsys.readouterr().out
    assert "sample: a circle of 6 files has become 4" in said
    assert "sample: a circle of 4 files is gone" in said
    assert "sample::Big: a type of 50 functions has become 41" in said
    assert "sample::Gone: a type of 60 functions is gone" in said
    assert kept("sample = [6, 4]", '"sample::Big" = 50\n"sample::Gone" = 60', 42_700, "--shrink") == 0
    assert house.main([], tmp_path) == 0
    assert "Gone" not in (tmp_path / "tools" / "house.toml").read_text()


def test_shrinking_never_lets_anything_grow(kept: Callable[..., int], tmp_path: Path) -> None:
    """What is too much stays too much, and stays off the list."""
    assert kept("sample = [3]", '"sample::Gone" = 60', 42_700, "--shrink") == 1
    written = (tmp_path / "tools" / "house.toml").read_text()
    assert '"sample" = [3]' in written
    assert "Big" not in written


def test_lines_are_bounded(
    kept: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without generated files and those that the list counts apart."""
    known = ("sample = [4]", '"sample::Big" = 41')
    sources = tmp_path / "crates" / "sample" / "src"
    many = "// a line\n" * 42_690
    (sources / "apart.rs").write_text(many)
    (sources / "bindings.rs").write_text(f"// @generated by a program\n{many}")
    assert kept(*known) == 0
    (sources / "long.rs").write_text(many)
    assert kept(*known) == 1
    assert "42,738 lines (known 42,700)" in capsys.readouterr().out
    assert kept(*known, 42_738) == 0
    (sources / "long.rs").unlink()
    assert kept(*known, 42_738) == 1
    assert kept(*known, 42_738, "--shrink") == 0
    assert "known = 42700" in (tmp_path / "tools" / "house.toml").read_text()


def test_this_tree(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps the bounds and the list, in seconds; every crate and package has a line."""
    begun = time.process_time()
    status = house.main([])
    took = time.process_time() - begun
    said = capsys.readouterr().out
    print(said)
    assert status == 0
    assert took < SECONDS
    lines = {line.split()[0] for line in said.splitlines() if line}
    assert {folder.name for folder in (ROOT / "crates").iterdir()} <= lines
    assert {"kvik", "kvik_lab.audit", "kvik.vllm", "kvikbuild", "kvikhouse"} <= lines
