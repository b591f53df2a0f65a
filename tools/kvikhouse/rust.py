"""Rust crates, read by tree-sitter: the modules from each root on, without what only tests compile."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import tree_sitter_rust
from tree_sitter import Language, Node, Parser

from kvikhouse.code import Function, Module, Names, Package, SourceError, Use

_PARSER = Parser(Language(tree_sitter_rust.language()))
_ITEMS = frozenset({
    "struct_item", "enum_item", "union_item", "trait_item", "type_item", "const_item", "static_item",
    "function_item", "function_signature_item", "macro_definition",
})  # fmt: skip
_FUNCTIONS = ("function_item", "function_signature_item")
_COMMENTS = ("line_comment", "block_comment")
_NAMES = ("identifier", "type_identifier", "field_identifier")
_PATHS = (*_NAMES, "crate", "self", "super")
# Who holds a type by one of these holds the type.
_HOLDERS = ("Arc", "Box", "Pin", "Rc", "MutexGuard", "RefMut", "Ref")


def read_crate(folder: Path) -> Package:
    """The crate of a folder: `src/lib.rs`, and each program's root beside it."""
    name = folder.name.replace("-", "_")
    sources = folder / "src"
    files = {file: _lines(file) for file in sorted(sources.rglob("*.rs"))}
    programs = [sources / "main.rs", *sorted((sources / "bin").glob("*.rs"))]
    roots = {}
    for root in [sources / "lib.rs", *programs]:
        if root in files:
            # A program's root has a name that no path can begin with.
            roots[name if root.name == "lib.rs" else f"{name} {root.stem}"] = _read_root(root)
    return Package(folder.name, files, roots)


def is_generated(file: Path) -> bool:
    """Whether a file says in its first lines that a program wrote it."""
    head = file.read_text(encoding="utf-8").splitlines()[:5]
    return any("@generated" in line or "automatically generated" in line for line in head)


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _read_root(file: Path) -> Module:
    module = Module((), file)
    _read_file(module, file.parent)
    return module


def _read_file(module: Module, below: Path) -> None:
    """Read a module's file; `below` is the folder of the modules that it declares."""
    tree = _PARSER.parse(module.file.read_bytes()).root_node
    if tree.has_error:
        raise SourceError(f"{module.file}: the parser does not read all of it as Rust")
    _read_items(tree.children, module, below)


def _read_items(nodes: Sequence[Node], module: Module, below: Path) -> None:
    attributes: list[str] = []
    for node in nodes:
        if node.type in ("attribute_item", "inner_attribute_item"):
            attributes.append(_text(node))
        elif node.type not in _COMMENTS:
            if not any(_only_for_tests(text) for text in attributes):
                _read_item(node, module, below, attributes)
            attributes = []


def _read_item(node: Node, module: Module, below: Path, attributes: list[str]) -> None:
    name = _name(node)
    if node.type == "mod_item":
        _read_module(node, name, module, below, attributes)
    elif node.type == "use_declaration":
        module.uses += _uses(node)
    else:
        if node.type in _ITEMS:
            module.items.add(name)
        if node.type == "type_item":
            owner = _type_path(node.child_by_field_name("type"))
            if owner:
                module.aliases[name] = owner
        module.functions += _functions(node)
        _read_names(node, module)


def _read_module(node: Node, name: str, parent: Module, below: Path, attributes: list[str]) -> None:
    body = node.child_by_field_name("body")
    file = parent.file if body is not None else _file_of(name, parent, below, attributes)
    child = parent.children[name] = Module((*parent.path, name), file, parent)
    if body is not None:
        _read_items(body.children, child, below / name)
    else:
        _read_file(child, file.parent if file.name == "mod.rs" else file.parent / file.stem)


def _file_of(name: str, parent: Module, below: Path, attributes: list[str]) -> Path:
    for text in attributes:
        if text.replace(" ", "").startswith("#[path="):
            return (parent.file.parent / text.split('"')[1]).resolve()
    for file in (below / f"{name}.rs", below / name / "mod.rs"):
        if file.is_file():
            return file
    raise SourceError(f"{parent.file}: there is no file of its module {name}")


def _only_for_tests(attribute: str) -> bool:
    return attribute.replace(" ", "").startswith(
        ("#[cfg(test)", "#[cfg(all(test,", "#![cfg(test)", "#[test]")
    )


def _uses(node: Node) -> Iterator[Use]:
    """The imports of one declaration."""
    public = any(child.type == "visibility_modifier" for child in node.children)
    argument = node.child_by_field_name("argument")
    if argument is not None:
        for name, path in _leaves(argument, ()):
            yield Use(name, path, public)


