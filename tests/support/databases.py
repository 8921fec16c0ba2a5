"""What tests do to a private database server, whichever kind it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psutil


class DatabaseServer(NamedTuple):
    """A server that runs for one test."""

    url: str  # of an empty database on it
    name: str  # that its processes' names contain
    end_connections: Callable[[], None]

    def processes(self) -> list[psutil.Process]:
        """Return its processes, a parent before its children."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one that serves a connection ends with it
                if self.name in process.name():
                    found.append(process)
        return found
