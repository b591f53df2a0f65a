"""The live table: a row for each prompt, no wider than 80 columns."""

from rich import box
from rich.table import Table

from kvik.demo import words
from kvik.demo.measure import Row
from kvik.roles.hosts import Rate

HEADERS = ("prompt\ntokens", "KV\nmoved", "TTFT\nalone", "TTFT\nhanded", "KV\ntransfer", "\nGB/s")


def empty(rate: Rate | None) -> Table:
    """The table without rows; with a rate it has a column for the floor that the link sets."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for header in (*HEADERS, *(["link\nfloor"] if rate else [])):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("\nover", no_wrap=True)
    table.add_column("output\ntokens", no_wrap=True)
    return table


def cells(row: Row, rate: Rate | None) -> list[str]:
    """The cells of one row."""
    load = row.load
    said = [f"{row.length:,}", words.size(load.bytes) if load else "-"]
    said += [words.duration(row.alone.ttft), words.duration(row.handed.ttft)]
    said += [words.duration(load.total_s), words.gigabytes(load.bytes, load.wire_s)] if load else ["-", "-"]
    if rate:
        said.append(words.duration(rate.floor(load.bytes)) if load else "-")
    said.append(load.over if load else "-")
    return [*said, _verdict(row)]


def legend(rate: Rate | None) -> str:
    """What the columns mean, in one sentence each."""
    said = (
        "TTFT: time to the first token. KV transfer: from asking the prefill engine until the last byte is "
        "in place. GB/s (10^9 bytes): while bytes moved."
    )
    if rate:
        said += f" Link floor: the least time that {rate} allows."
    return said


def _verdict(row: Row) -> str:
    if not row.equal:
        return "[bold red]DIFFERENT[/]"
    return "[green]equal[/]" if row.moved else "[bold red]not moved[/]"
