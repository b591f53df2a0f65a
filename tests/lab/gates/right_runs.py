"""How many of so many right runs the gates call invalid: none may be.

    python -m tests.lab.gates.right_runs [--runs 100] [--seed N]

Runs of every kind of arrival and several lengths, on emulated pairs over `tcp` and `local`, of which each has
ten runs. Prints how many were valid, suspect and invalid, and why. On a machine that
does other work, runs are suspect for their neighbours, as they should be.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kvik_lab.gates import judge_study
from kvik_lab.records import RunRecord
from tests.lab.gates.scene import pair

RUNS_OF_A_PAIR = 10
ARRIVALS: tuple[dict[str, Any], ...] = (
    {"kind": "closed", "concurrency": 3},
    {"kind": "rounds", "concurrency": 4},
    {"kind": "constant", "rate": 20.0},
    {"kind": "poisson", "rate": 20.0},
    {"kind": "gamma", "rate": 20.0, "shape": 0.5},
)


def runs_on(folder: Path, transport: str, count: int, draw: random.Random) -> list[RunRecord]:
    """So many right runs on one pair."""
    option = ("--transport", transport)
    with pair(folder, option, option) as scene:
        return [
            scene.run(
                arrival=draw.choice(ARRIVALS),
                prompt={"tokens": draw.choice((17, 96, 500, 1000)), "output": draw.choice((2, 5))},
                stated={"transport": transport, "varied": ("transport",)},
            )
            for _ in range(count)
        ]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    draw, records = random.Random(asked.seed), list[RunRecord]()
    while len(records) < asked.runs:
        transport = ("tcp", "local")[len(records) // RUNS_OF_A_PAIR % 2]
        with tempfile.TemporaryDirectory() as folder:
            records += runs_on(Path(folder), transport, min(RUNS_OF_A_PAIR, asked.runs - len(records)), draw)
        print(f"{len(records)} of {asked.runs}", flush=True)
    judged = judge_study(records)
    for record in judged:
        for finding in record.findings:
            if finding.status == "invalid":
                print(f"{record.id}: {finding.gate}: {finding.what}")
    why = Counter(one.gate for record in judged for one in record.findings if one.status == "suspect")
    print(dict(Counter(record.verdict for record in judged)), "suspect by gate:", dict(why))
    return int(any(record.verdict == "invalid" for record in judged))


if __name__ == "__main__":
    sys.exit(main())
