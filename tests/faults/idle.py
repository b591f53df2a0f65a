"""What an engine costs that has many peers and nothing to do.

    python -m tests.faults.idle --peers 200
    python -m tests.faults.idle --peers 20 --nics libfabric:tcp

Every peer is connected, heartbeats go both ways, and nothing is moved. The engine's pages are granted all the
time, and over NICs each peer has read them once, so that the connections are open. Measured is the processor
time of the engine's process, and of its NICs' threads, by the kernel's count, over a minute. On an emulated
processor heartbeats alone cost several per cent: there `--nics-only` says what NICs add. Where a session is
lost on a machine that stood still for a second, the run says nothing, and its status is 2.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.busy import Watch
from tests.faults.crowd import start
from tests.faults.side import Handle
from tests.faults.tables import print_table

MOST = 0.01  # of one core
SETTLE = 6.0  # seconds in which the connecting ends
NIC_THREADS = "kvik-nic-"
STILL = 1.0  # seconds that a machine may stand still, for who lives to be heard in time: half of a death
SAYS_NOTHING = 2  # the exit status of a run that is neither good nor bad


def cpu_seconds(pid: int, name: str = "") -> float:
    """Time that a process's threads, or those whose names begin so, have run, as the scheduler counts it."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    named = [thread for thread in threads if (thread / "comm").read_text().startswith(name)]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in named) / 1e9


def main(arguments: list[str] | None = None) -> int:
    """Measure; 0 if it is below 1 % of a core, 2 if the run says nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=10, help="processes that the peers are in")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--transport", choices=("tcp", "auto"), default="tcp")
    parser.add_argument("--nics", help="NICs, in place of a transport: `libfabric:tcp`, `verbs:rxe0`")
    parser.add_argument("--peer-nics", help="the peers' NICs, where they have others")
    parser.add_argument("--nics-only", action="store_true", help="let the NICs' threads alone decide")
    options = parser.parse_args(arguments)
    transport = "nics" if options.nics else options.transport
    hub = Handle(name="hub", transport=transport, nics=options.nics).ready()
    nics = options.peer_nics or options.nics
    peers = start(min(options.processes, options.peers), options.peers, transport, nics)
    try:
        hub.ask("hold", name="m", nbytes=65536)
        granted = hub.ask("grant", name="m", page_bytes=16384, right="read", expiry=options.seconds + 300.0)
        ticket = granted["ticket"]
        for peer in peers:
            peer.say(call="read" if options.nics else "connect", ticket=ticket)
        for peer in peers:
            peer.hear(180.0)
        watch = Watch()
        time.sleep(SETTLE)
        before, of_nics, began = cpu_seconds(hub.pid), cpu_seconds(hub.pid, NIC_THREADS), time.monotonic()
        time.sleep(options.seconds)
        used, took = cpu_seconds(hub.pid) - before, time.monotonic() - began
        of_nics = cpu_seconds(hub.pid, NIC_THREADS) - of_nics
        counts, still = hub.ask("counts"), watch.longest()
    finally:
        hub.close()
        for peer in peers:
            peer.__exit__()
    stats = counts["stats"]
    heads = ["peers", "seconds", "core %", "of it NICs'", "descriptors", "threads", "sessions lost"]
    lost, part, nics_part = stats["sessions_lost"], used / took, of_nics / took
    row = [stats["sessions_open"], took, 100 * part, 100 * nics_part, counts["fds"], counts["threads"], lost]
    print_table(heads, [row])
    part = nics_part if options.nics_only else part
    whole = stats["sessions_open"] == options.peers and not lost
    if not whole and still > STILL:
        print(f"this run says nothing: the machine stood still for {still:.1f} s")
        return SAYS_NOTHING
    good = part < MOST and whole
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
