"""Render the Grafana dashboard that the chart ships: for each metric somebody could act on, a panel that says how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OUTPUT = "charts/polarkv/dashboards/polarkv.json"
_SCOPE = 'namespace="$namespace",polarkv_io_cluster=~"$cluster"'
_NAMESPACE = '{namespace="$namespace"}'
_WIDTH, _HEIGHT = 8, 7


@dataclass(frozen=True)
class Panel:
    """One panel: its title, what to make of it, a unit of Grafana's, and (expression, legend) pairs."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: str, by: str = "") -> str:
    """Per second, summed over what is left."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{_SCOPE}}}[$__rate_interval]))"


def total(metric: str, by: str = "", scope: str = _SCOPE) -> str:
    """Summed now."""
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{scope}}})"


_HITS, _MISSES = rate("polarkv_hits_total"), rate("polarkv_misses_total")
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("What readers get", (
        Panel("Hit rate", "Share of keys that readers asked for and got, by tier.", "percentunit", (
            (f"{rate('polarkv_hits_total', 'tier')} / on() group_left() ({_HITS} + {_MISSES})", "{{tier}}"),
        )),
        Panel("Bytes served", "Payload granted to readers. Near the nodes' baseline network: add cache nodes.", "Bps", (
            (rate("polarkv_read_bytes_total"), "read"), (rate("polarkv_stored_bytes_total"), "stored"),
        )),
        Panel("Stores by outcome", "NoSpace that lasts: memory is too small or offloads are too slow.", "ops", (
            (rate("polarkv_stores_total", "outcome"), "{{outcome}}"),
        )),
    )),
    ("Tiers", (
        Panel("Memory used", "Of what each cache node serves.", "percentunit", (
            (f"{total('polarkv_memory_used_bytes', 'node')} / {total('polarkv_memory_bytes', 'node')}", "{{node}}"),
        )),
        Panel("Disk used", "Of each cache node's capacity. Full is normal: the oldest files go.", "percentunit", (
            (f"{total('polarkv_disk_used_bytes', 'node')} / {total('polarkv_disk_bytes', 'node')}", "{{node}}"),
        )),
        Panel("Evictions", "demoted: still on disk. memory: gone, as offloads did not keep up.", "ops", (
            (rate("polarkv_evictions_total", "kind"), "{{kind}}"),
        )),
        Panel("Bytes only in memory", "What a cache node takes with it when it dies.", "bytes", (
            (total("polarkv_dirty_bytes", "node"), "{{node}}"),
        )),
        Panel("Bytes between tiers", "Between memory and disk of one cache node; across nodes must stay 0.", "Bps", (
            (rate("polarkv_tiering_local_bytes_total"), "local"),
            (rate("polarkv_tiering_cross_node_bytes_total"), "across nodes"),
        )),
        Panel("Disk operations open", "Commands without an answer yet. Rising: slow disks.", "short", (
            (total("polarkv_operations_open", "node"), "{{node}}"),
        )),
    )),
    ("Health", (
        Panel("Cache nodes by state", "All Active but for upgrades and scaling.", "short", (
            (total("polarkv_node_state", "state"), "{{state}}"),
        )),
        Panel("Failures", "Damaged: other bytes than were stored, caught by a reader.", "ops", (
            (rate("polarkv_damaged_total"), "damaged"), (rate("polarkv_load_failures_total"), "loads"),
            (rate("polarkv_offload_failures_total"), "offloads"), (rate("polarkv_internal_errors_total"), "manager"),
            (rate("polarkv_nodes_lost_total"), "nodes lost"),
        )),
        Panel("Grants that ran out", "Clients that died or were too slow for their lease or ticket.", "ops", (
            (rate("polarkv_leases_expired_total"), "leases"), (rate("polarkv_tickets_expired_total"), "tickets"),
            (rate("polarkv_commits_expired_total"), "late commits"),
        )),
        Panel("Entries", "By state. Near cache.maxKeys: raise it, or use larger chunks.", "short", (
            (total("polarkv_entries", "state"), "{{state}}"),
        )),
        Panel("Tenants", "Bytes stored by each.", "bytes", (
            (total("polarkv_tenant_used_bytes", "tenant"), "{{tenant}}"),
        )),
        Panel("Metadata waiting", "Keys not yet in the database. Rising: it is slow or away.", "short", (
            (total("polarkv_metadata_waiting"), "keys"), (total("polarkv_metadata_connected"), "connected"),
        )),
    )),
)  # fmt: skip


def render() -> str:
    """The whole text."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(_at({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, 24, 1))
        y += 1
        for index, panel in enumerate(row):
            panels.append(_at(_panel(panel), index % 3 * _WIDTH, y + index // 3 * _HEIGHT, _WIDTH, _HEIGHT))
        y += -(-len(row) // 3) * _HEIGHT
    for number, panel_json in enumerate(panels, 1):
        panel_json["id"] = number
    dashboard = {
        "uid": "polarkv", "title": "PolarKV", "tags": ["polarkv"], "schemaVersion": 39, "version": 1, "editable": True,
        "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "timezone": "browser", "graphTooltip": 1,
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
            _variable("namespace", "label_values(polarkv_epoch, namespace)", several=False),
            _variable("cluster", f"label_values(polarkv_epoch{_NAMESPACE}, polarkv_io_cluster)", several=True),
        ]},
        "panels": panels,
    }  # fmt: skip
    return json.dumps(dashboard, indent=1) + "\n"


def _at(panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return panel | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries", "title": panel.title, "description": panel.text, "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _variable(name: str, query: str, several: bool) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "label": name.capitalize(), "refresh": 2, "sort": 1, "query": query,
        "datasource": {"type": "prometheus", "uid": "${datasource}"}, "multi": several, "includeAll": several,
    }  # fmt: skip
