"""V8: arms differ in what is studied, and in nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import JsonValue

from kvik_lab.gates.case import Case, invalid, passed, suspect, unchecked, worst
from kvik_lab.records import Finding, Level, Node, RunRecord

# What a role has of its own in each run, and no study compares.
_OWN = frozenset({"port", "host", "listen", "url", "log", "report_file", "pid", "seed"})
_FACTS = ("kernel", "cpu", "cpus", "cores", "cores_usable", "memory_bytes", "governor", "gpus", "driver")
_DOCTOR = "doctor"  # the doctor's summary, whose entries are facts as well; but for why there is none
_UNREAD = "unread"
_SHOWN = 4


def v8(case: Case) -> Finding:
    """Settings, versions and nodes of this run are those of the other runs, but for what factors change."""
    if not case.beside:
        return unchecked("V8", "there is no other run to compare with")
    return worst([_settings(case), _code(case), _nodes(case)])


def _settings(case: Case) -> Finding:
    """A setting that most runs have otherwise; where no value has a majority, all are wrong."""
    mine = _settings_of(case.record)
    wrong = []
    for key, values in _values(case).items():
        if key not in mine or len(values) < 2:
            continue
        (usual, most), (_, second), *_ = values.most_common()
        if mine[key] != usual or most == second:
            kind, name = key
            other = next(one for one in values if one != mine[key])
            wrong.append(f"{kind}: {name} is {_said(mine[key])} here and {_said(other)} in other runs")
    if not wrong:
        return passed("V8", f"{len(mine)} settings are those of {len(case.beside)} other runs")
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return invalid(
        "V8",
        "; ".join(wrong[:_SHOWN]) + more,
        "start all arms alike; a setting that a factor changes is named in `varied`",
    )


def _said(values: frozenset[Level]) -> str:
    return " and ".join(sorted(map(repr, values)))


def _values(case: Case) -> dict[tuple[str, str], Counter[frozenset[Level]]]:
    """How many runs have each value of each setting that no factor changes."""
    varied = set(case.stated.varied) | _OWN
    seen: dict[tuple[str, str], Counter[frozenset[Level]]] = {}
    for record in (case.record, *case.beside):
        for (kind, name), values in _settings_of(record).items():
            if name not in varied:
                seen.setdefault((kind, name), Counter())[values] += 1
    return seen


def _settings_of(record: RunRecord) -> dict[tuple[str, str], frozenset[Level]]:
    """Of each kind of role: what it was started with, and what it says of itself; all values, where several
    roles of the kind have unlike ones."""
    found: dict[tuple[str, str], frozenset[Level]] = {}
    for role in record.roles:
        for name, value in (*role.settings.items(), *role.reported.items()):
            found[role.kind, name] = found.get((role.kind, name), frozenset()) | {value}
    return found


def _code(case: Case) -> Finding:
    """Programs, and the files that requests are made from, are those of the other runs."""
    mine, files = case.record.key.code, _contents(case.record)
    for other in case.beside:
        for name in sorted(mine.keys() & other.key.code.keys()):
            if mine[name] != other.key.code[name] and name not in case.stated.varied:
                return invalid(
                    "V8",
                    f"{name} is {mine[name]} here and {other.key.code[name]} in run {other.id}",
                    "measure all arms with one build; a build that is studied is a factor",
                )
        theirs = _contents(other)
        for file in sorted(files.keys() & theirs.keys()):
            if files[file] != theirs[file]:
                what = f"{file} had other content than in run {other.id}: requests were made from it"
                return invalid("V8", what, "run all of the study with one content of the file")
    return passed("V8", "programs are those of the other runs")


def _contents(record: RunRecord) -> dict[str, JsonValue]:
    found = record.key.configuration.get("files")
    return found if isinstance(found, dict) else {}


def _nodes(case: Case) -> Finding:
    """A node is as it was in the other runs. Different nodes are a matter of the design."""
    for other in case.beside:
        found = _unlike(case.record.nodes, other.nodes, case.stated.varied)
        if found is not None:
            name, fact, one, two = found
            return suspect(
                "V8",
                f"{name}: {fact} is {one!r} here and {two!r} in run {other.id}",
                "measure all arms on a node as it is; or make what was changed a factor",
            )
    return passed("V8", "nodes are as in the other runs")


def _unlike(
    ours: Sequence[Node], theirs: Sequence[Node], varied: Sequence[str]
) -> tuple[str, str, object, object] | None:
    facts = {node.name: _facts_of(node) for node in theirs}
    for node in ours:
        for fact, one in _facts_of(node).items():
            two = facts.get(node.name, {}).get(fact)
            if one is not None and two is not None and one != two and not _is_varied(fact, varied):
                return node.name, fact, *_apart(one, two)
    return None


def _facts_of(node: Node) -> dict[str, JsonValue]:
    """Facts by name; those of the doctor as `doctor.nics`."""
    found = {fact: node.facts.get(fact) for fact in _FACTS}
    seen = node.facts.get(_DOCTOR)
    if isinstance(seen, dict):
        found |= {f"{_DOCTOR}.{name}": value for name, value in seen.items() if name != _UNREAD}
    return found


def _is_varied(fact: str, varied: Sequence[str]) -> bool:
    """Whether a factor changes it: by its whole name, or all that the doctor says."""
    return fact in varied or fact.partition(".")[0] in varied


def _apart(one: JsonValue, two: JsonValue) -> tuple[object, object]:
    """Of two lists, what each has alone, unless only the order differs."""
    if isinstance(one, list) and isinstance(two, list):
        only = [part for part in one if part not in two], [part for part in two if part not in one]
        return only if any(only) else (one, two)
    return one, two
