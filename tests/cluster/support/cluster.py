"""A whole Kubernetes on this machine, in namespaces of its own, brought up in a dozen seconds and gone without a trace.

Everything of it (etcd, API server, controllers, scheduler; containerd, kubelet and kube-proxy of each node; pods) runs
in mount, network, process and cgroup namespaces whose first process is :mod:`node`; ending that process ends all. On
the machine itself it has: one end of a link and one route, so that tests reach pods, Services and the API server, and
pods reach a webhook under test; a control group; a folder; loop devices of volumes. :func:`sweep` removes them, also
those of a run that was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.support import cgroups, programs
from tests.cluster.support.api_server import ADMIN
from tests.cluster.support.daemons import DaemonError
from tests.cluster.support.layout import CLUSTERS, NODES, Layout, folder_of, load, node_name
from tests.cluster.support.pki import SERVER_NAMES, Pki
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
NODE_MODULE = "tests.cluster.support.node"
UP_TIMEOUT_S = 180.0
DOWN_TIMEOUT_S = 30.0
NEEDED = ("ip", "losetup", "mkfs.ext4", "mount", "nsenter", "openssl", "setpriv", "unshare")
# Joins the groups named first, then becomes the command.
ENTER = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs"; shift; done; shift; exec "$@"'
UNSHARE = (
    "unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--cgroup", "--kill-child",
    "--propagation", "private",
)  # fmt: skip


# What this process started and has to collect, by number of cluster and node.
_waiting: dict[tuple[int, int], subprocess.Popen[bytes]] = {}


class ClusterError(RuntimeError):
    """The cluster cannot run here, or did not come up; says why, and what would help."""


@dataclass
class Cluster:
    """A running cluster."""

    layout: Layout

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def add_node(self, number: int) -> None:
        """Bring another node up, or one that was killed again; return when it is Ready."""
        assert 0 < number < NODES, f"nodes are 1 to {NODES - 1}"
        folder = self.layout.node(number)
        (folder / "log").mkdir(parents=True, exist_ok=True)
        (folder / "ready").unlink(missing_ok=True)
        groups = [group / node_name(number) for group in _groups(self.layout.number)]
        for group in groups:
            cgroups.make(group)
        first = _first_process(self.layout.number, 0)
        namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup"]
        enter = ["nsenter", f"--target={first}", *namespaces, f"--wd={ROOT}", "--"]
        _spawn(self.layout, number, groups, enter)
        network = f"--net=/proc/{first}/ns/net"
        link = ["nsenter", network, "ip", "link"]
        inner = str(_first_process(self.layout.number, number))
        _run(*link, "add", node_name(number), "type", "veth", "peer", "name", "uplink", "netns", inner)
        _run(*link, "set", node_name(number), "master", "nodes", "up")
        _wait_ready(self.layout, number)

    def kill_node(self, number: int) -> None:
        """End a node at once, as a machine that loses its power."""
        pid = _first_process(self.layout.number, number)
        _end(self.layout.number, number)
        wait_until(lambda: not psutil.pid_exists(pid), f"{node_name(number)} to end", DOWN_TIMEOUT_S)
        if waiting := _waiting.pop((self.layout.number, number), None):
            waiting.wait(DOWN_TIMEOUT_S)

    def inside(self, node: int, *command: str) -> str:
        """Run a command in a node's namespaces; return what it printed."""
        target = f"--target={_first_process(self.layout.number, node)}"
        environment = programs.environment([self.layout.etcd, self.layout.containers], self.layout.kubernetes)
        return _run("nsenter", target, "--all", "--", *command, environment=environment)

    def import_image(self, archive: Path, node: int = 0) -> None:
        """Give a node an image, from an OCI archive."""
        runtime = "--address=/run/containerd/containerd.sock"
        self.inside(node, "ctr", runtime, "--namespace=k8s.io", "images", "import", str(archive))

    def hold(self, program: str, node: int = 0) -> None:
        """End a program of a node at once and keep it down until :meth:`release`."""
        (self.layout.node(node) / "held" / program).touch()
        self.kill(program, node)

    def release(self, program: str, node: int = 0) -> None:
        """Let a program start again."""
        (self.layout.node(node) / "held" / program).unlink()

    def kill(self, program: str, node: int = 0) -> None:
        """End a program of a node at once; it starts again as it would after a crash."""
        for process in psutil.Process(_first_process(self.layout.number, node)).children():
            with suppress(psutil.NoSuchProcess):
                if process.name() == program[:15]:
                    process.kill()


