"""Two processes of one job in the guest: `pair.py PORT SERVER... --- CLIENT...`.

Starts the server, starts the client as soon as something listens on the TCP port over which the two find each
other, and prints what both have said. The exit status is 0 where both have succeeded. Runs in the guest, with
nothing but the standard library.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BETWEEN = "---"
LISTEN = "0A"  # the state, in the kernel's list of sockets
START_LIMIT = 120.0  # seconds until the server listens
LIMIT = 600.0  # seconds; the job's own limit ends it before


def listening(port: int) -> bool:
    """Whether any process listens on a TCP port."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == LISTEN and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def run(port: int, server: Sequence[str], client: Sequence[str]) -> int:
    """Run both; returns the first exit status that is not 0."""
    with tempfile.TemporaryFile("w+") as said:
        serving = subprocess.Popen(server, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            # The kernel tells nobody that a socket listens.
            deadline = time.monotonic() + START_LIMIT
            while not listening(port) and serving.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            status = subprocess.run(client, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False).returncode
            if status != 0:
                serving.kill()  # it may wait for ever for a client that has given up
            status = status or serving.wait(LIMIT)
        finally:
            serving.kill()
            serving.wait()
        said.seek(0)
        print(f"the server, which ended with {serving.returncode}:\n{said.read()}", flush=True)
    return status


def main() -> int:
    """Run the pair that the command line names."""
    port, *words = sys.argv[1:]
    at = words.index(BETWEEN)
    return run(int(port), words[:at], words[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
