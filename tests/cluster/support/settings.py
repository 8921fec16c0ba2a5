"""Command lines and configuration files of the programs of a node."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.support.layout import DOMAIN, Layout
from tests.cluster.support.pki import Pki

CONTAINERD = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"
# A node that stops answering is given up after this: Kubernetes' own 50 s would be most of a test's time.
NODE_GRACE_S = 15


def controller_manager(cluster: Layout) -> list[str]:
    pki = Pki(cluster.pki)
    config = pki.path("controller-manager.kubeconfig")
    options = {
        "kubeconfig": config,
        "authentication-kubeconfig": config,
        "authorization-kubeconfig": config,
        "bind-address": "127.0.0.1",
        "root-ca-file": pki.path("ca.crt"),
        "service-account-private-key-file": pki.path("sa.key"),
        "use-service-account-credentials": "true",
        "cluster-signing-cert-file": pki.path("ca.crt"),
        "cluster-signing-key-file": pki.path("ca.key"),
        "cluster-cidr": cluster.pods,
        "allocate-node-cidrs": "false",
        "leader-elect": "false",
        "node-monitor-grace-period": f"{NODE_GRACE_S}s",
        "node-monitor-period": "2s",
    }
    return ["kube-controller-manager", *(f"--{name}={value}" for name, value in options.items())]


def scheduler(cluster: Layout) -> list[str]:
    config = Pki(cluster.pki).path("scheduler.kubeconfig")
    names = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [
        "kube-scheduler",
        *(f"--{name}={config}" for name in names),
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ]


def write_containerd(cluster: Layout, folder: Path, node: int) -> Path:
    """Write containerd's configuration and the pods' network; return the former's path."""
    network = folder / "cni"
    network.mkdir(exist_ok=True)
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": cluster.node_pods(node)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    listed = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}
    (network / "10-pods.conflist").write_text(json.dumps(listed), encoding="utf-8")
    # restrict_oom_score_adj: root of a machine that is itself a container may not lower it.
    text = f"""
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cluster.containers}/usr/lib/cni"
    conf_dir = "{network}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{cluster.containers}/usr/sbin/runc"
      SystemdCgroup = false
"""
    path = folder / "containerd.toml"
    path.write_text(text, encoding="utf-8")
    return path


def kubelet(cluster: Layout, folder: Path, name: str, address: str) -> list[str]:
    """Write kubelet's configuration; return its command line."""
    pki = Pki(cluster.pki)
    resolver = folder / "resolv.conf"
    resolver.write_text(f"nameserver {cluster.node_address(0)}\n", encoding="ascii")
    full = {"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%"}
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": pki.path("ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": pki.path(f"{name}.crt"),
        "tlsPrivateKeyFile": pki.path(f"{name}.key"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "clusterDNS": [cluster.dns_service],
        "clusterDomain": DOMAIN,
        "resolvConf": str(resolver),
        "failSwapOn": False,
        # The disk is the machine's: how full it is says nothing about the cluster, and images come from no registry.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi", **full},
        "syncFrequency": "2s",
        "nodeStatusUpdateFrequency": "4s",
        "volumePluginDir": str(folder / "volume-plugins"),
    }
    path = folder / "kubelet.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return [
        "kubelet", f"--config={path}", f"--kubeconfig={pki.path(f'{name}.kubeconfig')}",
        f"--hostname-override={name}", f"--node-ip={address}", "--root-dir=/var/lib/kubelet",
    ]  # fmt: skip


def kube_proxy(cluster: Layout, folder: Path, name: str) -> list[str]:
    """Write kube-proxy's configuration; return its command line."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": Pki(cluster.pki).path("kube-proxy.kubeconfig")},
        "mode": "nftables",
        "clusterCIDR": cluster.pods,
        "hostnameOverride": name,
        "bindAddress": "0.0.0.0",
        # The table of connections is the machine's, not the node's to size.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    path = folder / "kube-proxy.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return ["kube-proxy", f"--config={path}"]


def dns_objects(cluster: Layout) -> str:
    """The Service of the cluster's DNS, with node 0 behind it."""
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    port = {"name": "dns", "port": 53, "protocol": "UDP"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"clusterIP": cluster.dns_service, "ports": [{**port, "targetPort": 53}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [cluster.node_address(0)]}],
        "ports": [port],
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, endpoints]})
