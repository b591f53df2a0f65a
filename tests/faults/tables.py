"""What the tools of the fault lab print."""

from collections.abc import Sequence


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table with its columns as wide as they have to be; words to the left, numbers to the right."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *texts, strict=True)]
    numbers = [all(not isinstance(row[i], str) for row in rows) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        placed = zip(cells, widths, numbers, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed)

    print(line(heads).rstrip())
    print("  ".join("-" * width for width in widths))
    for row in texts:
        print(line(row).rstrip())


def quantile(values: Sequence[float], part: float) -> float | None:
    """The value that a part of all do not exceed; `None` where there are too few values to say."""
    if not values or (part < 1.0 and len(values) * (1 - part) < 1):
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def spread(values: Sequence[float]) -> list[float | None]:
    """p50, p99 and the largest; p99 only of 100 values or more."""
    return [
        quantile(values, 0.5) if len(values) > 1 else None,
        quantile(values, 0.99),
        max(values, default=None),
    ]


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
