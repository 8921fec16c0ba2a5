"""Whether the cache nodes are Active, asked of the manager's admin API."""

from __future__ import annotations

import http.client
import json
import urllib.parse

from polarkv_client.states import NodeState

PROBE_TIMEOUT_S = 0.5


def not_active(admin: str, admin_token: str, wanted: set[str]) -> str:
    """What is missing until every node of ``wanted`` is Active, in words; empty when nothing is.

    A Draining or Drained node counts as there: somebody wants it so. Ends within about half a second a system call.
    """
    place = urllib.parse.urlsplit(admin)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/nodes", headers={"Authorization": f"Bearer {admin_token}"})
        answer = connection.getresponse()
        body = answer.read(1 << 22)
        if answer.status != http.client.OK:
            return f"the manager answers with status {answer.status}"
        states = {str(node["name"]): str(node["state"]) for node in json.loads(body)["nodes"]}
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return f"the manager does not answer: {error}"
    finally:
        connection.close()
    there = {NodeState.ACTIVE, NodeState.DRAINING, NodeState.DRAINED}
    missing = [
        f"{name} is {states.get(name, 'not registered')}" for name in sorted(wanted) if states.get(name) not in there
    ]
    return ", ".join(missing)
