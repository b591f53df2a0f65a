"""Which file defines what a path names: through the tree of modules, imports, re-exports and stars."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvikhouse.code import Definition, Module, Names, Package

Found = Module | Definition | None
"""`None`: something of a package that is not looked at."""

_Seen = frozenset[tuple[int, str, bool]]


class _MissingError(Exception):
    """A module has no such name."""


class Resolver:
    """Resolves the paths of some packages, within and between them."""

    def __init__(self, packages: Iterable[Package]) -> None:
        self._roots = {name: module for package in packages for name, module in package.roots.items()}

    def resolve(self, path: Names, module: Module, seen: _Seen = frozenset()) -> Found:
        """What a path names that is written in a module."""
        found = self._first(path[0], module, len(path) > 1, seen)
        for index, name in enumerate(path[1:], 2):
            if not isinstance(found, Module):
                break  # something of a type, or of another's package
            module_file = found.file
            try:
                found = self._inside(found, name, index < len(path), seen)
            except _MissingError:
                found = Definition(module_file, name)  # such as what a macro makes
        return found

    def imports(self, module: Module) -> Iterator[Path]:
        """The files that define what a module imports, or names by a path. A re-export that the module makes
        no use of is not its own import: who names it is led to the file behind it."""
        for use in module.uses:
            if use.name == "*":
                yield from self._by_star(use.path, module)
            elif not use.public or use.name in module.mentions:
                yield from _files(self.resolve(use.path, module))
        for path in module.paths:
            yield from _files(self.resolve(path, module))

    def _by_star(self, path: Names, module: Module) -> Iterator[Path]:
        """The files of what a star brings, as far as the module mentions it."""
        target = self.resolve(path, module)
        if not isinstance(target, Module):
            yield from _files(target)
            return
        for name in module.mentions - module.items:
            try:
                yield from _files(self._inside(target, name, False, frozenset()))
            except _MissingError:
                continue

    def _first(self, name: str, module: Module, more: bool, seen: _Seen) -> Found:
        if name == "crate":
            while module.parent is not None:
                module = module.parent
            return module
        try:
            return self._inside(module, name, more, seen)
        except _MissingError:
            return self._roots.get(name)

    def _inside(self, module: Module, name: str, more: bool, seen: _Seen) -> Found:
        """What a module knows by a name; `more` says that it is a module or a type, since names follow."""
        key = (id(module), name, more)
        if key in seen:
            raise _MissingError
        seen |= {key}
        if name == "self":
            return module
        if name == "super":
            return module.parent
        if more and name in module.children:
            return module.children[name]
        if name in module.items:
            return self._defined(module, name, seen)
        for use in module.uses:
            if use.name == name:
                return self.resolve(use.path, module, seen)
        if name in module.children:
            return module.children[name]
        return self._through_stars(module, name, more, seen)

    def _defined(self, module: Module, name: str, seen: _Seen) -> Found:
        behind = module.aliases.get(name)
        found = self.resolve(behind, module, seen) if behind else None
        return found if isinstance(found, Definition) else Definition(module.file, name)

    def _through_stars(self, module: Module, name: str, more: bool, seen: _Seen) -> Found:
        for use in module.uses:
            if use.name == "*":
                target = self.resolve(use.path, module, seen)
                if isinstance(target, Module):
                    try:
                        return self._inside(target, name, more, seen)
                    except _MissingError:
                        continue
        raise _MissingError


def _files(found: Found) -> Iterator[Path]:
    if isinstance(found, Definition):
        yield found.file
