"""Part 1: what is here, what was asked for, and what is used."""

from __future__ import annotations

import logging

import kvik
from kvik.bench import facts
from kvik.bench.errors import CheckError
from kvik.bench.pages import Cell
from kvik.selftest import hardware
from kvik.selftest.counts import nic_counts
from kvik.selftest.part import Part, Say, checked
from kvik.selftest.plan import Plan
from kvik.selftest.sides import Session

BUFFER = 1 << 20
_LOG_SECONDS = 2.0


_LINES = 200


class Heard(logging.Handler):
    """What kvik's transports log: which library, which NICs, and what becomes of them. Its first lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line once."""
        line = record.getMessage()
        if line not in self.lines and len(self.lines) < _LINES:
            self.lines.append(line)


def listen_in() -> Heard:
    """Hear the transports' log from now on."""
    heard, logger = Heard(), logging.getLogger("kvik.transport")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # A warning is in the report; in the middle of a table it helps nobody.
    kvik.refresh_logging()
    return heard


def preflight(session: Session) -> None:
    """Start an engine as the plan says, and end it: raises what would stop every part."""
    session.engine().close()


def here(part: Part, session: Session, heard: Heard, say: Say) -> None:
    """Collect the facts, then ask which transport one transfer takes."""
    plan = session.plan
    ports, limits = hardware.ports(), hardware.limits()
    part.data |= {"machine": facts.collect(), "ports": hardware.to_json(ports), "limits": limits}
    _tell(part, plan, say)
    checked(part, "an engine starts with what was asked for", lambda: _nics(part, session), say)
    kvik.flush_logs(_LOG_SECONDS)
    part.data |= {"log": list(heard.lines), "libraries": hardware.libraries()}
    for line in (*part.data["log"], *part.data["libraries"]):
        say(f"  library   {line}")
    checked(part, "one transfer takes that transport", lambda: _transport(part, session), say)
    used = part.data.get("used", {})
    part.settle(f"{used.get('transport')} by {used.get('mechanism')}; {plan.why}")


def _tell(part: Part, plan: Plan, say: Say) -> None:
    machine, limits = part.data["machine"], part.data["limits"]
    say(f"  versions  kvik {machine['kvik']}, Python {machine['python']}, kernel {machine['kernel']}")
    say(f"  machine   {machine['cpu_model']}, {machine['cores_usable']} of {machine['cores']} cores")
    for port in part.data["ports"]:
        say(
            f"  port      {port['device']}/{port['port']} ({port['driver']}): {port['state']}, "
            f"{port['rate']}, {port['link_layer']}, firmware {port['firmware'] or 'unknown'}"
        )
    if not part.data["ports"]:
        say("  port      the kernel has no RDMA device")
    say(f"  memlock   {limits['memlock'][0]} (soft), {limits['memlock'][1]} (hard)")
    say(f"  devices   {limits['dev_infiniband'] or 'there is no /dev/infiniband'}")
    say(f"  used      transport {plan.transport}, NICs {plan.nics or 'none'}: {plan.why}")


def _nics(part: Part, session: Session) -> str:
    with session.engine() as engine:
        part.data["nics"] = nic_counts(engine.metrics())
    names = [f"{name} ({'up' if one.get('up') else 'down'})" for name, one in part.data["nics"].items()]
    return f"its NICs are {', '.join(names)}" if names else "it uses no NICs"


def _transport(part: Part, session: Session) -> str:
    cell = Cell("read", 4096, 16)
    with session.sides(part.name, BUFFER, counted=False) as sides:
        part.data["other_side"] = sides.other.about()
        if session.plan.nics is not None and sides.other.options.nics is None:
            raise CheckError("the other side was not told of NICs: start it with the same --nics")
        pages, ticket = sides.open(cell, session.plan.asked.seed)
        report = sides.judge(sides.move(cell, pages, ticket, 0).wait(), cell.batch_bytes)
    part.data["used"] = {
        "transport": report.transport,
        "mechanism": report.mechanism,
        "checks": list(report.checks),
        "rejected_transports": list(report.rejected_transports),
    }
    return f"{report.transport} by {report.mechanism}; checks: {', '.join(report.checks)}"
