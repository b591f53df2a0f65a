"""Lines, circles and largest types of packages."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvikhouse.code import Definition, Module, Package
from kvikhouse.names import Resolver


@dataclass(frozen=True)
class Type:
    """A type, and how many functions it has in how many files."""

    name: str
    functions: int
    files: int


@dataclass(frozen=True)
class Figures:
    """What is said of one package."""

    name: str
    lines: int
    files: int
    circles: tuple[tuple[Path, ...], ...]  # largest first
    types: tuple[Type, ...]  # largest first


def measure(packages: Iterable[Package]) -> list[Figures]:
    """The figures of packages that know each other. A circle counts for the package of its first file."""
    packages = list(packages)
    resolver = Resolver(packages)
    modules = [module for package in packages for root in package.roots.values() for module in root.all()]
    circles = circles_of(_graph(resolver, modules))
    types = _types(resolver, modules)
    return [
        Figures(
            package.name,
            sum(package.files.values()),
            len(package.files),
            tuple(circle for circle in circles if circle[0] in package.files),
            tuple(kind for file, kind in types if file in package.files),
        )
        for package in packages
    ]


def _graph(resolver: Resolver, modules: Iterable[Module]) -> dict[Path, set[Path]]:
    graph: dict[Path, set[Path]] = defaultdict(set)
    for module in modules:
        graph[module.file] |= {file for file in resolver.imports(module) if file != module.file}
    return graph


def _types(resolver: Resolver, modules: Iterable[Module]) -> list[tuple[Path, Type]]:
    """Each type and the file that defines it, those with most functions first."""
    found: dict[Definition, list[Path]] = defaultdict(list)
    for module in modules:
        for function in module.functions:
            owner = resolver.resolve(function.owner, module)
            if isinstance(owner, Definition):
                found[owner].append(module.file)
    types = [(owner.file, Type(owner.name, len(files), len(set(files)))) for owner, files in found.items()]
    return sorted(types, key=lambda entry: (-entry[1].functions, entry[1].name, entry[0]))


def circles_of(graph: Mapping[Path, set[Path]]) -> list[tuple[Path, ...]]:
    """Sets of files that import each other, directly or not; the largest first.

    Tarjan's algorithm (1972), with a stack of its own in place of recursion.
    """
    order: dict[Path, int] = {}
    low: dict[Path, int] = {}
    open_files: list[Path] = []
    circles = []
    for start in graph:
        if start in order:
            continue
        order[start] = low[start] = len(order)
        open_files.append(start)
        work = [(start, iter(sorted(graph[start])))]
        while work:
            file, following = work[-1]
            step = next((there for there in following if there not in order or there in low), None)
            if step is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[file])
                if low[file] == order[file]:
                    circles.append(_taken(open_files, file, low))
            elif step in order:
                low[file] = min(low[file], order[step])
            else:
                order[step] = low[step] = len(order)
                open_files.append(step)
                work.append((step, iter(sorted(graph.get(step, ())))))
    return sorted((circle for circle in circles if len(circle) > 1), key=lambda c: (-len(c), c))


def _taken(open_files: list[Path], first: Path, low: dict[Path, int]) -> tuple[Path, ...]:
    """Close the component that began with a file: from now on it leads nowhere (it leaves `low`)."""
    at = open_files.index(first)
    component = open_files[at:]
    del open_files[at:]
    for file in component:
        del low[file]
    return tuple(sorted(component))
