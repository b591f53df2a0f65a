"""Nodes that Ray gives: a placement group with a bundle for each, every one on a host of its own.

In each an actor starts every role and every short command. `ray` is asked by another process, the bridge,
which ends with this one and gives the nodes back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvik.roles.node import NodeError
from kvik.roles.processes import Process, ProcessError
from kvik_lab.run import ray_bridge
from kvik_lab.run.ray_bridge import DRAIN, HELD
from kvik_lab.run.remote import Line, Way
from kvik_lab.run.spec import NodeSpec

START_LIMIT = 60.0  # seconds to find the cluster, and for an actor to start


@contextlib.contextmanager
def ray_ways(specs: Mapping[str, NodeSpec], logs: Path) -> Iterator[dict[str, Way]]:
    """A host of Ray's for each, within the block. `NodeError` where Ray does not give them in time."""
    wait = max(spec.wait for spec in specs.values())
    clusters = {spec.host or "auto" for spec in specs.values()}
    if len(clusters) > 1:
        raise NodeError(f"nodes {', '.join(specs)}: they are of one cluster, and `host` names several")
    asked = {"address": clusters.pop(), "wait": wait, "bundles": [_bundle(one) for one in specs.values()]}
    log = logs / "ray.log"
    log.write_text("")  # of an earlier one, its nodes
    # Not in the study's folder: the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="kvik-ray-") as folder, contextlib.ExitStack() as stack:
        socket = f"{folder}/s"
        command = [sys.executable, "-u", "-m", ray_bridge.__name__, socket, json.dumps(asked)]
        bridge = Process("ray", command, log, grace=DRAIN + 5.0)
        stack.callback(bridge.stop)
        try:
            bridge.wait_until(lambda: HELD in bridge.said(), time.monotonic() + wait + START_LIMIT)
        except ProcessError as error:
            why = f"Ray does not give them within {wait:g} s (`wait`)"
            raise NodeError(f"nodes {', '.join(specs)}: {why}\n{error}") from error
        held = next(line for line in bridge.said().splitlines() if line.startswith(HELD))
        ways = {}
        for number, (name, about) in enumerate(zip(specs, json.loads(held[len(HELD) :]), strict=True)):
            line = Line(name, about["host"], functools.partial(_carried, socket, number))
            python = specs[name].python or sys.executable
            stack.enter_context(line.pulse(python, logs / f"ray-{name}.beats", START_LIMIT))
            ways[name] = Way(line, about["address"])
        yield ways


def _bundle(spec: NodeSpec) -> dict[str, float]:
    """{"GPU": 1.0} of GPU=1."""
    pairs = [option.partition("=")[::2] for option in spec.options]
    return {name: float(amount) for name, amount in pairs} or {"CPU": 1.0}


def _carried(socket: str, number: int, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-S", "-P", ray_bridge.__file__, socket, str(number), *command]