def _leaves(node: Node, before: Names) -> Iterator[tuple[str, Names]]:
    if node.type == "use_list":
        for child in node.named_children:
            yield from _leaves(child, before)
    elif node.type == "scoped_use_list":
        listed = node.child_by_field_name("list")
        if listed is not None:
            yield from _leaves(listed, before + _path(node.child_by_field_name("path")))
    elif node.type == "use_wildcard":
        inner = [child for child in node.named_children if child.type not in _COMMENTS]
        yield "*", before + (_path(inner[0]) if inner else ())
    elif node.type == "use_as_clause":
        alias = node.child_by_field_name("alias")
        renamed = _without_self(before + _path(node.child_by_field_name("path")))
        yield _text(alias) if alias is not None else "_", renamed
    elif node.type in ("scoped_identifier", *_PATHS):
        whole = _without_self(before + _path(node))
        yield whole[-1], whole


def _without_self(path: Names) -> Names:
    """`a::{self}` names `a`."""
    return path[:-1] if len(path) > 1 and path[-1] == "self" else path


def _path(node: Node | None) -> Names:
    """The names of a path, without generic arguments."""
    if node is None:
        return ()
    if node.type in ("scoped_identifier", "scoped_type_identifier"):
        return _path(node.child_by_field_name("path")) + _path(node.child_by_field_name("name"))
    if node.type in ("generic_type", "generic_type_with_turbofish"):
        return _path(node.child_by_field_name("type"))
    return (_text(node),) if node.type in _PATHS else ()


def _type_path(node: Node | None) -> Names:
    """The path of a type, written as a value, by reference or by what holds it; () for no named type."""
    while node is not None:
        if node.type in ("reference_type", "pointer_type"):
            node = node.child_by_field_name("type")
            continue
        path = _path(node)
        if node.type == "generic_type" and path[-1:] and path[-1] in _HOLDERS:
            arguments = node.child_by_field_name("type_arguments")
            inner = [c for c in arguments.named_children if c.type != "lifetime"] if arguments else []
            node = inner[0] if inner else None
            continue
        return path
    return ()


def _functions(node: Node) -> Iterator[Function]:
    """The functions of types that an item brings: an `impl`, a trait, or a free function."""
    if node.type in ("impl_item", "trait_item"):
        field = "type" if node.type == "impl_item" else "name"
        parameters = _generic_parameters(node)
        owner = _type_path(node.child_by_field_name(field))
        body = node.child_by_field_name("body")
        if not owner or owner[0] in parameters or body is None:
            return
        for child in _compiled(body.children):
            if child.type in _FUNCTIONS:
                yield Function(_name(child), owner)
    elif node.type == "function_item":
        parameters = _generic_parameters(node)
        listed = node.child_by_field_name("parameters")
        first = [child for child in listed.named_children if child.type == "parameter"][:1] if listed else []
        for parameter in first:
            owner = _type_path(parameter.child_by_field_name("type"))
            if owner and owner[0] not in parameters:
                yield Function(_name(node), owner)


def _compiled(nodes: Sequence[Node]) -> Iterator[Node]:
    """Without those that only tests compile."""
    skipped = False
    for node in nodes:
        if node.type == "attribute_item":
            skipped = skipped or _only_for_tests(_text(node))
        elif node.type not in _COMMENTS:
            if not skipped:
                yield node
            skipped = False


def _generic_parameters(node: Node) -> set[str]:
    listed = node.child_by_field_name("type_parameters")
    children = listed.named_children if listed is not None else []
    return {_name(child) for child in children if child.type == "type_parameter"}


def _read_names(node: Node, module: Module) -> None:
    """Note every name and path below an item, within macros too; a `use` in a function is the module's."""
    chain: list[str] = []
    joined = False
    for leaf in _tokens(node, module):
        if leaf.type == "::":
            joined = bool(chain)
            continue
        if chain and not joined:
            _note(tuple(chain), module)
            chain = []
        joined = False
        if leaf.type in _PATHS:
            chain.append(_text(leaf))
        elif chain:
            _note(tuple(chain), module)
            chain = []
    if chain:
        _note(tuple(chain), module)


def _note(chain: Names, module: Module) -> None:
    module.mentions.add(chain[0])
    if len(chain) > 1:
        module.paths.add(chain)


def _tokens(node: Node, module: Module) -> Iterator[Node]:
    """The leaves below a node in order, without comments, attributes, imports and what only tests compile."""
    if node.type == "use_declaration":
        module.uses += _uses(node)
    elif node.child_count == 0:
        yield node
    elif node.type not in (*_COMMENTS, "attribute_item", "string_literal"):
        children = _compiled(node.children) if node.type == "declaration_list" else node.children
        for child in children:
            yield from _tokens(child, module)


def _name(node: Node) -> str:
    name = node.child_by_field_name("name")
    return _text(name) if name is not None else ""


def _text(node: Node) -> str:
    return (node.text or b"").decode()
