"""A process of the lab ends with its starter: one that is stopped would not see its pipe close."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def end_with_starter() -> None:
    """From now on, the kernel kills this process when the thread that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
