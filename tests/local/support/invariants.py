"""What must hold of the manager's books, read from its admin API."""

from __future__ import annotations

from collections import Counter
from typing import Any

from polarkv_client.states import HAS_DISK, HAS_MEMORY, EntryState, NodeState
from tests.local.support.world import World
from tests.support.waiting import wait_until

STATES = {state.word: state for state in EntryState}
PASSING = ("Writing", "Offloading", "Loading", "Purging")


def settled(world: World, within_s: float = 45.0) -> dict[str, Any]:
    """Wait until no grant, quarantine or operation is left and the books add up; return the statistics."""
    last: dict[str, Any] = {}

    def nothing_open() -> dict[str, Any] | None:
        stats = everything(world)
        last.clear()
        last.update(open_things(stats) or wrong_books(world, stats))
        return None if last else stats

    try:
        stats = wait_until(nothing_open, "all grants, quarantines and operations to end", within_s, 0.1)
    except TimeoutError as error:
        raise AssertionError(f"{error}; still open or wrong: {last}") from error
    assert stats is not None
    assert stats["cross_node_bytes"] == 0
    assert not stats["counts"].get("internal_errors", 0), stats["counts"]
    return stats


def everything(world: World) -> dict[str, Any]:
    """The statistics, with the cache nodes; the manager may be away for a moment."""
    try:
        return {**world.stats(), "nodes": world.nodes()}
    except OSError as error:
        return {"leases": str(error), "tickets": 0, "waiting_calls": 0, "entries_by_state": {}, "nodes": []}


def open_things(stats: dict[str, Any]) -> dict[str, Any]:
    """Whatever is under way: grants, waiting calls, states that an answer must end, quarantine, operations, holds."""
    found = {name: stats[name] for name in ("leases", "tickets", "waiting_calls")}
    found |= {state: stats["entries_by_state"].get(state, 0) for state in PASSING}
    for node in stats["nodes"]:
        found |= {f"{node['name']} {name}": node[name] for name in ("quarantined_slots", "operations", "holds")}
        if node["state"] != NodeState.ACTIVE:
            found[f"{node['name']} is {node['state']}"] = True
    return {name: value for name, value in found.items() if value}


def wrong_books(world: World, stats: dict[str, Any]) -> dict[str, Any]:
    """Entries, slots and disk space as three accounts of one truth (invariants 1, 3 and 12): where they differ.

    Work may begin between two questions; who asks does so again.
    """
    memory: Counter[str] = Counter()
    disk: Counter[str] = Counter()
    states: Counter[str] = Counter()
    found: dict[str, Any] = {}
    for entry in world.entries():
        state = STATES[entry["state"]]
        states[state.word] += 1
        memory[entry["node"]] += entry["stride_bytes"] if state in HAS_MEMORY else 0
        disk[entry["node"]] += entry["stride_bytes"] if state in HAS_DISK else 0
        if entry["leases"]:
            found[entry["key"]] = entry
    counted = {name: count for name, count in stats["entries_by_state"].items() if count}
    if counted != states:
        found["states"] = (counted, dict(states))
    for node in stats["nodes"]:
        for tier, listed in (("memory", memory[node["name"]]), ("disk", disk[node["name"]])):
            if not listed == node[f"{tier}_used_bytes"] <= node[f"{tier}_bytes"]:
                found[f"{node['name']} {tier}"] = (listed, node)
        slots = node["memory_used_bytes"] + node["memory_free_bytes"] + node["memory_quarantined_bytes"]
        if slots != node["memory_usable_bytes"]:
            found[f"{node['name']} slots"] = (slots, node)
    return found
