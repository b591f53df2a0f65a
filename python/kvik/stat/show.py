"""Engines and their rates for people, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvik.bench.options import size_text
from kvik.config.words import shown
from kvik.stat.engines import About
from kvik.stat.snapshot import Rates

WIDTH = 80
_GB = 1e9
_TOP_PEERS = 16
_NAME = 22


def engine_list(found: Iterable[About]) -> Table:
    """One line an engine."""
    table = Table(box=None, pad_edge=False)
    for title, justify in (("PID", "right"), ("NAME", "left"), ("ENGINE", "left"), ("UP", "right")):
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("TRANSPORT", no_wrap=True)
    table.add_column("LISTENS ON", overflow="fold")
    for about in found:
        cells = (
            str(about.pid), shown(about.name), about.engine[:8], duration(about.uptime_s), about.transport,
            ", ".join(about.addresses),
        )  # fmt: skip
        table.add_row(*map(Text, cells))
    return table


def view(rates: Rates) -> Group:
    """What an engine did between two snapshots."""
    about = rates.about
    head = (
        f"{about.title}  pid {about.pid}  engine {about.engine[:8]}  kvik {about.version}  "
        f"up {duration(about.uptime_s)}"
    )
    parts: list[RenderableType] = [Text(head, style="bold"), _peers(rates)]
    parts += [Text(line) for line in _lines(rates)]
    return Group(*parts)


def _peers(rates: Rates) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("PEER", no_wrap=True, width=_NAME)
    table.add_column("VIA", no_wrap=True)
    for title in ("GB/s IN", "GB/s OUT", "XFER/s", "FAILED"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rates.peers[:_TOP_PEERS]:
        cells = (
            shown(row.name) or row.peer[:8],
            row.transport,
            f"{row.in_bytes / _GB:.3f}",
            f"{row.out_bytes / _GB:.3f}",
            f"{row.transfers:.1f}",
            str(row.errors) if row.errors else "",
        )
        table.add_row(*map(Text, cells))
    left = len(rates.peers) - _TOP_PEERS
    if left > 0:
        table.add_row(Text(f"and {left} more", style="dim"))
    if not rates.peers:
        table.add_row(Text("nothing was moved yet", style="dim"))
    return table


def _lines(rates: Rates) -> list[str]:
    grants = f"{rates.grants_live} live, {rates.grants_given} given{_counted(', ', rates.grants_ended)}"
    lines = [
        f"transfers  {rates.open} open{_times(rates.seconds)}",
        f"grants     {grants}",
        f"sessions   {rates.sessions} open{_counted(', peers: ', rates.peer_states)}, "
        f"{rates.reconnects} reconnects, "
        f"{rates.late_heartbeats} late heartbeats",
        f"memory     {_size(rates.memory_held)} of {_size(rates.memory_cap)} held, "
        f"{_size(rates.registered)} in {rates.regions} region{'' if rates.regions == 1 else 's'}",
        f"cpu        {_threads(rates.cpu_percent)}",
    ]
    if rates.quarantined_pages:
        lines.append(f"quarantine {rates.quarantined_pages} pages that a transfer may still touch")
    if rates.refusals:
        lines.append(f"refused    {_counted('', rates.refusals)}")
    if rates.handshakes_refused:
        lines.append(f"handshakes refused: {_counted('', rates.handshakes_refused)}")
    return lines


def _counted(before: str, counts: dict[str, int]) -> str:
    text = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return before + text if text else ""


def _times(seconds: dict[str, float]) -> str:
    return "".join(f", {what} {1e3 * mean:.3g} ms" for what, mean in sorted(seconds.items()))


def _threads(percent: dict[str, float]) -> str:
    """The threads of one kind together: `kvik-io 12.0 %` for `kvik-io-0` and `kvik-io-1`."""
    kinds: dict[str, float] = {}
    for thread, used in percent.items():
        kind = thread.rstrip("0123456789").rstrip("-")
        kinds[kind] = kinds.get(kind, 0.0) + used
    return ", ".join(f"{kind} {used:.1f} %" for kind, used in kinds.items())


def _size(count: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return size_text(count)


def duration(seconds: float) -> str:
    """Seconds in the two largest units: `3m05s`, `2h10m`, `4d03h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
