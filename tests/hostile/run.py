"""Every attack on one victim, one after the other: `python -m tests.hostile.run [--full] [ATTACK...]`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

from tests.hostile import wire
from tests.hostile.attacks import ATTACKS, FULL, SMALL, Dose
from tests.hostile.scene import Fared, Figures, Scene

SETTLE = 4.5  # seconds after which an engine has forgotten whoever does not answer
PATIENCE = 10.0  # seconds of an attack in which the honest peer must have moved something


def attacked(scene: Scene, name: str, dose: Dose) -> Fared:
    """One attack, with the figures around it."""
    before, calm = scene.figures(), scene.idle()
    _, first = scene.counts()
    began = time.monotonic()
    with scene.watched() as seen:
        try:
            note = ATTACKS[name](wire.address(scene.address), dose)
            ended, last = scene.counts()
            # On a busy machine a share of an attack may be over before it is anybody's turn.
            while last["count"] == first["count"] and ended < began + PATIENCE:
                note = ATTACKS[name](wire.address(scene.address), dose)
                ended, last = scene.counts()
        except (AssertionError, OSError) as error:
            note = f"FAILED: {type(error).__name__}: {error}"
            ended, last = scene.counts()
    took = ended - began
    after = _settled(scene, before)
    calm_after = scene.idle()
    _, final = scene.counts()
    rate = (last["count"] - first["count"]) / took
    peak = Figures(*(max(getattr(at, f.name) for at in seen) for f in dataclasses.fields(Figures)))
    calm = (calm + calm_after) / 2
    errors, wrong = final["errors"] - first["errors"], final["wrong"] - first["wrong"]
    first_error = str(final["first"])[:200] if errors else ""
    reads = last["count"] - first["count"]
    return Fared(before, peak, after, reads, errors, wrong, rate / max(calm, 1e-9), note, first_error)


def _settled(scene: Scene, before: Figures) -> Figures:
    """The victim once it has forgotten whoever left or does not answer, or the time for that is over."""
    end = time.monotonic() + SETTLE
    while (now := scene.figures()).fds > before.fds and time.monotonic() < end:
        time.sleep(0.05)
    return now


def row(name: str, fared: Fared) -> str:
    """A line of the table."""
    states = (fared.before, fared.peak, fared.after)
    return (
        f"{name:16} {'/'.join(f'{at.rss_mib:.0f}' for at in states):>13} "
        f"{'/'.join(str(at.threads) for at in states):>9} {'/'.join(str(at.fds) for at in states):>13} "
        f"{fared.reads:7} {fared.errors:6} {fared.wrong:5} {fared.ratio:5.2f}  {fared.note}"
    )


HEAD = (
    f"{'attack':16} {'RSS MiB':>13} {'threads':>9} {'descriptors':>13} "
    f"{'reads':>7} {'errors':>6} {'wrong':>5} {'rate':>5}  (before/peak/after; rate against quiet)"
)


def main() -> int:
    """Run the named attacks, or all; 1 when one did harm."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.run", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--full", action="store_true", help="1,000 connections, a million tickets")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    unknown = set(given.attacks) - set(ATTACKS)
    if unknown:
        parser.error(f"no such attack: {', '.join(sorted(unknown))}; there are: {', '.join(ATTACKS)}")
    dose = dataclasses.replace(FULL if given.full else SMALL, seed=given.seed)
    print(f"seed {dose.seed}, {dose.connections} connections, {dose.tickets:,} tickets")
    print(HEAD, flush=True)
    harmed = 0
    with Scene(quiet=2.0 if given.full else 1.0) as scene:
        for name in given.attacks or ATTACKS:
            fared = attacked(scene, name, dose)
            print(row(name, fared), flush=True)
            if fared.first_error:
                print(f"  first error: {fared.first_error}")
            harmed += harm(fared) is not None
    print(f"{harmed} attacks did harm")
    return min(harmed, 1)


def harm(fared: Fared) -> str | None:
    """What an attack did that it must not be able to do."""
    if fared.note.startswith("FAILED"):
        return fared.note
    if fared.errors or fared.wrong or not fared.reads:
        return f"{fared.reads} reads, {fared.errors} errors, {fared.wrong} wrong: {fared.first_error}"
    if fared.peak.rss_mib - fared.before.rss_mib > 256:
        return f"the victim grew by {fared.peak.rss_mib - fared.before.rss_mib:.0f} MiB"
    if fared.peak.threads > fared.before.threads or fared.after.fds > fared.before.fds:
        return f"threads or descriptors stayed: {fared.before} {fared.peak} {fared.after}"
    return None


if __name__ == "__main__":
    sys.exit(main())
