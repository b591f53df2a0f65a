"""kvik's log records as lines of JSON, and where a command sends them.

Records come from the loggers `kvik.engine`, `kvik.transport`, `kvik.router`, ... (see `kvik._logs`), and from
`vllm.kvik` in a serving engine. They carry ids as attributes, so that one request can be followed through
router, prefill engine, transfer and decode engine: `kvik_engine`, `kvik_peer` (engine ids), `kvik_transfer`
(a number within its engine), `kvik_grant` and `kvik_request` (the request's id; the `tag` that was given to
`Engine.grant`, `read`, `write` or `release`).
"""

import json
import logging
import sys
import time
from typing import Final, Literal, TypeAlias

from kvik import _logs

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Format: TypeAlias = Literal["text", "json"]


IDS: Final = ("engine", "peer", "transfer", "grant", "request")
"""The ids that a record may carry, as attributes that begin with `kvik_`."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the ids that the record carries.

    `time` is UTC in ISO 8601 with milliseconds. An exception is added as `exception`. With `logging.config`:
    `{"formatters": {"json": {"()": "kvik.JsonFormatter"}}, ...}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, str] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in IDS:
            value = getattr(record, f"kvik_{name}", None)
            if value is not None:
                line[name] = str(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def to_stderr(level: Level, form: Format) -> None:
    """Send kvik's records to standard error, for a command that has the process to itself."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else plain)
    logger = logging.getLogger("kvik")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    _logs.start()
