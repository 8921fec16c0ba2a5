"""A real slab server in a process of its own, registered at a scripted manager, for tests of what talks to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from polarkv_client.host import host_id
from polarkv_client.protocol.messages import NodeInfo
from tests.support.fake_manager import FakeManager
from tests.support.small_manager import Node
from tests.support.waiting import wait_until

SECRET = b"a secret for tests only, not short"
PROGRAM = """
import json, sys
from polarkv_dataplane.slab.server import run_slab
from polarkv_dataplane.slab.settings import SlabSettings
node, manager, secret, memory, unix, huge, more = sys.argv[1:]
run_slab(SlabSettings(node=node, manager=manager, secret_file=secret, memory_bytes=int(memory), unix_socket=unix,
                      huge_pages=huge, **json.loads(more)))
"""


@dataclass
class SlabProcess:
    """A running slab server. ``manager`` is the scripted manager that it is registered at."""

    process: subprocess.Popen[bytes]
    manager: FakeManager

    @property
    def info(self) -> NodeInfo:
        """As clients see it now."""
        slab = [channel for channel in self.manager.channels if channel.register.role == "slab"][-1]
        register, registered = slab.register, slab.registered
        return NodeInfo(
            register.node, registered.number, registered.incarnation, "Active", register.tcp, register.shm, host_id(),
            register.rdma,
        )  # fmt: skip

    def node(self) -> Node:
        """For the small manager."""
        return Node(self.info, self.manager.secrets.grant_key, self.manager.now_ms)

    def freeze(self) -> None:
        """SIGSTOP, until every thread has stopped: the signal only begins that."""
        os.kill(self.process.pid, signal.SIGSTOP)
        wait_until(self._stopped, "all threads to stop")

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        try:
            return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
            return False

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        """Kill it and its manager."""
        self.kill()
        self.manager.close()


def start_slab(
    folder: Path, memory_bytes: int = 64 << 20, name: str = "node-0", huge: str = "off", number: int = 7,
    manager: FakeManager | None = None, begin: str = "", **settings: object,
) -> SlabProcess:  # fmt: skip
    """Start one and wait until it has registered; ``manager`` is that of its previous life, ``settings`` are
    more, ``begin`` is run first in it."""
    manager = manager or FakeManager(SECRET, timeout_ms=60_000, number=number)
    nth = len(manager.channels) + 1
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    process = subprocess.Popen(
        [
            sys.executable, "-c", f"{begin}\n{PROGRAM}", name, manager.endpoint, str(secret), str(memory_bytes),
            str(folder / f"{name}.sock"), huge,
            json.dumps(settings),
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    slab = SlabProcess(process, manager)
    try:
        channel = manager.channel("slab", nth)
        wait_until(lambda: channel.heartbeats, "it to know that it is registered")
        assert channel.open
    except BaseException:
        slab.close()
        raise
    return slab
