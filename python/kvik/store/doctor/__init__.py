"""``kvik store doctor``: what the servers of a store hold, and what is wrong with it."""

from kvik.store.doctor.rules import Finding, findings
from kvik.store.doctor.survey import Amount, Contents, Namespace, Server, Survey, examine

__all__ = ["Amount", "Contents", "Finding", "Namespace", "Server", "Survey", "examine", "findings"]
