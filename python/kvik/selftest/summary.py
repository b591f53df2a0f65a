"""The report's summary in Markdown, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvik.bench.options import size_text
from kvik.bench.report import seconds_text
from kvik.selftest.mover import rate_text

Document = dict[str, Any]


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"
    yield ""


def _here(data: Document) -> Iterator[str]:
    machine, limits, used = data.get("machine", {}), data.get("limits", {}), data.get("used", {})
    rows = [
        ("kvik", machine.get("kvik")),
        ("Python", machine.get("python")),
        ("kernel", machine.get("kernel")),
    ]
    rows += [("processor", machine.get("cpu_model")), ("cores", machine.get("cores_usable"))]
    rows += [("memlock, soft and hard", ", ".join(map(str, limits.get("memlock", []))))]
    devices = limits.get("dev_infiniband") or {}
    rows += [("/dev/infiniband", ", ".join(f"{name}: {may}" for name, may in devices.items()) or "none")]
    rows += [("library", line) for line in data.get("log", [])]
    rows += [("file", path) for path in data.get("libraries", [])]
    rows += [("NICs used", ", ".join(data.get("nics", {})) or "none")]
    rows += [("mechanism", f"{used.get('transport', 'unknown')} by {used.get('mechanism', 'unknown')}")]
    yield from _table(("", "here"), rows)
    ports = data.get("ports", [])
    if ports:
        head = ("device", "port", "driver", "state", "rate", "link_layer", "firmware", "numa_node")
        yield from _table(head, [[port[key] for key in head] for port in ports])


def _first(data: Document) -> Iterator[str]:
    yield f"{data.get('pages')} pages of {size_text(data.get('block_bytes', 0))} a transfer, one at a time."
    yield ""
    phases = ("plan_s", "post_s", "wire_s", "total_s", "call_s")
    rows = [
        (row["op"], row["which"], *(seconds_text(row[phase]) for phase in phases))
        for row in data.get("submits", [])
    ]
    yield from _table(("", "submit", "plan", "post", "wire", "total", "for the caller"), rows)
    warm_ups = [
        (
            row["op"],
            ", ".join(row["transports"]),
            row["channels"],
            len(row["pairs"]),
            ", ".join(pair["nic"] for pair in row["pairs"] if pair["state"] == "failed") or "none",
            seconds_text(row["took_s"]),
        )
        for row in data.get("warm_ups", [])
    ]
    head = ("warm-up before a", "over", "data channels", "pairs of NICs", "NICs without a connection", "took")
    yield from _table(head, warm_ups)


def _sweep(data: Document) -> Iterator[str]:
    yield "GB/s is 1e9 bytes a second: the median of the repeats, in brackets the lowest and the highest."
    yield ""
    rows = [
        (row["op"], size_text(row["block_bytes"]), row["pages"], rate_text(row), _half(row))
        for row in data.get("points", [])
    ]
    yield from _table(("", "block", "blocks a transfer", "rate", "half of the transfers took at most"), rows)
    for line in data.get("left_out", []):
        yield f"- left out: {line}"
    yield ""


def _half(row: Document) -> str:
    seconds = row["latency_s"]["p50"]
    return "unknown" if seconds is None else seconds_text(seconds)


def _grid(data: Document) -> Iterator[str]:
    points = data.get("points", [])
    for op in dict.fromkeys(row["op"] for row in points):
        own = [row for row in points if row["op"] == op]
        depths = sorted({row["in_flight"] for row in own})
        by = {(row["threads"], row["in_flight"]): rate_text(row) for row in own}
        yield f"{op} of {own[0]['pages']} x {size_text(own[0]['block_bytes'])}:"
        yield ""
        rows = [
            (threads, *(by.get((threads, depth), "not measured") for depth in depths))
            for threads in sorted({row["threads"] for row in own})
        ]
        yield from _table(("threads", *(f"{depth} in flight of each" for depth in depths)), rows)


def _nics(data: Document) -> Iterator[str]:
    rows = [
        (
            side,
            name,
            f"{one['in'] / 1e9:.3f}",
            f"{one['out'] / 1e9:.3f}",
            f"{one['failed']:.0f}",
            one["up"] == 1,
        )
        for side, key in (("this", "this_side"), ("other", "other_side"))
        for name, one in data.get(key, {}).items()
    ]
    yield "Bytes are counted by the side that begins a transfer: this one."
    yield ""
    yield from _table(("side", "NIC", "GB in", "GB out", "failed operations", "up"), rows)


def _nothing(_: Document) -> Iterator[str]:
    yield ""


_BODIES: dict[str, Callable[[Document], Iterator[str]]] = {
    "here": _here,
    "conformance": _nothing,
    "first": _first,
    "sweep": _sweep,
    "grid": _grid,
    "nics": _nics,
}


def _lines(document: Document) -> Iterator[str]:
    plan = document["plan"]
    yield f"# kvik selftest: {document['state']}"
    yield ""
    ended = " It was interrupted." if document["interrupted"] else ""
    yield f"Made {document['made']} ({document['format']}); transport {plan['transport']},"
    yield f"NICs {plan['nics'] or 'none'} ({plan['why']}); other side: {plan['asked']['other_side']}.{ended}"
    yield ""
    yield from _table(
        ("part", "", "result", "", "seconds"),
        [(p["number"], p["title"], p["state"], p["said"], f"{p['seconds']:.1f}") for p in document["parts"]],
    )
    for part in document["parts"]:
        yield f"## Part {part['number']}: {part['title']}"
        yield ""
        yield f"{part['state'].upper()}: {_cell(part['said'])}"
        yield ""
        if part["checks"]:
            rows = [(c["name"], c["state"], c["said"], f"{c['seconds']:.2f}") for c in part["checks"]]
            yield from _table(("check", "result", "", "seconds"), rows)
        if part["data"]:
            yield from _BODIES[part["name"]](part["data"])


def render(document: Document) -> str:
    """The whole summary of a report's JSON."""
    return "\n".join(_lines(document)).rstrip("\n") + "\n"
