"""Counters: monotonic totals and gauges by metric name, sent with heartbeats and shown to Prometheus."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from polarkv_client.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_NAME = re.compile(r'^([a-z_0-9]+)(?:\{([a-z_]+)="([^"]*)"\})?$')


def labelled(name: str, label: str, value: str) -> str:
    """Return the name of the counter of ``name`` whose ``label`` is ``value``, in Prometheus's own notation."""
    return f'{name}{{{label}="{value}"}}'


class Counters:
    """Values by name. Names that end in ``_total`` (before a label) only grow; the others are gauges."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name] = value

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Show a value that is read when it is asked for."""
        with self._lock:
            self._gauges[name] = read

    def snapshot(self) -> dict[str, float]:
        """All values now."""
        with self._lock:
            values, gauges = dict(self._values), dict(self._gauges)
        values.update((name, float(read())) for name, read in gauges.items())
        return values


class _Collector:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each name, whatever its labels."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for full_name, value in sorted(self._counters.snapshot().items()):
            match = _NAME.match(full_name)
            if match is None:
                continue
            name, label, label_value = match.groups()
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name, name.replace("_", " "), labels=[label] if label else [])
            families[name].add_metric([label_value] if label else [], value)
        yield from families.values()


def export(counters: Counters, host: str, port: int) -> Callable[[], None]:
    """Serve the counters over HTTP for Prometheus; return what stops it.

    Raises:
        ConfigurationError: the port cannot be bound.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(counters))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError("metrics_port", port, f"{error.strerror}: choose a free port") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1)

    return stop
