"""The bandwidth that a difference in time implies: whether a link can be what made the difference."""

from __future__ import annotations

from dataclasses import dataclass

from scipy import special

from kvik_lab.errors import LabError
from kvik_lab.physics.units import Rate, format_bytes


@dataclass(frozen=True)
class Implied:
    """Bytes over (time - reference time), in bytes a second.

    lo, hi: its interval; hi is None where the difference may be 0 (no bound), both where errors are unknown.
    of_line: share of the line rate. sentence: what it says.
    """

    bytes_per_second: float | None
    lo: float | None
    hi: float | None
    of_line: float | None
    sentence: str


def implied_bandwidth(
    size: float,
    seconds: float,
    reference_seconds: float,
    *,
    error: float | None = None,
    freedom: float = float("inf"),
    line: Rate | None = None,
    level: float = 0.95,
) -> Implied:
    """Divide the bytes moved by the time beyond a reference arm that moves none.

    error, freedom: standard error of the difference of the two times, and its degrees of freedom. The bounds
    are those of the difference, inverted.
    """
    if not size > 0 or not seconds > 0 or not reference_seconds >= 0 or (error is not None and error < 0):
        raise LabError("bytes and seconds are above 0, the reference's seconds and the error not below 0")
    gap = seconds - reference_seconds
    rate = size / gap if gap > 0 else None
    lo = hi = None
    if error is not None:
        half = float(special.stdtrit(min(freedom, 1e9), 0.5 + level / 2)) * error
        lo = size / (gap + half) if gap + half > 0 else None
        hi = size / (gap - half) if gap - half > 0 else None
    share = rate / line.bytes_per_second if rate is not None and line is not None else None
    return Implied(rate, lo, hi, share, _sentence(size, rate, share, lo, line))


def _sentence(
    size: float, rate: float | None, share: float | None, lo: float | None, line: Rate | None
) -> str:
    if rate is None:
        return (
            f"It is not slower than the reference, so moving {format_bytes(size)} took no time that shows: "
            "either they did not move, or they moved beside other work."
        )
    text = f"{format_bytes(size)} in the extra time are {format_bytes(rate)} a second"
    if share is None or line is None:
        return text + "."
    text += f", {share:.1%} of the line rate ({line})"
    if share > 1:
        sure = lo is not None and lo > line.bytes_per_second
        return text + (": all of them cannot have moved." if sure else ": more than the line can carry.")
    if share < 0.5:
        return text + ": the line is not what takes the time."
    return text + "."
