"""kvik's log records in vLLM's log: what the handover says, and what its engines say of their peers."""

from __future__ import annotations

import logging

NAME = "vllm.kvik"
FROM = "kvik"


class ToVllm(logging.Handler):
    """Hands records on to vLLM's logger of this adapter, which has vLLM's handlers, format and level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record on."""
        logger = logging.getLogger(NAME)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def adopt() -> None:
    """Let kvik speak in vLLM's log; again is harmless. A level that was set already is kept."""
    ours = logging.getLogger(FROM)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.getLogger(NAME).getEffectiveLevel())
    if not any(handler.name == NAME for handler in ours.handlers):
        handler = ToVllm()
        handler.name = NAME
        ours.addHandler(handler)
