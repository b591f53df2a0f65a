"""The options of ``kvik router serve``, and how signals end it. The router itself is a stand-in here."""

from __future__ import annotations

import os
import resource
import signal
import threading
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvik import logs, router

ENGINES = ["--prefill", "http://p0:1", "--prefill", "http://p1:1", "--decode", "http://d0:2"]
BOUND = 10.0


class StandIn:
    """A router that ends when it is told to, on the signals that it sends itself."""

    def __init__(self, signals: int, failure: OSError | None = None, cut: int = 0) -> None:
        self.address = "127.0.0.1:8000"
        self.given: dict[str, Any] = {}
        self.calls: list[str] = []
        self._signals = signals
        self._failure = failure
        self._cut = cut
        self._ended = threading.Event()
        self._waited = False

    def serve_router(self, **given: Any) -> StandIn:
        self.given = given
        return self

    def stop(self) -> None:
        self.calls.append("stop")
        if self._signals == 1:
            self._ended.set()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    def stop_now(self) -> None:
        self.calls.append("stop_now")
        self._ended.set()

    def wait(self, timeout: float) -> int | None:
        if self._failure is not None:
            raise self._failure
        if not self._waited:
            self._waited = True
            os.kill(os.getpid(), signal.SIGTERM)
        return self._cut if self._ended.wait(min(timeout, BOUND)) else None


def serve(monkeypatch: pytest.MonkeyPatch, native: StandIn, *options: str) -> Result:
    monkeypatch.setattr(logs, "to_stderr", lambda level, form: native.calls.append(f"{level} {form}"))
    monkeypatch.setattr("importlib.import_module", lambda name: {"kvik._native": native}[name])
    return CliRunner().invoke(router.router, ["serve", *options])


def test_a_signal_drains_and_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    native = StandIn(signals=1)
    result = serve(monkeypatch, native, *ENGINES, "--port", "0", "--max-body", "2MiB")
    assert (result.exit_code, result.output) == (0, "listening on http://127.0.0.1:8000\n")
    assert native.calls == ["info text", "stop"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert native.given == {
        "prefill": ("http://p0:1", "http://p1:1"),
        "decode": ("http://d0:2",),
        "host": "127.0.0.1",
        "port": 0,
        "connect_timeout": 5.0,
        "prefill_timeout": 300.0,
        "decode_timeout": 600.0,
        "client_timeout": 60.0,
        "release_timeout": 30.0,
        "drain_timeout": 30.0,
        "max_body": 2 << 20,
        "max_body_memory": 512 << 20,
        "max_inflight": 1024,
        "transfer_mode": "pull",
    }


def test_a_second_signal_cuts_off_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    native = StandIn(signals=2, cut=3)
    result = serve(monkeypatch, native, *ENGINES)
    assert result.exit_code == 1
    assert "3 request(s) were cut off" in result.output
    assert native.calls == ["info text", "stop", "stop_now"]


def test_requests_may_take_all_descriptors_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    try:
        assert serve(monkeypatch, StandIn(signals=1), *ENGINES).exit_code == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("signals", "cut"), [(2, 0), (1, 1)])
def test_what_was_cut_off_is_said_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, signals: int, cut: int
) -> None:
    """Two signals where nothing was in progress cut nothing off; with one, the drain timeout may."""
    result = serve(monkeypatch, StandIn(signals=signals, cut=cut), *ENGINES)
    assert (result.exit_code, "cut off" in result.output) == (min(cut, 1), cut > 0)


def test_a_router_that_ends_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    result = serve(monkeypatch, StandIn(signals=1, failure=OSError("no more descriptors")), *ENGINES)
    assert result.exit_code == 1
    assert "no more descriptors" in result.output


@pytest.mark.parametrize(
    "options",
    [["--prefill", "http://p0:1"], [*ENGINES, "--max-body", "lots"], [*ENGINES, "--decode-timeout", "0"]],
)
def test_options_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    native = StandIn(signals=1)
    assert serve(monkeypatch, native, *options).exit_code == 2
    assert native.given == {}
