"""Cores shared out by threads, not by sessions, while vLLM's processes are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

SETTING = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextlib.contextmanager
def without_autogroups() -> Iterator[None]:
    """Turn the kernel's groups by session off (`sched_autogroup_enabled`), and on again at the end.

    Each server here is a session of its own, as under a supervisor. Where it is not in a control group as
    well, as a service or a container is, the kernel gives each session the same share of a core, and a
    process of vLLM that yields in a loop yields within its session only: on two cores others stood still for
    seconds (Linux 6.18). Without the right to change it, or on a kernel without it, nothing is changed.
    """
    try:
        before = SETTING.read_text()
        if before.strip() != "0":
            SETTING.write_text("0")
    except OSError:
        yield
        return
    try:
        yield
    finally:
        if before.strip() != "0":
            SETTING.write_text(before)
