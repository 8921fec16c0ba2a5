"""What injection does to a pod, as one pure function: a pod, a cluster's connection and settings in, a patch out.

Nothing that the user set is removed or changed. What already is as it should be stays, so that doing it twice is doing
it once. When something stands in the way, nothing at all is injected and the reason is returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polarkv_operator.api.quantity import Quantity
from polarkv_operator.resources.engine_arguments import Engine, arguments
from polarkv_operator.webhooks import commands, pods, scripts
from polarkv_operator.webhooks.commands import Addition, Invocation
from polarkv_operator.webhooks.edits import Edits
from polarkv_operator.webhooks.pods import Container, Pod
from polarkv_operator.webhooks.scripts import NotUnderstood

LABEL = "polarkv.io/inject"
ENGINE_ANNOTATION = "polarkv.io/engine"
CONTAINER_ANNOTATION = "polarkv.io/container"
ARGUMENT_ANNOTATION = "polarkv.io/argument"
STATUS_ANNOTATION = "polarkv.io/injection"

VOLUME = "polarkv-client"
INIT_CONTAINER = "polarkv-client"
# Not below a folder such as /opt: the user may have mounted something there that is read-only.
MOUNT_PATH = "/polarkv-client"
PYTHON_PATH = f"{MOUNT_PATH}/python"
INSTALL_COMMAND = ("python3", "-m", "polarkv_client.install", MOUNT_PATH)
# The image's own user, said outright only where the pod asks for root.
UNPRIVILEGED_USER = 65532


class Skip(StrEnum):
    """Why a pod was left as it is."""

    NOT_READABLE = "NotReadable"
    NOT_LINUX = "NotLinux"
    CLUSTER_NOT_FOUND = "ClusterNotFound"
    CLUSTER_NOT_READ = "ClusterNotRead"
    DISABLED = "Disabled"
    CONTAINER_NOT_FOUND = "ContainerNotFound"
    ENGINE_NOT_FOUND = "EngineNotFound"
    ANNOTATION_WRONG = "AnnotationWrong"
    ARGUMENT_NOT_SAFE = "ArgumentNotSafe"
    PYTHON_PATH_NOT_SEEN = "PythonPathNotSeen"
    PYTHON_PATH_NOT_USED = "PythonPathNotUsed"
    NAME_TAKEN = "NameTaken"


class Skipped(Exception):
    """Injection does not take place; ``reason`` is one word, the text says what to do."""

    def __init__(self, reason: Skip, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Connection:
    """What a client of a cluster is told. The token stays in its Secret, in the pod's namespace."""

    cluster: str
    endpoint: str
    token_secret: str
    token_key: str
    chunk_tokens: int


@dataclass(frozen=True)
class InjectionSettings:
    """What is injected: the client's image, and how its init container runs.

    Requests equal limits, so that a pod of class Guaranteed stays one.
    """

    image: str
    image_pull_policy: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    cpu: str = "250m"
    memory: str = "128Mi"
    volume_limit: str = "512Mi"


@dataclass(frozen=True)
class Decision:
    """What became of a pod. ``patch`` is a JSON patch (RFC 6902), empty when there is nothing to do.

    ``reason`` is set when the pod was skipped; ``warnings`` are for whoever creates the pod.
    """

    status: str
    patch: Sequence[Mapping[str, Any]] = ()
    reason: Skip | None = None
    warnings: Sequence[str] = field(default=())


def requested_cluster(metadata: pods.Metadata) -> str:
    """The cluster that a pod's label names; empty: none."""
    return (metadata.labels or {}).get(LABEL, "")


def inject(pod: Mapping[str, Any], connection: Connection, settings: InjectionSettings) -> Decision:
    """Decide about a pod (as the API server sends it). Never raises, whatever the pod is."""
    try:
        view = pods.read(pod)
    except ValueError as error:
        return skip(pod, Skip.NOT_READABLE, str(error))
    try:
        return _inject(pod, view, connection, settings)
    except Skipped as skipped:
        return skip(pod, skipped.reason, str(skipped))


