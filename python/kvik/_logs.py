"""kvik's log records in Python's `logging`.

The native threads move data and must not wait for Python, so they never take the GIL: a record goes into a
bounded queue of 4096 (more are dropped, and the number of those is logged), from which the daemon thread
`kvik-log` takes it. Loggers are named after kvik's parts: `kvik.engine`, `kvik.proto`, `kvik.transport`, ...
Ids come along as the extra fields `kvik_engine`, `kvik_peer`, `kvik_transfer` and `kvik_grant`, and
`kvik_request` where a request's id was given as `tag`.

A level that no logger wants costs one atomic load. The native side has that level cached; change levels
before the first engine is made, or call `refresh_logging()` afterwards.
"""

import atexit
import logging
import os
import signal
import threading
import traceback
from typing import Final

from kvik import _native

_LEVELS: Final = (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_OFF: Final = 1000
_CLOSE_LIMIT: Final = 5.0  # seconds for all engines at the end of the interpreter
_FLUSH_LIMIT: Final = 1.0

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Make sure that records are delivered. Every `Engine` calls it."""
    global _thread
    refresh_logging()
    with _lock:
        if _thread is None or not _thread.is_alive():
            _native.stop_records(False)
            _thread = threading.Thread(target=_deliver, name="kvik-log", daemon=True)
            _thread.start()


def refresh_logging() -> None:
    """Take over the levels of the `kvik` loggers, after they were changed."""
    _native.set_log_level(_wanted_level())


def flush_logs(timeout: float = 1.0) -> bool:
    """Wait until `logging` has had every record so far; False if that takes longer than `timeout` seconds."""
    return _native.flush_records(timeout)


def _wanted_level() -> int:
    """The lowest level that `kvik` or a logger below it handles."""
    names = [name for name in list(logging.root.manager.loggerDict) if name.startswith("kvik.")]
    loggers = [logging.getLogger(name) for name in ["kvik", *names]]
    return next((level for level in _LEVELS if any(one.isEnabledFor(level) for one in loggers)), _OFF)


def _deliver() -> None:
    # A signal is for the main thread, which may be sleeping in a call that only its own signal interrupts.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _native.name_thread("kvik-log")
    while (batch := _native.next_records()) is not None:
        for entry in batch:
            _emit(entry)
        refresh_logging()


def _emit(entry: "_native.LogEntry") -> None:
    level, name, text, created, thread, path, line, extra = entry
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(level):
        return
    try:
        record = logger.makeRecord(name, level, path, line, text, (), None, extra=extra)
        if created > 0:
            record.created = created
            record.msecs = int(created * 1000) % 1000
        record.threadName = thread
        logger.handle(record)
    except Exception:
        # A filter of the application failed; its own records would tell it in the same way.
        if logging.raiseExceptions:
            traceback.print_exc()


def _at_exit() -> None:
    """Close what is open while Python still works, then deliver what that logged."""
    _native.close_all(_CLOSE_LIMIT)
    thread = _thread
    if thread is not None and thread.is_alive():
        _native.stop_records(True)
        thread.join(_FLUSH_LIMIT)


def _after_fork() -> None:
    """The child has neither the thread nor, maybe, the holder of the lock."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
