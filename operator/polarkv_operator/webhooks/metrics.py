"""The webhook's counters, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polarkv_operator.webhooks.injection import Decision


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pods = Counter(
            "polarkv_webhook_pods",
            "Pods that asked for injection: injected, skipped (with the reason), or let through after an error or a "
            "time-out of the webhook's own.",
            ["outcome", "reason"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "polarkv_webhook_decision_seconds",
            "How long a decision took, reading the cluster included.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
            registry=self.registry,
        )
        self.refused = Counter(
            "polarkv_webhook_refused_requests",
            "Requests that were no AdmissionReview, too large or too slow.",
            registry=self.registry,
        )
        self.events = Counter(
            "polarkv_webhook_events", "Events about skipped pods.", ["outcome"], registry=self.registry
        )
        self.expiry = Gauge(
            "polarkv_webhook_certificate_expiry_timestamp_seconds",
            "When the certificate that is shown ends; 0: none is shown.",
            registry=self.registry,
        )
        self.failures = Gauge(
            "polarkv_webhook_certificate_check_failures",
            "Looks at the certificate that failed since the last one that did not.",
            registry=self.registry,
        )
        for outcome in ("injected", "error"):
            self.pods.labels(outcome, "")
        for outcome in ("written", "failed", "dropped"):
            self.events.labels(outcome)

    def note(self, decision: Decision) -> None:
        """Count a decision."""
        self.pods.labels("skipped" if decision.reason else "injected", decision.reason or "").inc()