def skip(pod: Mapping[str, Any], reason: Skip, text: str) -> Decision:
    """Leave a pod as it is, apart from an annotation that says why."""
    status = f"skipped: {reason}: {text}"
    warning = f"polarkv: not injected: {reason}: {text}"
    if pods.read_metadata(pod) is None:
        return Decision(status, (), reason, (warning,))
    edits = Edits(pod)
    _set_status(edits, status)
    return Decision(status, edits.patch, reason, (warning,))


def _inject(pod: Mapping[str, Any], view: Pod, connection: Connection, settings: InjectionSettings) -> Decision:
    if view.spec.os is not None and view.spec.os.name != "linux":
        raise Skipped(Skip.NOT_LINUX, f"spec.os.name is {view.spec.os.name}; the client library is for linux")
    index, container, invocation = _choose(view)
    addition = _plan_arguments(container, invocation, connection)
    _check_python_path(container)
    _check_names(view, container)
    edits = Edits(pod)
    _add_library(edits, view, index, settings)
    _add_environment(edits, index, container, connection)
    if invocation is not None and addition.words:
        _add_arguments(edits, index, container, invocation, addition.words)
    engine = invocation.engine if invocation else "manual"
    argument = {"added": "polarkv", "present": "polarkv", "own": "own"}[addition.outcome]
    status = f"injected: container={container.name} engine={engine} argument={argument}"
    _set_status(edits, status)
    return Decision(status, edits.patch, None, tuple(_warnings(view)))


def _choose(view: Pod) -> tuple[int, Container, Invocation | None]:
    """The container to change, and its engine's command line (None: the user sees to that)."""
    annotations = view.metadata.annotations or {}
    containers = list(enumerate(view.spec.containers))
    if (name := annotations.get(CONTAINER_ANNOTATION)) is not None:
        containers = [(index, container) for index, container in containers if container.name == name]
        if not containers:
            names = ", ".join(container.name for container in view.spec.containers)
            raise Skipped(
                Skip.CONTAINER_NOT_FOUND, f"{CONTAINER_ANNOTATION} is {name!r}; the pod's containers are {names}"
            )
    hint = _engine_hint(annotations)
    failures = []
    for index, container in containers:
        try:
            invocation = commands.find(container, hint)
        except NotUnderstood as error:
            failures.append(f"container {container.name}: {error}")
            continue
        if hint in {None, invocation.engine}:
            return index, container, None if _is_manual(annotations) else invocation
        failures.append(f"container {container.name} runs {invocation.engine}, but {ENGINE_ANNOTATION} is {hint}")
    if _is_manual(annotations):
        if len(containers) == 1:
            return *containers[0], None
        raise Skipped(Skip.CONTAINER_NOT_FOUND, f"name the engine's container in the annotation {CONTAINER_ANNOTATION}")
    raise Skipped(Skip.ENGINE_NOT_FOUND, f"{'; '.join(failures)[:600]}. {_way_out(hint)}")


def _way_out(hint: Engine | None) -> str:
    by_hand = f"pass the engine's argument yourself and set the annotation {ARGUMENT_ANNOTATION}: manual"
    return by_hand if hint else f"Set the annotation {ENGINE_ANNOTATION} to vllm or sglang, or {by_hand}"


def _is_manual(annotations: Mapping[str, str]) -> bool:
    value = annotations.get(ARGUMENT_ANNOTATION, "auto")
    if value not in {"auto", "manual"}:
        raise Skipped(Skip.ANNOTATION_WRONG, f"{ARGUMENT_ANNOTATION} is {value!r}: use auto or manual")
    return value == "manual"


def _engine_hint(annotations: Mapping[str, str]) -> Engine | None:
    value = annotations.get(ENGINE_ANNOTATION)
    try:
        return None if value is None else Engine(value)
    except ValueError:
        raise Skipped(Skip.ANNOTATION_WRONG, f"{ENGINE_ANNOTATION} is {value!r}: use vllm or sglang") from None


