"""`.. native:: Engine`: the reference of a class or function of the native module.

Docstrings come from the loaded module, signatures and the order of members from its stub `_native.pyi`, which
alone knows types. kvik's docstrings are plain text for `help()`; `to_rst` turns them into what Sphinx reads.
"""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import kvik

STUB = Path(kvik.__file__).with_name("_native.pyi")
INDENT = "   "
ERROR = re.compile(rf"\b({'|'.join(kvik.errors.__all__)})\b")
OPTION = re.compile(r"((?:[a-z_]+, )*[a-z_]+): (.*)")


@dataclass(frozen=True)
class Member:
    """A function, method or property as the stub declares it."""

    name: str
    signature: str
    returns: str
    is_property: bool
    parameters: tuple[str, ...]


def members_of(tree: ast.Module, name: str) -> tuple[Member | None, list[Member]]:
    """The function of this name, or the class's constructor and its public members, in the stub's order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _member(node, bound=False), []
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = [_member(item, bound=True) for item in node.body if isinstance(item, ast.FunctionDef)]
            constructor = next((one for one in found if one.name == "__new__"), None)
            return constructor, [one for one in found if not one.name.startswith("_")]
    raise LookupError(f"{STUB.name} declares no {name}")


def _member(node: ast.FunctionDef, *, bound: bool) -> Member:
    arguments = node.args
    if bound:
        arguments.args = arguments.args[1:] if arguments.args else []
        arguments.posonlyargs = [one for one in arguments.posonlyargs if one.arg not in ("self", "cls")]
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)
    returns = ast.unparse(node.returns) if node.returns else "None"
    names = tuple(one.arg for one in everything)
    return Member(node.name, f"({ast.unparse(arguments)})", returns, is_property, names)


def to_rst(doc: str, names: tuple[str, ...]) -> list[str]:
    """A docstring as reStructuredText: `name: text` lines of parameters become a list of definitions."""
    lines: list[str] = []
    for part in _parts(doc):
        first = OPTION.fullmatch(part[0])
        if first and set(first[1].split(", ")) <= set(names):
            lines += [", ".join(f"``{name}``" for name in first[1].split(", "))]
            text = [first[2], *inspect.cleandoc("\n".join(["", *part[1:]])).splitlines()]
            lines += [f"    {line}".rstrip() for line in _with_lists([_inline(one) for one in text])]
        elif part[0].startswith("    "):
            lines += ["::", "", *part, ""]
        else:
            lines += ["", *(_inline(line) for line in part), ""]
    return lines


def _parts(doc: str) -> Iterator[list[str]]:
    """Paragraphs; each parameter of a list of them is one too, with its indented lines."""
    part: list[str] = []
    for line in doc.splitlines():
        starts = OPTION.fullmatch(line) is not None or (bool(part) and not line.strip())
        if starts and part:
            yield part
            part = []
        if line.strip():
            part.append(line)
    if part:
        yield part


def _with_lists(lines: list[str]) -> list[str]:
    """A list wants an empty line before it, and lines that continue an entry stay with it."""
    for index, line in enumerate(lines):
        if line.startswith("- "):
            return [*lines[:index], "", *lines[index:]]
    return lines


def _inline(line: str) -> str:
    """Code in single backticks becomes code, errors are linked, and nothing else in the text is markup."""
    pieces = line.split("`")
    plain = [re.sub(r"([\\*|]|_(?=\W|$))", r"\\\1", piece) for piece in pieces[::2]]
    plain = [ERROR.sub(r":py:exc:`~kvik.\1`", piece) for piece in plain]
    code = [f"``{piece}``" for piece in pieces[1::2]]
    return "".join(a + b for a, b in zip(plain, [*code, ""], strict=False))


def _doc(owner: object, name: str) -> str:
    thing = inspect.getattr_static(owner, name)
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _entry(kind: str, head: str, body: list[str], options: tuple[str, ...] = ()) -> list[str]:
    inner = [*options, "", *body, ""]
    return [f".. py:{kind}:: {head}", *(f"{INDENT}{line}".rstrip() for line in inner), ""]


def reference(name: str) -> list[str]:
    """The lines of one class or function of `kvik`."""
    own, members = members_of(ast.parse(STUB.read_text()), name)
    doc = inspect.cleandoc(getattr(kvik, name).__doc__ or "")
    parameters = own.parameters if own else ()
    if not isinstance(getattr(kvik, name), type):
        head = f"kvik.{name}{own.signature} -> {own.returns}" if own else f"kvik.{name}"
        return _entry("function", head, to_rst(doc, parameters))
    body = to_rst(doc, parameters)
    for member in members:
        text = to_rst(_doc(getattr(kvik, name), member.name), member.parameters)
        if member.is_property:
            body += _entry("property", member.name, text, (f":type: {member.returns}",))
        else:
            body += _entry("method", f"{member.name}{member.signature} -> {member.returns}", text)
    head = f"kvik.{name}{own.signature}" if own else f"kvik.{name}"
    return _entry("class", head, body)


class Native(SphinxDirective):
    """The directive."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse what `reference` wrote."""
        name = self.arguments[0]
        self.env.note_dependency(str(STUB))
        return self.parse_content_to_nodes_of(reference(name), f"kvik._native.{name}")

    def parse_content_to_nodes_of(self, lines: list[str], source: str) -> list[nodes.Node]:
        """As reStructuredText, whatever the page is written in."""
        box = nodes.container()
        box.document = self.state.document
        self.state.nested_parse(StringList(lines, source), 0, box)
        return list(box.children)


class NativeErrors(Native):
    """`.. native-errors::`: all exceptions, with their codes, and a link to the catalogue."""

    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        """Parse one entry a class."""
        lines: list[str] = []
        for name in kvik.errors.__all__:
            error: type[kvik.KvikError] = getattr(kvik, name)
            bases = ", ".join(base.__name__ for base in error.__bases__)
            text = [f"{_inline(error.__doc__ or '')} Code ``{error.code}``. Derives from ``{bases}``."]
            lines += _entry("exception", f"kvik.{name}", text)
        return self.parse_content_to_nodes_of(lines, "kvik.errors")


def leave_builtins(_app: Sphinx, tree: nodes.document) -> None:
    """`bytes` in a signature is Python's, and not the first thing of that name in this reference."""
    for link in list(tree.findall(pending_xref)):
        if link.get("refdomain") == "py" and hasattr(builtins, link["reftarget"]):
            link.replace_self(link.children)


def read_as_ours(
    _app: Sphinx, _what: str, _name: str, thing: object, _options: object, lines: list[str]
) -> None:
    """Docstrings of Python code are written as those of the native module."""
    try:
        names = tuple(inspect.signature(thing).parameters) if callable(thing) else ()
    except ValueError:
        names = ()
    lines[:] = to_rst("\n".join(lines), names)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", leave_builtins)
    app.connect("autodoc-process-docstring", read_as_ours)
    app.add_directive("native", Native)
    app.add_directive("native-errors", NativeErrors)
    return {"parallel_read_safe": True}
