"""Numbers as people read them: three digits, and the unit that fits."""


def duration(seconds: float) -> str:
    """`0.42 ms`, `12.3 ms`, `850 ms`, `1.25 s`, `12.5 s`."""
    millis = seconds * 1e3
    if millis < 999.5:
        return f"{_three(millis)} ms"
    return f"{_three(seconds)} s"


def size(nbytes: int) -> str:
    """`512 KiB`, `12.5 MiB`, `1.25 GiB`; of 1024 bytes each."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 999.5:
            return f"{_three(value) if unit != 'B' else nbytes} {unit}"
        value /= 1024
    return f"{_three(value)} GiB"


def gigabytes(nbytes: int, seconds: float) -> str:
    """A rate in GB/s, of 10^9 bytes each, without the unit."""
    return _three(nbytes / seconds / 1e9) if seconds > 0 else "-"


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