def up(images: Sequence[Path] = (), nodes: int = 1, *, detached: bool = False) -> Cluster:
    """Bring a cluster up; it ends with this process unless it is ``detached``.

    Args:
        images: OCI archives that every node gets.
        nodes: how many; node 0 also runs the control plane.

    Raises:
        ClusterError: it cannot run here, or did not come up.
        InstallError: its programs cannot be had here.
    """
    _check_machine()
    sweep()
    kubernetes = programs.build(*programs.tools())
    number, lock = _take_number()
    try:
        layout = Layout(number, programs.unpack("etcd"), programs.unpack("containers"), kubernetes)
        cluster = Cluster(layout)
        try:
            _prepare(layout, images)
            _spawn(layout, 0, _groups(number), [], lock, detached=detached)
            _connect(layout)
            _wait_ready(layout, 0)
            for node in range(1, nodes):
                cluster.add_node(node)
        except BaseException:
            down(number)
            raise
        return cluster
    finally:
        # From here on the node's first process holds it.
        os.close(lock)


@contextmanager
def running(images: Sequence[Path] = (), nodes: int = 1) -> Iterator[Cluster]:
    """Run a cluster until the block ends."""
    cluster = up(images, nodes)
    try:
        yield cluster
    finally:
        down(cluster.layout.number)


def down(number: int) -> None:
    """End a cluster and remove all that it has on this machine."""
    _end(number, 0)
    wait_until(lambda: _is_free(number), f"cluster {number} to end", DOWN_TIMEOUT_S)
    for cluster, node in list(_waiting):
        if cluster == number:
            _waiting.pop((cluster, node)).wait(DOWN_TIMEOUT_S)
    _clean(number)


def sweep() -> None:
    """Remove what clusters left behind whose processes are gone."""
    for number in range(CLUSTERS):
        if folder_of(number).exists() and _is_free(number):
            _clean(number)


def find() -> list[Cluster]:
    """The clusters that run on this machine."""
    paths = [folder_of(number) / "layout.json" for number in range(CLUSTERS)]
    return [Cluster(load(path)) for number, path in enumerate(paths) if path.exists() and not _is_free(number)]


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "a whole cluster needs root (namespaces, mounts); run as root, or name a cluster by KUBECONFIG"
        )
    search = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    missing = [name for name in NEEDED if shutil.which(name, path=search) is None]
    if missing:
        raise ClusterError(f"needs {', '.join(missing)}: install Debian's iproute2, util-linux, e2fsprogs and openssl")


