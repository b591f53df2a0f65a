"""kvik's log records arrive in Python's `logging`, and cost the data threads nothing but a queue."""

import base64
import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest

import kvik
from tests.python.peers import LIMIT, Peer, Pipe, empty, engines, never_issued, owned

SECRET = "hush-4711-hush"  # noqa: S105 - it is here to be looked for


class Kept(logging.Handler):
    """Keeps the records it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.threads: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.threads.add(threading.current_thread().name)


@contextlib.contextmanager
def kept(level: int) -> Iterator[Kept]:
    """What `logging` gets from kvik at this level."""
    logger, handler = logging.getLogger("kvik"), Kept()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    kvik.refresh_logging()
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        kvik.refresh_logging()


def some_traffic() -> tuple[str, str]:
    """A transfer that succeeds and one that fails; the engine's and the grant's id."""
    with engines() as start:
        here, there = start(secret=SECRET), start(secret=SECRET)
        source, target = owned(there), empty(here)
        grant = there.grant(source.of(), use="many")
        here.read(target.of(), grant.ticket, transport="tcp").wait(LIMIT)
        with pytest.raises(kvik.KvikError):
            here.read(target.of(), never_issued(there, source.layout), deadline=0.3).wait(LIMIT)
        return there.id, grant.id


def test_records_name_their_part_and_carry_ids() -> None:
    with kept(1) as log:
        some_traffic()
        assert kvik.flush_logs(LIMIT)
    assert log.records
    assert all(record.name.startswith("kvik.") and record.name.count(".") == 1 for record in log.records)
    assert log.threads == {"kvik-log"}
    fields = {name for record in log.records for name in vars(record) if name.startswith("kvik_")}
    assert fields
    assert fields <= {"kvik_engine", "kvik_peer", "kvik_transfer", "kvik_grant", "kvik_request"}
    times = [record.created for record in log.records if record.name != "kvik.log"]
    assert max(times) - min(times) < 2 * LIMIT


def test_a_request_is_named_in_every_record_about_its_grant_and_transfers() -> None:
    with kept(logging.DEBUG) as log:
        with engines() as start:
            here, there = start(), start()
            source, target = owned(there), empty(here)
            grant = there.grant(source.of(), tag="request-17\nkvik: all is well")
            here.read(target.of(), grant.ticket, tag="request-17", confirm=False).wait(LIMIT)
            with pytest.raises(kvik.PageNotGranted):
                here.read(target.of(), grant.ticket, remote_slices=(0, 9), tag="request-18").wait(LIMIT)
            here.release(grant.ticket, tag="request-19").wait(LIMIT)
            assert grant.wait(LIMIT) == "consumed"
        assert kvik.flush_logs(LIMIT)
    told = [
        (record.getMessage().split(":")[0], vars(record)["kvik_request"])
        for record in log.records
        if getattr(record, "kvik_grant", None) == grant.id
    ]
    assert sorted(told) == [
        ("grant ended", "request-17kvik: all is well"),
        ("grant given", "request-17kvik: all is well"),
        ("transfer begun", "request-17"),
        ("transfer begun", "request-18"),
        ("transfer begun", "request-19"),
        ("transfer done", "request-17"),
        ("transfer done", "request-19"),
        ("transfer failed", "request-18"),
    ]


def test_no_record_holds_the_secret() -> None:
    with kept(1) as log:
        some_traffic()
        assert kvik.flush_logs(LIMIT)
    said = "\n".join(f"{record.getMessage()} {vars(record)}" for record in log.records).lower()
    for form in (SECRET, SECRET.encode().hex(), base64.b64encode(SECRET.encode()).decode().rstrip("=")):
        assert form.lower() not in said


def test_levels_are_kept() -> None:
    with kept(logging.CRITICAL + 1) as log:
        some_traffic()
        assert kvik.flush_logs(LIMIT)
    assert log.records == []
    with kept(logging.WARNING) as log:
        some_traffic()
        assert kvik.flush_logs(LIMIT)
    assert all(record.levelno >= logging.WARNING for record in log.records)


def test_a_logger_below_may_ask_for_more() -> None:
    part = logging.getLogger("kvik.engine")
    with kept(logging.WARNING) as log:
        part.setLevel(logging.DEBUG)
        try:
            kvik.refresh_logging()
            some_traffic()
            assert kvik.flush_logs(LIMIT)
        finally:
            part.setLevel(logging.NOTSET)
    low = [record.name for record in log.records if record.levelno < logging.WARNING]
    assert set(low) == {"kvik.engine"}


def test_a_handler_that_hangs_does_not_hang_a_transfer() -> None:
    hold, seen = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            seen.set()
            hold.wait(LIMIT)

    logger, slow = logging.getLogger("kvik"), Slow()
    with kept(1):
        logger.addHandler(slow)
        try:
            some_traffic()
            assert seen.wait(LIMIT)
            assert not kvik.flush_logs(0.05)
        finally:
            hold.set()
            logger.removeHandler(slow)
        assert kvik.flush_logs(LIMIT)


def test_a_filter_that_fails_does_not_end_the_thread(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError(f"no to {record.name}")

    logger, broken = logging.getLogger("kvik"), Broken()
    with kept(1):
        logger.addHandler(broken)
        some_traffic()
        assert kvik.flush_logs(LIMIT)
        logger.removeHandler(broken)
    with kept(1) as log:
        some_traffic()
        assert kvik.flush_logs(LIMIT)
    assert log.records
    assert "no to kvik" in capsys.readouterr().err


def to_stdout(pipe: Pipe) -> None:
    """Log to the parent until the interpreter ends, without a flush."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            pipe.say(name=record.name)

    logger = logging.getLogger("kvik")
    logger.addHandler(Told())
    logger.setLevel(1)
    kvik.Engine()


def test_what_is_logged_at_the_end_is_delivered() -> None:
    with Peer(to_stdout) as peer:
        assert peer.hear()["name"].startswith("kvik.")
        assert peer.end() == 0