def _plan_arguments(container: Container, invocation: Invocation | None, connection: Connection) -> Addition:
    if invocation is None:
        return Addition("own")
    try:
        wanted = arguments(invocation.engine, connection.chunk_tokens)
        return commands.plan_arguments(container, invocation, wanted)
    except NotUnderstood as error:
        raise Skipped(
            Skip.ARGUMENT_NOT_SAFE, f"container {container.name}: {error}. {_way_out(invocation.engine)}"
        ) from None


def _check_python_path(container: Container) -> None:
    variable = container.variable("PYTHONPATH")
    if variable is not None and variable.value_from is not None:
        raise Skipped(
            Skip.PYTHON_PATH_NOT_SEEN,
            f"container {container.name}: PYTHONPATH comes from elsewhere (valueFrom) and cannot be extended: "
            f"write it as a value",
        )
    if not commands.keeps_python_path(container):
        raise Skipped(
            Skip.PYTHON_PATH_NOT_USED,
            f"container {container.name}: its command sets PYTHONPATH or has Python ignore it (-E, -I): "
            f"extend it instead (PYTHONPATH=/yours:$PYTHONPATH)",
        )


def _check_names(view: Pod, container: Container) -> None:
    """That the names which injection takes are free, or taken by an earlier injection."""
    ours = _init_container(view)
    if ours is not None and not any(mount.name == VOLUME for mount in ours.volume_mounts or ()):
        raise Skipped(Skip.NAME_TAKEN, f"an init container is named {INIT_CONTAINER}: rename it")
    if any(other.name == INIT_CONTAINER for other in view.spec.containers):
        raise Skipped(Skip.NAME_TAKEN, f"a container is named {INIT_CONTAINER}: rename it")
    volume = next((volume for volume in view.spec.volumes or () if volume.name == VOLUME), None)
    if volume is not None and (ours is None or volume.empty_dir is None):
        raise Skipped(Skip.NAME_TAKEN, f"a volume is named {VOLUME}: rename it")
    for mount in container.volume_mounts or ():
        path = mount.mount_path.rstrip("/")
        if (path == MOUNT_PATH and mount.name != VOLUME) or path.startswith(f"{MOUNT_PATH}/"):
            raise Skipped(
                Skip.NAME_TAKEN, f"container {container.name} mounts {mount.name} at {path}: mount it elsewhere"
            )


def _init_container(view: Pod) -> Container | None:
    return next((one for one in view.spec.init_containers or () if one.name == INIT_CONTAINER), None)


