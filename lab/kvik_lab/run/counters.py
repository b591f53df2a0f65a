"""The counters of a server, by its `/metrics`."""

from __future__ import annotations

import http.client
import math
from urllib.parse import urlsplit

LIMIT = 10.0  # seconds


def scrape(url: str) -> dict[str, float]:
    """Each sample by its name with labels, as the server writes them; empty where it has no metrics, or does not
    answer: a gate says that it could not be judged."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        return parse(text) if answer.status == 200 else {}
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()


def parse(text: str) -> dict[str, float]:
    """Prometheus' text form; what is no finite number is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition("} ") if "{" in line else line.partition(" ")
        name = f"{name}}}" if "{" in line else name
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            found[name] = value
    return found
