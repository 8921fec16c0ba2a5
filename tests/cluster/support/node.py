"""The first process of a node: prepares the node's namespaces, starts its programs, and keeps them running.

``python -m tests.cluster.support.node LAYOUT NUMBER``, in new mount, network, process, host name and cgroup namespaces.
Node 0 also runs the control plane. A program that ends is started again, as a service manager would, unless a file of
its name lies in the node's folder ``held``. When this process ends, everything in its namespaces ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bench.installing import library_path
from tests.cluster.support import api_server, cgroups, dns, layout, programs, provisioner, settings
from tests.cluster.support.daemons import Daemon
from tests.cluster.support.pki import Pki
from tests.support.waiting import wait_until

READY_TIMEOUT_S = 120.0
TICK_S = 0.2
UPLINK = "uplink"
# kubelet wants these and would set them for the whole machine; it finds them as it wants them.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000,
}  # fmt: skip


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


class Node:
    """One node's namespaces and programs, seen from inside."""

    def __init__(self, cluster: layout.Layout, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = layout.node_name(number)
        self.folder = cluster.node(number)
        self.address = cluster.node_address(number)
        roots = [cluster.etcd, cluster.containers]
        self.environment = programs.environment(roots, cluster.kubernetes)
        self.environment["XTABLES_LIBDIR"] = f"{library_path(cluster.containers).split(':')[0]}/xtables"
        self.environment["PYTHONPATH"] = os.getcwd()
        self.daemons: list[Daemon] = []
        for name in ("log", "held", "kubelet", "containerd", "kernel", "varlib", "varlib-work"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: list[str], ready: Callable[[], bool]) -> None:
        """Start a program and wait until it is ready. DaemonError with its log when it ends, or is not in time."""
        daemon = Daemon(name, command, self.folder / "log" / name, self.environment)
        daemon.start()
        self.daemons.append(daemon)

        def probe() -> bool:
            daemon.check()
            return ready()

        try:
            wait_until(probe, "it to be ready", READY_TIMEOUT_S, 0.05)
        except TimeoutError as error:
            raise daemon.error(str(error)) from error

    def succeeds(self, *command: str) -> bool:
        """Whether a command ends well, with the node's programs on its path."""
        done = subprocess.run(command, env=self.environment, capture_output=True, timeout=30, check=False)
        return done.returncode == 0

    def kubectl(self, *arguments: str) -> bool:
        return self.succeeds("kubectl", f"--kubeconfig={self.cluster.kubeconfig}", *arguments)

    def mount(self) -> None:
        """Make what the machine has of its own, and what Kubernetes must not change on it, the node's."""
        run("mount", "--make-rshared", "/")
        run("mount", "-t", "proc", "proc", "/proc")
        run("hostname", self.name)
        self._mount_cgroups()
        for name, value in KERNEL_SETTINGS.items():
            shown = self.folder / "kernel" / name.replace("/", "_")
            shown.write_text(f"{value}\n", encoding="ascii")
            run("mount", "--bind", str(shown), f"/proc/sys/{name}")
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/var/log")
        # Device plugins know kubelet by this folder alone. A layer over /var/lib gives it a place to be mounted without
        # a new folder on the machine.
        upper, work = self.folder / "varlib", self.folder / "varlib-work"
        run("mount", "-t", "overlay", "-o", f"lowerdir=/var/lib,upperdir={upper},workdir={work}", "overlay", "/var/lib")
        Path("/var/lib/kubelet").mkdir(exist_ok=True)
        run("mount", "--bind", str(self.folder / "kubelet"), "/var/lib/kubelet")
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n", encoding="ascii")
        run("mount", "--bind", str(hosts), "/etc/hosts")
        run("mount", "--make-rshared", "/")

    def _mount_cgroups(self) -> None:
        if cgroups.is_v2():
            run("mount", "-t", "cgroup2", "cgroup2", str(cgroups.MOUNT))
            cgroups.hand_down()
            return
        known = cgroups.hierarchies()
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(cgroups.MOUNT))
        for name in known:
            (cgroups.MOUNT / name).mkdir()
            options = "none,name=systemd" if name == "systemd" else name
            run("mount", "-t", "cgroup", "-o", options, "cgroup", str(cgroups.MOUNT / name))

    def connect(self) -> None:
        """Bring the network up: node 0 is a bridge, to which this machine and the other nodes are linked."""
        device = "nodes" if self.number == 0 else UPLINK
        wait_until(lambda: Path(f"/proc/sys/net/ipv4/conf/{UPLINK}").exists(), "the link of the node", 30)
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "set", UPLINK, "up")
        if self.number == 0:
            run("ip", "link", "add", device, "type", "bridge")
            run("ip", "link", "set", UPLINK, "master", device)
        run("ip", "address", "add", f"{self.address}/24", "dev", device)
        run("ip", "link", "set", device, "up")
        # Programs look for a default route to learn their address. The machine forwards nothing, so nothing gets out.
        run("ip", "route", "add", "default", "via", self.cluster.gateway)
        for other in range(layout.NODES):
            if other != self.number:
                run("ip", "route", "add", self.cluster.node_pods(other), "via", self.cluster.node_address(other))
        for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
            with suppress(FileNotFoundError):
                Path(f"/proc/sys/{name}").write_text("1", encoding="ascii")

    def run_control_plane(self) -> None:
        """Start etcd, the API server, the controllers and the scheduler."""
        cluster = self.cluster
        pki = Pki(cluster.pki)
        self.start("etcd", api_server.etcd_command(cluster.folder / "etcd", 2379, 2380), lambda: True)
        command = api_server.api_command(
            cluster.folder, pki, 2379, 6443,
            f"--advertise-address={self.address}", f"--service-cluster-ip-range={cluster.services}",
            "--enable-admission-plugins=NodeRestriction", "--kubelet-preferred-address-types=InternalIP,Hostname",
            f"--kubelet-client-certificate={pki.path('kubelet-client.crt')}",
            f"--kubelet-client-key={pki.path('kubelet-client.key')}",
        )  # fmt: skip
        self.start("kube-apiserver", command, lambda: api_server.is_ready(cluster.url, pki))
        self.start("kube-controller-manager", settings.controller_manager(cluster), lambda: True)
        self.start("kube-scheduler", settings.scheduler(cluster), lambda: True)
        wait_until(lambda: self.kubectl("get", "serviceaccount", "default"), "the default service account", 60, 0.1)

    def run_node(self) -> None:
        """Start containerd, kubelet and kube-proxy, and import the images that the cluster was given."""
        runtime = ("ctr", f"--address={settings.CONTAINERD}", "--namespace=k8s.io")
        config = settings.write_containerd(self.cluster, self.folder, self.number)
        self.start("containerd", ["containerd", f"--config={config}"], lambda: self.succeeds(*runtime, "version"))
        for archive in sorted(self.cluster.images.glob("*.tar")):
            subprocess.run([*runtime, "images", "import", str(archive)], env=self.environment, check=True, timeout=120)
        command = settings.kubelet(self.cluster, self.folder, self.name, self.address)
        self.start("kubelet", command, lambda: self.kubectl("get", "node", self.name))
        self.start("kube-proxy", settings.kube_proxy(self.cluster, self.folder, self.name), lambda: True)
        ready = ("wait", "--for=condition=Ready", f"node/{self.name}", "--timeout=5s")
        wait_until(lambda: self.kubectl(*ready), "the node to be Ready", READY_TIMEOUT_S)

    def run_addons(self) -> None:
        """Start DNS and the provisioner of volumes."""
        cluster = self.cluster
        subprocess.run(
            ["kubectl", f"--kubeconfig={cluster.kubeconfig}", "apply", "-f", "-"],
            input=settings.dns_objects(cluster), text=True, env=self.environment, check=True, timeout=60,
        )  # fmt: skip
        known = f"kubernetes.default.svc.{layout.DOMAIN}"
        command = [sys.executable, "-m", dns.__name__, self.address, str(cluster.kubeconfig)]
        self.start("dns", command, lambda: dns.resolves(self.address, known))
        volumes = str(cluster.folder / "volumes")
        command = [sys.executable, "-m", provisioner.__name__, volumes, str(cluster.kubeconfig)]
        self.start("provisioner", command, lambda: self.kubectl("get", "storageclass", provisioner.STORAGE_CLASS))

    def keep(self) -> None:
        """Start again what ends, for ever; bury the orphans of containers."""
        never = threading.Event()
        while not never.wait(TICK_S):
            self._bury()
            for daemon in self.daemons:
                if not daemon.runs() and not (self.folder / "held" / daemon.name).exists():
                    daemon.start()

    def _bury(self) -> None:
        """Collect processes that ended here and are nobody's child any more; those of programs are their Daemon's."""
        own = {daemon.pid: daemon for daemon in self.daemons}
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if daemon := own.get(ended.si_pid):
                    daemon.runs()
                else:
                    os.waitpid(ended.si_pid, 0)


def main(path: str, number: str) -> None:
    """Bring the node up; say so in its folder by a file ``ready``."""
    node = Node(layout.load(Path(path)), int(number))
    node.mount()
    node.connect()
    if node.number == 0:
        node.run_control_plane()
    node.run_node()
    if node.number == 0:
        node.run_addons()
    (node.folder / "ready").touch()
    node.keep()


if __name__ == "__main__":
    main(*sys.argv[1:])
