"""A whole cluster on this machine as a Python object, for tests and benchmarks: the same processes as `polarkv up`.

    with Cluster(nodes=2, memory="256MiB", disk="1GiB") as cluster:
        client = SyncClient.connect(cluster.connection)
        cluster.signal("slab-0", signal.SIGKILL)   # the supervisor starts it again
        cluster.wait_ready()

It ends with the block, with :meth:`Cluster.stop`, or with the process that made it, however that one ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from polarkv_client.errors import PolarKVError
from polarkv_client.settings_cli import parse_size
from polarkv_dataplane.embedded.places import Places, read_json
from polarkv_dataplane.embedded.readiness import not_active
from polarkv_dataplane.embedded.settings import UpSettings
from polarkv_dataplane.embedded.starter import end_supervisor, start_supervisor


class Cluster:
    """An embedded cluster. Sizes are of each cache node: bytes, or text such as ``512MiB``."""

    def __init__(
        self,
        nodes: int = 1,
        memory: int | str = "128MiB",
        disk: int | str = "1GiB",
        directory: str | os.PathLike[str] | None = None,
        *,
        config: Path | None = None,
        log_level: str = "INFO",
        **settings: Any,
    ) -> None:
        """Nothing is started yet.

        Args:
            directory: kept after the end, for a second start on it; without one, a temporary directory that is not.
            config: a configuration file for the servers ([manager], [slab], [disk]); the environment reaches them too.
            settings: further fields of :class:`UpSettings`.
        """
        self._temporary = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="polarkv-")).absolute()
        self.settings = UpSettings(
            nodes=nodes, memory_bytes=parse_size(memory), disk_bytes=parse_size(disk), dir=self.directory, **settings
        )
        self._config, self._log_level = config, log_level
        self._places = Places(self.directory)
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def connection(self) -> Path:
        """The connection file, for clients."""
        return self._places.connection

    @property
    def logs(self) -> Path:
        """The folder of logs."""
        return self._places.log("x").parent

    def start(self) -> Path:
        """Start it, wait until every cache node is Active; return the connection file.

        Raises:
            ConfigurationError, StartFailed: as ``start_supervisor``.
        """
        if self._supervisor is None:
            self._supervisor = start_supervisor(
                self.settings, attached=True, config=self._config, log_level=self._log_level
            )
        return self.connection

    def stop(self) -> None:
        """Stop it (within about five seconds); remove a temporary directory. A second call does nothing."""
        if self._supervisor is not None:
            end_supervisor(self._supervisor)
            self._supervisor = None
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """What the supervisor says of itself: pid, state, error, and for each child pid, starts, last_end, log."""
        return read_json(self._places.state)

    def pids(self) -> dict[str, int]:
        """Process ids by name (supervisor, manager, slab-0, disk-0, …) of those that live."""
        state = self.state()
        found = {name: child["pid"] for name, child in state.get("children", {}).items() if child["pid"]}
        return {"supervisor": state["pid"], **found} if state else found

    def pid(self, name: str) -> int:
        """The process id of ``manager``, ``slab-N``, ``disk-N`` or ``supervisor``.

        Raises:
            PolarKVError: it does not live at the moment.
        """
        pids = self.pids()
        if name not in pids:
            raise PolarKVError(f"{name} does not run; there are {', '.join(pids) or 'no processes'}")
        return pids[name]

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process; return its id. After SIGKILL the supervisor starts it again."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def restart(self, name: str, timeout_s: float = 15.0) -> None:
        """Kill -9 one server and wait until it has been started again and all cache nodes are Active.

        Raises:
            PolarKVError: not in time.
        """
        earlier = self.signal(name, signal.SIGKILL)
        deadline = time.monotonic() + timeout_s
        while self.pids().get(name, earlier) == earlier:
            if time.monotonic() >= deadline:
                raise PolarKVError(f"{name} was not started again within {timeout_s:g} s: {self.state()}")
            time.sleep(0.01)
        self.wait_ready(max(0.1, deadline - time.monotonic()))

    def wait_ready(self, timeout_s: float = 15.0) -> None:
        """Wait until the manager says that every cache node is Active.

        A node whose server has just been killed is Active until the manager notices; :meth:`restart` waits for that.

        Raises:
            PolarKVError: not in time; the text says which is not.
        """
        connection = read_json(self.connection)
        wanted = {f"node-{node}" for node in range(self.settings.nodes)}
        deadline = time.monotonic() + timeout_s
        while missing := not_active(connection["admin"], connection["admin_token"], wanted):
            if time.monotonic() >= deadline:
                raise PolarKVError(f"not ready within {timeout_s:g} s: {missing}")
            time.sleep(0.02)

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
