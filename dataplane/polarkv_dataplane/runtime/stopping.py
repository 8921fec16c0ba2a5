"""Clean ends: SIGTERM and SIGINT set an event, and a process that cannot end in time is ended."""

from __future__ import annotations

import os
import signal
import threading

EXIT_WITHIN_S = 1.5


class Stop:
    """An event that ends a process: set by a signal, or with the error that makes going on impossible."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Ask for the end; the first error is kept."""
        if self.error is None:
            self.error = error
        self._event.set()

    def is_set(self) -> bool:
        """Whether the end was asked for."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for it; return whether it was asked for."""
        return self._event.wait(timeout_s)

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT ask for the end. Does nothing outside the main thread, which alone gets signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.set())


def exit_in_time() -> None:
    """End the process with code 0 soon, even when a thread hangs in a system call (a disk that does not answer)."""
    timer = threading.Timer(EXIT_WITHIN_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