def _lock(number: int) -> int | None:
    """Take a number's lock; None when a cluster has it."""
    descriptor = os.open(f"/run/{folder_of(number).name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_free(number: int) -> bool:
    descriptor = _lock(number)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def _take_number() -> tuple[int, int]:
    """Return a number that no cluster has, and the descriptor that keeps it."""
    routes = {route["dst"] for route in json.loads(_run("ip", "-json", "route"))}
    for number in range(CLUSTERS):
        descriptor = _lock(number)
        if descriptor is None:
            continue
        taken = folder_of(number).exists() or any(route.startswith(f"10.{220 + number}.") for route in routes)
        if not taken:
            folder_of(number).mkdir(mode=0o755)
            return number, descriptor
        os.close(descriptor)
    raise ClusterError(
        f"all {CLUSTERS} test clusters of this machine run already; `python -m tests.cluster.support down`"
    )


def _groups(number: int) -> list[Path]:
    return [Path(line) for line in (folder_of(number) / "cgroups").read_text(encoding="utf-8").splitlines()]


def _prepare(layout: Layout, images: Sequence[Path]) -> None:
    """Write certificates, groups and images into the cluster's folder."""
    layout.images.mkdir()
    for archive in images:
        (layout.images / archive.name).symlink_to(archive)
    groups = [group / layout.folder.name for group in cgroups.own_groups()]
    (layout.folder / "cgroups").write_text("\n".join(map(str, groups)), encoding="utf-8")
    for group in groups:
        cgroups.make(group)
    pki = Pki.create(layout.pki)
    addresses = (f"IP:{layout.node_address(0)}", f"IP:{layout.api_service}")
    pki.sign("apiserver", "/CN=kube-apiserver", (*SERVER_NAMES, *addresses))
    pki.sign("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    pki.kubeconfig("admin", ADMIN, layout.url)
    for program, user in (("controller-manager", "kube-controller-manager"), ("scheduler", "kube-scheduler")):
        pki.kubeconfig(program, f"/CN=system:{user}", layout.url)
    pki.kubeconfig("kube-proxy", "/CN=system:kube-proxy", layout.url)
    for node in range(NODES):
        name = node_name(node)
        names = (f"DNS:{name}", f"IP:{layout.node_address(node)}")
        pki.kubeconfig(name, f"/O=system:nodes/CN=system:node:{name}", layout.url, names)
    layout.save()


def _spawn(
    layout: Layout, node: int, groups: list[Path], enter: list[str], lock: int = -1, *, detached: bool = False
) -> None:
    """Start a node's first process in new namespaces; note the id of who waits for it."""
    folder = layout.node(node)
    (folder / "log").mkdir(parents=True, exist_ok=True)
    inside = [sys.executable, "-m", NODE_MODULE, str(layout.folder / "layout.json"), str(node)]
    command = ["sh", "-c", ENTER, "enter", *map(str, groups), "--", *enter, *UNSHARE, *inside]
    if not detached:
        command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    with (folder / "log" / "node").open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            pass_fds=() if lock < 0 else (lock,),
            start_new_session=True,
        )
    _waiting[layout.number, node] = process
    (folder / "parent").write_text(str(process.pid), encoding="ascii")


def _first_process(number: int, node: int) -> int:
    """The process id, as this machine counts, of a node's first process. LookupError when the node does not run."""

    def find() -> int:
        last = _chain(number, node)[-1]
        return last.pid if _is_first(last) else 0

    try:
        return wait_until(find, f"the first process of {node_name(node)}")
    except (OSError, ValueError, psutil.Error, TimeoutError) as error:
        raise LookupError(f"{node_name(node)} of cluster {number} does not run") from error


def _chain(number: int, node: int) -> list[psutil.Process]:
    """Who waits for a node (``nsenter``, ``unshare``), and last its first process, once that is there.

    OSError, ValueError or psutil.Error when there is no such node.
    """
    noted = (folder_of(number) / node_name(node) / "parent").read_text(encoding="ascii")
    chain = [psutil.Process(int(noted))]
    words = chain[0].cmdline()  # none while it becomes another program
    if words and not any(NODE_MODULE in word for word in words):
        raise ValueError(f"process {noted} is another one by now")
    # Neither of those who wait has another child.
    while not _is_first(chain[-1]) and (children := chain[-1].children()):
        chain.append(children[0])
    return chain


def _is_first(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[1:3] == ["-m", NODE_MODULE]
    except psutil.ZombieProcess:
        return False


def _end(number: int, node: int) -> None:
    """Kill a node's first process, and those who wait for it: stopped ones would never see that it has ended."""
    try:
        for process in reversed(_chain(number, node)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    except (OSError, ValueError, psutil.Error):
        return


def _connect(layout: Layout) -> None:
    """Link this machine with node 0."""
    inner = str(_first_process(layout.number, 0))
    _run("ip", "link", "add", layout.host_link, "type", "veth", "peer", "name", "uplink", "netns", inner)
    _run("ip", "address", "add", f"{layout.gateway}/24", "dev", layout.host_link)
    _run("ip", "link", "set", layout.host_link, "up")
    _run("ip", "route", "add", layout.network, "via", layout.node_address(0))


def _wait_ready(layout: Layout, node: int) -> None:
    folder = layout.node(node)
    waiting = _waiting[layout.number, node]

    def ready() -> bool:
        if waiting.poll() is not None:
            log = (folder / "log" / "node").read_text(encoding="utf-8", errors="replace")
            raise DaemonError(f"{node_name(node)} did not come up:\n{log[-4000:]}")
        return (folder / "ready").exists()

    wait_until(ready, f"{node_name(node)} to be ready", UP_TIMEOUT_S, 0.1)


def _clean(number: int) -> None:
    """Remove what a cluster whose processes are gone still has."""
    folder = folder_of(number)
    subprocess.run(["ip", "link", "delete", f"pkv{number}"], capture_output=True, check=False, timeout=30)
    _detach(folder / "volumes")
    with suppress(FileNotFoundError):
        groups = _groups(number)
        wait_until(lambda: cgroups.remove(groups), f"the control groups of cluster {number} to empty", DOWN_TIMEOUT_S)
    _run("rm", "-rf", "--one-file-system", str(folder))


def _detach(volumes: Path) -> None:
    """Let loop devices of volumes go, the upper one first that kubelet puts over a Block volume's."""
    listed = json.loads(_run("losetup", "--list", "--json", "--output", "NAME,BACK-FILE") or '{"loopdevices": []}')
    backing = {each["name"]: each["back-file"] or "" for each in listed["loopdevices"]}
    ours = {name for name, file in backing.items() if file.startswith(f"{volumes}/")}
    for name in [*(name for name, file in backing.items() if file in ours), *ours]:
        _run("losetup", "--detach", name)


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
