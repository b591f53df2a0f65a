"""Moving pages between engines: the public words over the native module.

owner: grant = engine.grant(region.pages(layout, ids)); send str(grant.ticket)
other: report = engine.read(local_pages, ticket).wait()
"""

from kvik._events import Event, EventKind, Peer, PeerStateName, Subscription
from kvik._logs import flush_logs, refresh_logging
from kvik._names import RightName, TrafficClassName, TransportName, VerifyName
from kvik._native import (
    Content,
    Engine,
    Events,
    Grant,
    JointRead,
    Layout,
    Notice,
    PageSet,
    Read,
    Region,
    StreamMark,
    Ticket,
    Transfer,
    WarmUp,
    content_chain,
    parse_size,
)
from kvik._report import Estimate, JointReport, NicPair, Report, WarmUpReport

__all__ = [
    "Content",
    "Engine",
    "Estimate",
    "Event",
    "EventKind",
    "Events",
    "Grant",
    "JointRead",
    "JointReport",
    "Layout",
    "NicPair",
    "Notice",
    "PageSet",
    "Peer",
    "PeerStateName",
    "Read",
    "Region",
    "Report",
    "RightName",
    "StreamMark",
    "Subscription",
    "Ticket",
    "TrafficClassName",
    "Transfer",
    "TransportName",
    "VerifyName",
    "WarmUp",
    "WarmUpReport",
    "content_chain",
    "flush_logs",
    "parse_size",
    "refresh_logging",
]
