"""Moving pages between engines: the public words over the native module.

owner: grant = engine.grant(region.pages(layout, ids)); send str(grant.ticket)
other: report = engine.read(local_pages, ticket).wait()
"""

from kvik._logs import flush_logs, refresh_logging
from kvik._names import RightName, TransportName, VerifyName
from kvik._native import (
    Engine,
    Grant,
    Layout,
    PageSet,
    Region,
    Ticket,
    Transfer,
    content_chain,
    parse_size,
)
from kvik._report import Report

__all__ = [
    "Engine",
    "Grant",
    "Layout",
    "PageSet",
    "Region",
    "Report",
    "RightName",
    "Ticket",
    "Transfer",
    "TransportName",
    "VerifyName",
    "content_chain",
    "flush_logs",
    "parse_size",
    "refresh_logging",
]
