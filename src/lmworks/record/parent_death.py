"""Processes that end with the one that started them, also where it is killed with SIGKILL.

Who starts an `lmworks` process puts `until_this_process_ends()` into its environment; the process calls
`die_with_parent` first of all.
"""

from __future__ import annotations

import os
import signal
import sys

PARENT_PID_VARIABLE = "LMWORKS_STARTED_BY"  # environment variable: the process that started this one
PR_SET_PDEATHSIG = 1  # of Linux, <sys/prctl.h>


def until_this_process_ends() -> dict[str, str]:
    """Environment variables of a process to be started. The thread that starts it must live as long."""
    return {PARENT_PID_VARIABLE: str(os.getpid())}


def die_with_parent() -> None:
    """Asks the kernel for a SIGTERM when the process that started this one is gone. Linux alone has this.

    Ranks of torchrun's agent ask for it without the variable.
    """
    parent = os.environ.pop(PARENT_PID_VARIABLE, None)  # not for processes that this one starts
    if (parent is None and "TORCHELASTIC_RUN_ID" not in os.environ) or sys.platform != "linux":
        return
    signal_with_parent(signal.SIGTERM)
    if parent is not None and os.getppid() != int(parent):  # it was killed before prctl
        sys.exit(128 + signal.SIGTERM)


def kill_with_parent() -> None:
    """For a process that is not to outlive its parent even where it is stopped, and cannot see that."""
    if sys.platform == "linux":
        signal_with_parent(signal.SIGKILL)


def signal_with_parent(number: int) -> None:
    """Sent by the kernel at the end of the thread that started this process."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
