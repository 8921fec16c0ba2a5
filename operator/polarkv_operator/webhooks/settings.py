"""Settings of the webhook's server."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from polarkv_client.listening import EVERYWHERE


class WebhookSettings(BaseModel):
    """What a webhook server is told at its start. In its pod this comes from the environment, as the chart sets it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(min_length=1, description="Image of clusters that name none: the client library comes from it.")
    namespace: str = Field("polarkv-system", description="Namespace of the webhook itself and of its Secret.")
    service: str = Field("polarkv-webhook", description="The Service through which the API server calls it.")
    secret: str = Field(
        "polarkv-webhook-tls", description="Secret that the replicas keep their certificates in; made when missing."
    )
    configuration: str = Field(
        "polarkv-webhook", description="MutatingWebhookConfiguration whose caBundle is kept; empty: none."
    )
    certificate_directory: Path | None = Field(
        None, description="Folder with tls.crt and tls.key of somebody else's making, such as cert-manager's."
    )
    cluster_domain: str = Field("cluster.local", description="The Kubernetes cluster's DNS domain.")
    host: str = Field(EVERYWHERE, description="Address to listen on; :: is every one, of IPv4 too.")
    port: int = Field(9443, ge=0, le=65535, description="Port of /mutate, over TLS.")
    health_port: int = Field(8081, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics, without TLS.")
    lookup_ms: int = Field(
        1000, ge=1, le=10_000, description="How long reading a PolarKVCluster may take; after it the pod is skipped."
    )
    check_seconds: int = Field(60, ge=1, le=3600, description="How often certificates are looked at.")
    kubeconfig: Path | None = Field(None, description="Another way to the API server than the pod's own.")

    def host_names(self) -> list[str]:
        """Names by which the API server may call: the one it uses first."""
        base = f"{self.service}.{self.namespace}.svc"
        return [base, f"{base}.{self.cluster_domain}", f"{self.service}.{self.namespace}", self.service]
