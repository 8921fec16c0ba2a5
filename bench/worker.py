"""Runs one subject in a process of its own: `python -m bench.worker SUBJECT`. Commands and answers are JSON lines."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from bench.measure import LookupBench, result_dict, run_round
from bench.subject import Subject

# Name -> module and factory. Imported late: a peer's module needs its own environment.
SUBJECTS = {
    "polarkv-shm": "bench.polarkv_subject:shm",
    "polarkv-tcp": "bench.polarkv_subject:tcp",
    "polarkv-disk": "bench.polarkv_subject:disk",
    "mooncake-tcp": "bench.peers.mooncake:tcp",
    "mooncake-shm": "bench.peers.mooncake:same_host",
    "redis-tcp": "bench.peers.redis:tcp",
    "redis-unix": "bench.peers.redis:unix",
}


def load(name: str) -> Subject:
    module_name, factory = SUBJECTS[name].split(":")
    subject = getattr(importlib.import_module(module_name), factory)()
    assert isinstance(subject, Subject)
    return subject


class Worker:
    """Answers commands until `close` or the end of the input."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._subject: Subject | None = None
        self._lookup: LookupBench | None = None
        self._total_bytes = 0

    def start(self, region_bytes: int) -> dict[str, Any]:
        self._subject = load(self._name)
        self._total_bytes = region_bytes
        self._subject.start(region_bytes)
        self._subject.source.fill_random(region_bytes)
        return {}

    def about(self) -> dict[str, Any]:
        assert self._subject is not None
        return {"about": self._subject.describe()}

    def round(self, tag: str, value_bytes: int) -> dict[str, Any]:
        assert self._subject is not None
        return result_dict(run_round(self._subject, tag, value_bytes, self._total_bytes))

    def lookup(self, batch_size: int, seconds: float) -> dict[str, Any]:
        assert self._subject is not None
        if self._lookup is None:
            self._lookup = LookupBench(self._subject)
        return {"calls_per_second": self._lookup.run(batch_size, seconds)}

    def lookup_end(self) -> dict[str, Any]:
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None
        return {}

    def close(self) -> dict[str, Any]:
        if self._subject is not None:
            self._subject.close()
            self._subject = None
        return {}


def main() -> None:
    """Serve on stdin and the original stdout; whatever a library prints goes to stderr, which is the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(sys.argv[1])
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(worker, name) for name in ("start", "about", "round", "lookup", "lookup_end", "close")
    }
    try:
        for line in sys.stdin:
            request = json.loads(line)
            command = request.pop("command")
            try:
                answer = commands[command](**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            if command == "close":
                break
    finally:
        worker.close()


if __name__ == "__main__":
    main()