def _add_library(edits: Edits, view: Pod, index: int, settings: InjectionSettings) -> None:
    if not any(volume.name == VOLUME for volume in view.spec.volumes or ()):
        edits.append(("spec", "volumes"), {"name": VOLUME, "emptyDir": {"sizeLimit": settings.volume_limit}})
    if _init_container(view) is None:
        made = init_container(settings, view.spec.containers[index], _pod_user(view))
        edits.append(("spec", "initContainers"), made)
    if not any(mount.mount_path.rstrip("/") == MOUNT_PATH for mount in view.spec.containers[index].volume_mounts or ()):
        mount = {"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}
        edits.append(("spec", "containers", index, "volumeMounts"), mount)
    present = {secret.name for secret in view.spec.image_pull_secrets or ()}
    for name in settings.image_pull_secrets:
        if name not in present:
            edits.append(("spec", "imagePullSecrets"), {"name": name})
            present.add(name)


def _pod_user(view: Pod) -> int | None:
    return view.spec.security_context.run_as_user if view.spec.security_context else None


def _resources(settings: InjectionSettings, engine: Container) -> dict[str, str]:
    """What the init container is promised: what it needs, or what the engine's container is, where that is more.

    A LimitRange of the namespace may refuse a container that asks for little, and with it the pod. What the engine's
    container asks for passes, and costs nothing: the two never run at the same time.
    """
    wanted = {"cpu": Quantity.parse(settings.cpu), "memory": Quantity.parse(settings.memory), "ephemeral-storage": None}
    chosen: dict[str, str] = {}
    for name, own in wanted.items():
        theirs = engine.request(name)
        most = max((one for one in (own, theirs) if one is not None), key=lambda one: one.value, default=None)
        if most is not None:
            chosen[name] = str(most)
    return chosen


def init_container(settings: InjectionSettings, engine: Container, pod_user: int | None = None) -> dict[str, Any]:
    """The container that copies the library. It meets the Pod Security Standard "restricted" in any pod.

    A pod's own user, or the one that its namespace prescribes, is kept; only root is replaced.
    """
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if pod_user == 0:
        security |= {"runAsUser": UNPRIVILEGED_USER, "runAsGroup": UNPRIVILEGED_USER}
    resources = _resources(settings, engine)
    container: dict[str, Any] = {
        "name": INIT_CONTAINER,
        "image": settings.image,
        "command": list(INSTALL_COMMAND),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": security,
        "volumeMounts": [{"name": VOLUME, "mountPath": MOUNT_PATH}],
    }
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    return container


def _add_environment(edits: Edits, index: int, container: Container, connection: Connection) -> None:
    place = ("spec", "containers", index, "env")
    _extend_python_path(edits, index, container)
    if container.variable("POLARKV_CONNECTION") is not None:
        return  # the user names a connection file, over which variables would win
    endpoint = container.variable("POLARKV_ENDPOINT")
    if endpoint is None:
        edits.append(place, {"name": "POLARKV_ENDPOINT", "value": connection.endpoint})
    # A token goes to no endpoint but its own.
    is_ours = endpoint is None or endpoint.value == connection.endpoint
    if is_ours and container.variable("POLARKV_TOKEN") is None:
        # Optional: without the Secret the cache misses; a required one would keep the engine from starting.
        reference = {"name": connection.token_secret, "key": connection.token_key, "optional": True}
        edits.append(place, {"name": "POLARKV_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if container.variable("POLARKV_CLIENT_NAME") is None:
        reference = {"apiVersion": "v1", "fieldPath": "metadata.name"}
        edits.append(place, {"name": "POLARKV_CLIENT_NAME", "valueFrom": {"fieldRef": reference}})


def _extend_python_path(edits: Edits, index: int, container: Container) -> None:
    """At the end: what the user put there is found first."""
    place = ("spec", "containers", index, "env")
    variable = container.variable("PYTHONPATH")
    if variable is None:
        # The kubelet fills in what envFrom brings, and leaves the text as it is, a folder that is not there, otherwise.
        value = f"$(PYTHONPATH):{PYTHON_PATH}" if container.env_from else PYTHON_PATH
        edits.append(place, {"name": "PYTHONPATH", "value": value})
        return
    if PYTHON_PATH in (variable.value or "").split(":"):
        return
    at = max(at for at, one in enumerate(container.env or ()) if one.name == "PYTHONPATH")
    value = f"{variable.value}:{PYTHON_PATH}" if variable.value else PYTHON_PATH
    edits.set((*place, at, "value"), value)


def _add_arguments(
    edits: Edits, index: int, container: Container, invocation: Invocation, words: Sequence[str]
) -> None:
    place = ("spec", "containers", index, invocation.place)
    if invocation.script is None:
        for word in words:
            edits.append(place, word)
        return
    elements = (container.command if invocation.place == "command" else container.args) or []
    edits.set((*place, invocation.script), scripts.extended(elements[invocation.script], words))


def _set_status(edits: Edits, status: str) -> None:
    annotations = edits.document["metadata"].get("annotations") or {}
    if annotations.get(STATUS_ANNOTATION) != status:
        edits.set(("metadata", "annotations", STATUS_ANNOTATION), status)


def _warnings(view: Pod) -> list[str]:
    if view.spec.host_network and view.spec.dns_policy in {None, "ClusterFirst"}:
        return [
            "polarkv: the pod is on its host's network with dnsPolicy ClusterFirst and cannot resolve the manager's "
            "name, so every lookup will miss: set dnsPolicy: ClusterFirstWithHostNet"
        ]
    return []
