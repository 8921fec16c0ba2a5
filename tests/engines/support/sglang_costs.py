"""The connector for SGLang, and what it has cost so far, for tests to read. Runs in the engine's environment.

A storage backend lives in the engine's scheduler, a process of its own: what it knows comes out by a file.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from polarkv_client.connectors.sglang import PolarKVStorage
from tests.engines.support.costs import FILE, own_threads, timed


class Costed(PolarKVStorage):
    """The same. After each call the file holds the seconds of all: in calls, on own threads, of the whole process."""

    def __init__(self, storage_config: Any, *more: Any) -> None:
        self._file = Path(storage_config.extra_config["connection"]).with_name(FILE)
        self._spent = {"calls": 0.0, "made": 0}
        for name in ("batch_exists", "batch_get_v1", "batch_set_v1"):
            setattr(self, name, self._noted(timed(getattr(self, name), self._spent)))
        super().__init__(storage_config, *more)

    def _noted(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            found = {**self._spent, "threads": sum(own_threads().values()), "engine": time.process_time()}
            fresh = self._file.with_suffix(".new")
            fresh.write_text(json.dumps(found))
            os.replace(fresh, self._file)
            return answer

        return call
