"""Times for tests of tokens, whichever the engine: a machine with more work than processors makes no miss of a hit.

Engines compute on all processors there are, and others wait for seconds. What is found is compared with exact numbers,
so nothing may be given up for being late. Tests of what is late say otherwise.
"""

from __future__ import annotations

# Of the manager: longer than in tests of faults, beside a patient cluster.
MANAGER = {"read_lease_ms": 10_000, "write_ticket_ms": 10_000}
# Of a connector.
CLIENT = {
    "lookup_deadline_ms": 5000, "connect_timeout_ms": 5000, "manager_timeout_ms": 5000, "load_deadline_ms": 15_000,
    "store_deadline_ms": 15_000, "patience": 0,
}  # fmt: skip
# For tests of what is late: none of these, the product's own.
DEFAULTS = dict.fromkeys(CLIENT)
