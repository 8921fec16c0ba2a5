"""Counters: monotonic totals and gauges by metric name, sent with heartbeats and shown to Prometheus."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from polarkv_client.listening import bind_tcp

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


def export(counters: Counters, host: str, port: int, ready: Callable[[], bool]) -> Callable[[], None]:
    """Serve the counters over HTTP for Prometheus; return what stops it.

    Beside them, for probes: ``/healthz`` answers as long as the process does, ``/readyz`` with 503 until ``ready()``.

    Raises:
        ConfigurationError: the port cannot be bound.
    """
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(counters))
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path not in ("/healthz", "/readyz"):
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        well = path == "/healthz" or ready()
        text = b"ok\n" if well else b"starting\n"
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        start_response("200 OK" if well else "503 Service Unavailable", headers)
        return [text]

    class Server(ThreadingWSGIServer):
        def server_bind(self) -> None:
            self.socket.close()
            self.socket = bind_tcp("metrics_port", host, port)
            # Not by the base class: it looks the host's name up, which may take as long as the network likes.
            self.server_name, self.server_port = host, self.socket.getsockname()[1]
            self.setup_environ()

    class Handler(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """A probe every other second is no news."""

    server = make_server(host, port, answer, Server, Handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1)

    return stop
