"""The supervisor's process: its order comes as one line of JSON on standard input, its answer goes to standard output.

Standard input stays open for as long as the starter lives; an attached cluster ends with it. To an attached starter go
also lines about what happens later.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.embedded.places import Held, Places
from polarkv_dataplane.embedded.reports import Reports
from polarkv_dataplane.embedded.settings import UpSettings, check_machine
from polarkv_dataplane.embedded.supervisor import Order, Supervisor
from polarkv_dataplane.runtime import log


def read_line() -> bytes:
    """Read the order without taking more from standard input than it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 1 << 20:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


def main() -> int:
    """Run a supervisor; return the exit code."""
    reports = Reports()
    try:
        raw = json.loads(read_line())
        settings = UpSettings(**raw["settings"])
        order = Order(settings, raw["attached"], Path(raw["config"]) if raw.get("config") else None, raw["log_level"])
        places = Places(settings.dir)
        places.prepare(settings.nodes)
        held = Held(places)
        check_machine(settings)
        with places.log("supervisor").open("ab", buffering=0) as log_file:
            os.dup2(log_file.fileno(), 2)
        log.set_up(order.log_level)
        supervisor = Supervisor(order, places, held, reports)
    except ConfigurationError as error:
        wrong = {"field": error.field, "value": str(error.value), "fix": error.fix}
        reports.send({"state": "failed", "error": str(error), "configuration": True, **wrong})
        return 2
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
