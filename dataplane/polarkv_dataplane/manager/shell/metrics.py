"""Prometheus metrics, read from the manager when they are asked for: the hot path counts nothing twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from polarkv_client.protocol.messages import OperationResult
from polarkv_client.states import NodeState, StoreOutcome

if TYPE_CHECKING:
    from polarkv_dataplane.manager.shell.manager import Manager

_RELAYED = re.compile(r'^([a-zA-Z_][a-zA-Z0-9_]*)(?:\{([a-z_]+)="([^"\\\n]*)"\})?$')
# name, help, {label value: name of the count}; without labels the only value is ''.
_COUNTERS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("polarkv_hits", "Keys granted to readers, by the tier they were found in", "tier",
     {"memory": "hits_memory", "disk": "hits_disk"}),
    ("polarkv_misses", "Keys that readers asked for and that were not there", "", {"": "misses"}),
    ("polarkv_lookups", "Calls of exists and match_prefix", "", {"": "lookups"}),
    ("polarkv_lookup_hits", "Keys found by exists and match_prefix, by tier", "tier",
     {"memory": "lookups_memory", "disk": "lookups_disk"}),
    ("polarkv_stores", "Keys that writers asked to store, by outcome", "outcome",
     {outcome.name.lower(): f"store_{outcome.name.lower()}" for outcome in StoreOutcome}),
    ("polarkv_commits", "Entries that became visible", "", {"": "stored"}),
    ("polarkv_commits_expired", "Commits that came after their ticket", "", {"": "commits_expired"}),
    ("polarkv_stored_bytes", "Payload bytes committed", "", {"": "stored_bytes"}),
    ("polarkv_read_bytes", "Payload bytes granted to readers", "", {"": "read_bytes"}),
    ("polarkv_evictions", "Copies dropped: from memory with one on disk, from memory for good, from disk", "kind",
     {"demoted": "demoted", "memory": "evicted_memory", "disk": "purged"}),
    ("polarkv_tickets_expired", "Tickets that ended by time", "", {"": "tickets_expired"}),
    ("polarkv_leases_expired", "Leases that ended by time", "", {"": "leases_expired"}),
    ("polarkv_damaged", "Entries dropped because a reader found other bytes", "", {"": "damaged"}),
    ("polarkv_load_failures", "Loads that failed", "", {"": "load_failed"}),
    ("polarkv_offload_failures", "Offloads that failed", "", {"": "offload_failed"}),
    ("polarkv_operations", "Answers of disk servers, by result; stale ones changed nothing", "result",
     {name: f"operations_{name}" for name in [*(result.name.lower() for result in OperationResult), "stale"]}),
    ("polarkv_tiering_local_bytes", "Bytes moved between memory and disk of one cache node", "", {"": "local_bytes"}),
    ("polarkv_tiering_cross_node_bytes", "Bytes moved between memory and disk of different cache nodes", "",
     {"": "cross_node_bytes"}),
    ("polarkv_nodes_lost", "Lives of cache nodes that ended", "", {"": "nodes_lost"}),
    ("polarkv_node_recoveries", "Cache nodes that proved all that they hold", "", {"": "recoveries"}),
    ("polarkv_refused_connections", "Connections closed for what they sent", "", {"": "refused_connections"}),
    ("polarkv_refused_requests", "Requests refused", "", {"": "refused_requests"}),
    ("polarkv_internal_errors", "Requests that failed by a fault of the manager", "", {"": "internal_errors"}),
    ("polarkv_metadata_rows", "Rows written to the metadata store", "", {"": "metadata_rows"}),
    ("polarkv_metadata_failures", "Failed exchanges with the metadata store", "", {"": "metadata_failures"}),
    ("polarkv_metadata_dropped", "Keys not written to the metadata store because too many waited", "",
     {"": "metadata_dropped"}),
)  # fmt: skip
_NODE_GAUGES = (
    ("polarkv_memory_bytes", "Memory served", lambda node: node.pool.memory_bytes),
    ("polarkv_memory_used_bytes", "Memory in slots that hold an entry", lambda node: node.pool.used_bytes),
    ("polarkv_disk_bytes", "Disk capacity", lambda node: node.disk_bytes),
    ("polarkv_disk_used_bytes", "Disk used, as allocated", lambda node: node.disk_used_bytes),
    ("polarkv_quarantined_slots", "Slots at rest after a grant that did not end cleanly",
     lambda node: len(node.pool.quarantined)),
    ("polarkv_operations_open", "Commands that the disk server has not answered", lambda node: len(node.operations)),
    ("polarkv_dirty_bytes", "Bytes of entries that only memory has", lambda node: node.dirty_bytes),
)  # fmt: skip


class ManagerCollector:
    """All families of one manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        names: set[str] = set()
        for family in (*self._counters(), *self._gauges(), *self._nodes()):
            names.add(family.name)
            yield family
        yield from self._relayed(names)

    def _counters(self) -> Iterator[Metric]:
        counts = self._manager.all_counts()
        for name, text, label, values in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=[label] if label else [])
            for value, count in values.items():
                family.add_metric([value] if label else [], counts.get(count, 0))
            yield family

    def _gauges(self) -> Iterator[Metric]:
        manager, ledger = self._manager, self._manager.ledger
        states = GaugeMetricFamily("polarkv_entries", "Entries by state", labels=["state"])
        for state, count in ledger.counts.items():
            if state is not None:
                states.add_metric([state.word], count)
        yield states
        for name, text, value in (
            ("polarkv_leases", "Live leases", len(manager.directory.leases)),
            ("polarkv_tickets", "Live tickets", len(manager.directory.tickets)),
            ("polarkv_pinned_bytes", "Bytes of pinned entries", ledger.pins.bytes),
            ("polarkv_waiting_calls", "Calls that wait for space or a load", len(manager.waiting)),
            ("polarkv_connections", "Connections of clients and cache nodes", len(manager.peers)),
            ("polarkv_epoch", "This life of the manager", manager.epoch),
            ("polarkv_metadata_connected", "Whether the metadata store answers", manager.recorder.connected),
            ("polarkv_metadata_waiting", "Keys that wait to be written", manager.recorder.waiting),
        ):
            yield GaugeMetricFamily(name, text, value)
        used = GaugeMetricFamily("polarkv_tenant_used_bytes", "Bytes stored by a tenant", labels=["tenant"])
        quota = GaugeMetricFamily("polarkv_tenant_quota_bytes", "A tenant's quota; 0: no limit", labels=["tenant"])
        for tenant in ledger.tenants.values():
            used.add_metric([tenant.name], tenant.used_bytes)
            quota.add_metric([tenant.name], tenant.quota_bytes)
        yield used
        yield quota

    def _nodes(self) -> Iterator[Metric]:
        records = list(self._manager.nodes.records.values())
        states = GaugeMetricFamily("polarkv_node_state", "1 for the state a cache node is in", labels=["node", "state"])
        for record in records:
            info = self._manager.nodes.info(record)
            for state in NodeState:
                states.add_metric([record.name, state], float(info.state == state))
        yield states
        present = [node for record in records if (node := self._manager.nodes.core(record)) is not None]
        for name, text, read in _NODE_GAUGES:
            family = GaugeMetricFamily(name, text, labels=["node"])
            for node in present:
                family.add_metric([node.name], read(node))
            yield family
        complete = GaugeMetricFamily(
            "polarkv_node_inventory_complete", "1 when a cache node has reported all that it holds", labels=["node"]
        )
        loaded = CounterMetricFamily("polarkv_node_read_bytes", "Payload bytes granted to readers", labels=["node"])
        stored = CounterMetricFamily("polarkv_node_stored_bytes", "Payload bytes committed", labels=["node"])
        for record in records:
            complete.add_metric([record.name], float(record.inventory_complete))
            loaded.add_metric([record.name], record.read_bytes)
            stored.add_metric([record.name], record.stored_bytes)
        yield from (complete, loaded, stored)

    def _relayed(self, taken: set[str]) -> Iterator[Metric]:
        """What cache nodes counted, with node and role as labels, and the label of their own if they have one."""
        families: dict[tuple[str, str], CounterMetricFamily | GaugeMetricFamily] = {}
        kinds: dict[str, str] = {}
        for record in self._manager.nodes.records.values():
            for role, counters in record.counters.items():
                for name, label, value, number in _parsed(counters):
                    if kinds.setdefault(name, label) != label or name.removesuffix("_total") in taken:
                        continue  # one name, one set of labels
                    family = families.get((name, label))
                    if family is None:
                        make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                        labels = ["node", "role", label] if label else ["node", "role"]
                        family = families[name, label] = make(name, "Reported by cache nodes", labels=labels)
                    family.add_metric([record.name, role, value] if label else [record.name, role], number)
        yield from families.values()


def _parsed(counters: Mapping[str, float]) -> Iterator[tuple[str, str, str, float]]:
    for full_name, number in counters.items():
        match = _RELAYED.match(full_name)
        if match is not None and match[2] not in ("node", "role"):
            name = match[1] if match[1].startswith("polarkv_") else f"polarkv_node_{match[1]}"
            yield name, match[2] or "", match[3] or "", number
