"""The machine as one HTML page without anything from outside: the PCIe tree drawn, findings, paths, ports,
libraries, what confines the process, unread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from kvik.doctor.model import Finding, Machine
from kvik.doctor.show import cost_text, label, port_text, process_rows, tree_order

_ROW, _INDENT, _BOX = 34, 36, 26  # pixels
_COLOURS = {"gpu": "#cde8cf", "nic": "#cfe0f5", "nvme": "#eee0f3", "bridge": "#f1f1f1"}
_CSS = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem;
margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0;
border-bottom: 1px solid #ddd; vertical-align: top; }
td:first-child { white-space: nowrap; } code { font-size: 90%; }
svg text { font: 13px system-ui, sans-serif; }
.tree { overflow-x: auto; } h2 { margin-top: 2rem; }
"""


def page(machine: Machine, found: list[Finding], title: str) -> str:
    """The whole page."""
    return "\n".join(_parts(machine, found, title)) + "\n"


def _parts(machine: Machine, found: list[Finding], title: str) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f"<style>{_CSS}</style></head><body><h1>{escape(title)}</h1>"
    chipset = f", chipset {machine.chipset}" if machine.chipset else ""
    yield f"<p>{escape(machine.board or 'The board says no name')}{escape(chipset)}</p>"
    yield "<h2>Findings</h2>"
    yield from _table(
        ("code", "device", "fact", "cost", "advice", "traffic"),
        ((f.code, f.device, f.fact, cost_text(f), f.advice, f.assumes.replace(",", ", ")) for f in found),
    )
    yield '<h2>PCIe tree</h2><div class="tree">'
    yield from _drawing(machine, {name for f in found for name in f.device.split(", ")})
    yield "</div>"
    yield "<h2>Paths</h2>"
    yield from _table(
        ("from", "to", "ideal GB/s each way", "bottleneck", "crosses"),
        (
            (pair.a, pair.b, "unknown" if pair.gbs is None else f"{pair.gbs:.1f}", pair.bottleneck,
             " and ".join(["chipset"] * (pair.chipset > 0) + ["NUMA nodes"] * pair.crosses_numa))
            for pair in machine.pairs
        ),
    )  # fmt: skip
    yield "<h2>Ports and cables</h2>"
    yield from _table(("device", "port"), ((net.name, port_text(net)) for net in machine.nets))
    yield "<h2>This process</h2>"
    yield from _table(("", ""), process_rows(machine.limits, machine.container_marks, machine.not_there))
    yield "<h2>Libraries</h2>"
    yield from _table(
        ("library", "version", "of", "file"),
        ((one.name, one.version or "not said", one.origin, one.path) for one in machine.libraries),
    )
    yield "<h2>Not read</h2>"
    yield from _table(("fact", "reason"), ((missing.path, missing.reason) for missing in machine.unread))
    yield "</body></html>"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    if not lines:
        yield "<p>None.</p>"
        return
    yield f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"
    yield from lines
    yield "</table>"


def _drawing(machine: Machine, marked: set[str]) -> Iterator[str]:
    """The tree as SVG: CPU at the top, a line for each link, as thick as it is wide; red where a finding
    is."""
    order = list(tree_order(machine))
    marked = marked | {nic.address for nic in machine.nics if nic.name in marked and nic.address}
    rows = {address: index + 1 for index, (address, _) in enumerate(order)}
    width = 720 + _INDENT * max((depth for _, depth in order), default=0)
    yield (
        f'<svg width="{width}" height="{_ROW * (len(order) + 1) + 8}" role="img" '
        f'aria-label="PCIe tree of {len(order)} devices">'
    )
    yield _box(0, 0, "#fff3cd", "#777", "CPU and memory")
    for address, depth in order:
        device = machine.devices[address]
        parent = rows[device.chain[0]] if device.chain else 0
        x, y = depth * _INDENT + 14, rows[address] * _ROW + _BOX // 2
        colour = "#c0392b" if address in marked else "#777"
        thick = max(1.0, (device.link.width or 1) / 3)
        yield (
            f'<path d="M{x} {parent * _ROW + _BOX} V{y} H{x + 22}" fill="none" stroke="{colour}" '
            f'stroke-width="{thick:.1f}"/>'
        )
    for address, depth in order:
        colour = "#c0392b" if address in marked else "#777"
        fill = _COLOURS.get(machine.devices[address].kind, "#fff")
        yield _box(
            (depth + 1) * _INDENT, rows[address] * _ROW, fill, colour, f"{address}  {label(machine, address)}"
        )
    yield "</svg>"


def _box(x: int, y: int, fill: str, stroke: str, text: str) -> str:
    return (
        f'<rect x="{x}" y="{y + 1}" width="640" height="{_BOX}" rx="4" fill="{fill}" stroke="{stroke}"/>'
        f'<text x="{x + 8}" y="{y + 18}">{escape(text)}</text>'
    )
