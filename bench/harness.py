"""The interleaved run: in every round, for every chunk size, each limit and each subject once, one after the other."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.limits import Limit
from bench.limits.disk import DirectDisk
from bench.limits.memory import MemoryCopy
from bench.limits.tcp import TcpStream
from bench.provision import spec
from bench.quiet import OtherWork, wait_for_quiet
from bench.remote import RemoteSubject
from bench.results import Results, Series
from bench.subject import LOOKUP_BATCHES, SubjectError

LIMITS = "limits"
# Failing this often in one run ends a subject; a single failure is recorded and it goes on.
MAX_FAILURES = 2
# Rounds are added, while time is left, until every row has so many samples that other work did not disturb.
MINIMUM_QUIET = 5
MINIMUM_ROUNDS = 3


@dataclass(frozen=True)
class Plan:
    """What to run. `directory` is where disk limits and disk tiers live, so that both see one disk."""

    sizes_bytes: Sequence[int]
    rounds: int
    names: Sequence[str]
    total_bytes: int
    lookup_seconds: float
    patience_seconds: float
    last_round_seconds: float
    directory: Path


class Harness:
    """Runs a plan. `say` receives one line of progress at a time."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._began = time.monotonic()
        self._limits: list[Limit] = []
        self._subjects: dict[str, RemoteSubject] = {}
        self._failure_counts: dict[str, int] = {}
        self.results = Results(machine=_machine())

    def run(self) -> Results:
        logs = self._plan.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        os.environ["POLARKV_BENCH_DIRECTORY"] = str(self._plan.directory)
        try:
            self._start(logs)
            self._warm_up()
            index = 0
            while self._goes_on(index):
                for size in self._plan.sizes_bytes:
                    self._cell(index, size)
                if self._plan.lookup_seconds > 0:
                    self._lookups(index)
                index += 1
        finally:
            for subject in self._subjects.values():
                subject.close()
            for limit in self._limits:
                limit.close()
        return self.results

    def _start(self, logs: Path) -> None:
        kinds: tuple[type[MemoryCopy] | type[TcpStream] | type[DirectDisk], ...] = (MemoryCopy, TcpStream, DirectDisk)
        for kind in kinds if LIMITS in self._plan.names else ():
            limit = kind()
            self._limits.append(limit)
            self._say(f"start limit {limit.name}")
            limit.start(self._plan.total_bytes, self._plan.directory)
            self.results.about[limit.name] = limit.describe()
        names = [name for name in self._plan.names if name != LIMITS]
        for name in names:
            with self._guard(name):
                self._subjects[name] = RemoteSubject(spec(name), logs / f"{name}.log")
        # At once: most of a start is waiting for servers.
        with ThreadPoolExecutor(max(1, len(names))) as executor:
            list(executor.map(self._start_subject, list(self._subjects)))

    def _start_subject(self, name: str) -> None:
        with self._guard(name, fatal=True):
            self._subjects[name].start(self._plan.total_bytes)
            self._say(f"started {name}")

    def _warm_up(self) -> None:
        """One unrecorded pass at each size: servers touch their memory and open their connections outside of it all."""
        for size in self._plan.sizes_bytes:
            for name, subject in list(self._subjects.items()):
                with self._guard(name):
                    subject.call("round", tag="warm-up", value_bytes=size)
                    self.results.about[name] = subject.call("about")["about"]
        self._say("warmed up")

    def _cell(self, index: int, size: int) -> None:
        """One round at one size."""
        wait_for_quiet(self._plan.patience_seconds)
        began = time.monotonic()
        for limit in self._limits:
            with self._guard(limit.name):
                work = OtherWork()
                values = limit.measure(size)
                self.results.series(size, limit.name).add(values, work.share())
        for name, subject in list(self._subjects.items()):
            with self._guard(name):
                work = OtherWork()
                answer = subject.call("round", tag=f"round-{index}", value_bytes=size)
                values = {"put": answer["put_gbps"], "get": answer["get_gbps"]}
                self.results.series(size, name).add(values, work.share())
        self._say(f"round {index + 1}, {size // 1024} KiB: {time.monotonic() - began:.1f} s")

    def _lookups(self, index: int) -> None:
        wait_for_quiet(self._plan.patience_seconds)
        for name, subject in list(self._subjects.items()):
            with self._guard(name):
                work = OtherWork()
                seconds = self._plan.lookup_seconds
                answers = {keys: subject.call("lookup", batch_size=keys, seconds=seconds) for keys in LOOKUP_BATCHES}
                subject.call("lookup_end")
                values = {str(keys): answer["calls_per_second"] for keys, answer in answers.items()}
                self.results.lookups.setdefault(name, Series()).add(values, work.share())
        self._say(f"round {index + 1}, lookups")

    def _goes_on(self, index: int) -> bool:
        """Whether another round is due: to have as many as planned, or enough that nothing disturbed. No round but the
        first three begins after `last_round_seconds`."""
        if index >= MINIMUM_ROUNDS and time.monotonic() - self._began > self._plan.last_round_seconds:
            return False
        if index < self._plan.rounds:
            return True
        lacking = any(one.quiet < MINIMUM_QUIET for one in self.results.all_series())
        return index < 2 * self._plan.rounds and lacking

    @contextlib.contextmanager
    def _guard(self, name: str, *, fatal: bool = False) -> Any:
        """A failure is recorded with its reason, and never stops the others."""
        try:
            yield
        except (SubjectError, OSError) as error:
            self.results.failures[name] = " ".join(str(error).split())
            self._say(f"{name} failed: {error}")
            self._failure_counts[name] = self._failure_counts.get(name, 0) + 1
            if (fatal or self._failure_counts[name] >= MAX_FAILURES) and name in self._subjects:
                self._subjects.pop(name).close()


def _machine() -> dict[str, Any]:
    model = "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processors": f"{os.cpu_count()} × {model}",
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "default congestion control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "huge pages for shared memory": Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().strip(),
    }


def clean(directory: Path) -> None:
    """Remove a run's working directory, unless something in it is worth reading."""
    shutil.rmtree(directory, ignore_errors=True)
