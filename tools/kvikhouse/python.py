"""Python packages, read by `ast`. A module's paths are absolute, whatever form its imports have."""

import ast
from collections.abc import Iterator
from pathlib import Path

from kvikhouse.code import Function, Module, Names, Package, SourceError, Use

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.With)


def read_packages(folder: Path) -> list[Package]:
    """A package and those within it, each with its own files; the name of a stub ends in `.pyi`."""
    root = _read_folder(folder, None)
    packages: dict[str, Package] = {}
    for module in root.all():
        if module.file.suffix not in (".py", ".pyi"):
            continue
        inside = module.file.relative_to(folder).parts[:-1]
        name = ".".join((folder.name, *inside[:1]))
        package = packages.setdefault(name, Package(name, {}, {}))
        package.files[module.file] = len(module.file.read_text(encoding="utf-8").splitlines())
    packages[folder.name].roots[folder.name] = root
    return [packages[name] for name in sorted(packages)]


def _read_folder(folder: Path, parent: Module | None) -> Module:
    path = (*parent.path, folder.name) if parent is not None else (folder.name,)
    init = folder / "__init__.py"
    module = Module(path, init if init.is_file() else folder, parent)
    if init.is_file():
        _read_file(module, init)
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and any(entry.rglob("*.py")):
            module.children[entry.name] = _read_folder(entry, module)
        elif entry.suffix in (".py", ".pyi") and entry.stem != "__init__":
            child = Module((*path, entry.stem), entry, module)
            module.children[entry.stem] = child
            _read_file(child, entry)
    return module


def _read_file(module: Module, file: Path) -> None:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise SourceError(f"{file}:{error.lineno}: {error.msg}") from error
    for statement in _statements(tree.body):
        module.items |= set(_defined(statement))
        module.functions += _functions(statement)
    _Names(module, file).visit(tree)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, with those that it runs on a condition."""
    for statement in body:
        yield statement
        if isinstance(statement, _BRANCHES):
            yield from _statements(
                [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
            )


def _defined(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _functions(statement: ast.stmt) -> Iterator[Function]:
    """The methods of a class, or a function whose first parameter is annotated with a type."""
    if isinstance(statement, ast.ClassDef):
        for node in statement.body:
            if isinstance(node, _FUNCTIONS):
                yield Function(node.name, (statement.name,))
    elif isinstance(statement, _FUNCTIONS):
        parameters = [*statement.args.posonlyargs, *statement.args.args]
        owner = _type_path(parameters[0].annotation) if parameters else ()
        if owner:
            yield Function(statement.name, owner)


def _type_path(annotation: ast.expr | None) -> Names:
    """The path of a type that an annotation names: by itself, as text, or beside `None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return ()
    if isinstance(annotation, ast.BinOp):
        annotation = annotation.left
    return _path(annotation)


def _path(node: ast.expr | None) -> Names:
    """`a.b.c`; () for anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        before = _path(node.value)
        return (*before, node.attr) if before else ()
    return ()


class _Names(ast.NodeVisitor):
    """Notes the imports of a file, wherever they are in it, and the names that it mentions."""

    def __init__(self, module: Module, file: Path) -> None:
        self._module = module
        self._facade = file.name == "__init__.py"
        self._inside = module.path if self._facade else module.path[:-1]

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b` makes the name `a`; what is used behind it is a path."""
        for alias in node.names:
            path = tuple(alias.name.split("."))
            use = Use(alias.asname, path) if alias.asname else Use(path[0], path[:1])
            self._module.uses.append(use)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """From an absolute or a relative place."""
        before = self._inside[: len(self._inside) - node.level + 1] if node.level else ()
        before += tuple(node.module.split(".")) if node.module else ()
        for alias in node.names:
            if alias.name == "*":
                self._module.uses.append(Use("*", before, self._facade))
            else:
                name = alias.asname or alias.name
                self._module.uses.append(Use(name, (*before, alias.name), self._facade))

    def visit_Name(self, node: ast.Name) -> None:
        """A name alone."""
        self._module.mentions.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A path, or something of a value."""
        path = _path(node)
        if path:
            self._module.mentions.add(path[0])
            self._module.paths.add(path)
        else:
            self.visit(node.value)
