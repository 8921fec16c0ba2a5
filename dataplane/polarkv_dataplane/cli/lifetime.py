"""Processes that do not outlive the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "POLARKV_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def die_with_supervisor() -> None:
    """Ask the kernel for SIGKILL when the supervisor named in the environment ends; nothing when none is named.

    It also ends a process that is stopped. The supervisor must have started this process from its main thread, as the
    kernel watches the thread.

    Raises:
        SystemExit: the supervisor has ended already, or the kernel refuses.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # It may have ended before the request; its children then belong to another process.
    if os.getppid() != int(parent):
        raise SystemExit(f"the supervisor (process {parent}) has ended")
