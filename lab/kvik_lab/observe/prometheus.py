"""Counters of a server, from Prometheus' text format."""

from __future__ import annotations

import http.client
import math
from collections.abc import Iterable
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvik_lab.errors import LabError
from kvik_lab.records import Counters

_LONGEST = 64 << 20


def scrape(url: str, timeout: float = 10.0) -> Counters:
    """What a server says at `url`, or at its `/metrics` where the URL has no path. Raises `LabError`."""
    parts = urlsplit(url)
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(_LONGEST).decode(errors="replace")
        if answer.status != 200:
            raise LabError(f"{url}: HTTP {answer.status} for its metrics: {text[:200]}")
    except (OSError, http.client.HTTPException) as error:
        raise LabError(f"{url}: does not tell its metrics: {error}; is the server up?") from error
    finally:
        connection.close()
    return parse(text, url)


def parse(text: str, where: str) -> Counters:
    """The samples of a text, by `series`; buckets of histograms and times of creation are left out. Raises
    `LabError` where it is no such text."""
    try:
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    except ValueError as error:
        raise LabError(f"{where}: what it tells are no metrics: {error}") from error
    return collect(samples)


def collect(samples: Iterable[Sample]) -> Counters:
    """Samples as counters; series that come twice are added up."""
    found: Counters = {}
    for sample in samples:
        if sample.name.endswith(("_bucket", "_created")) or not math.isfinite(sample.value):
            continue
        key = series(sample.name, sample.labels)
        found[key] = found.get(key, 0.0) + float(sample.value)
    return found


def series(name: str, labels: dict[str, str]) -> str:
    """A series as Prometheus writes it, labels in the order of their names."""
    if not labels:
        return name
    parts = []
    for key in sorted(labels):
        value = labels[key].replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        parts.append(f'{key}="{value}"')
    return f"{name}{{{','.join(parts)}}}"
