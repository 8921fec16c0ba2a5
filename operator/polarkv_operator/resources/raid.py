"""The container that assembles a cache node's volumes into one striped file system, and the contract with its program.

It is an init container that stays (``restartPolicy: Always``): the servers start when it is ready, and it ends after
them, because an array must be stopped before its disks leave the machine. It alone is privileged, and it only acts at
the two ends of the pod's life.

The contract of ``python -m polarkv_dataplane.raid``:

- ``hold`` assembles the array named by the environment, creates it when all members are blank, mounts its file system,
  and waits; on SIGTERM it unmounts, stops the array and exits with 0. Whatever else members hold is refused, with the
  reason, and stays.
- ``check`` exits with 0 while the file system is mounted and the array serves.
- ``POLARKV_RAID_ARRAY``: a name for the array, the same in every life of the cache node, unique on any machine:
  namespace/pod. (Names in md's own records have 32 bytes: the program derives one.)
- ``POLARKV_RAID_DEVICES``: the members' block devices, separated by commas, in no order that matters.
- ``POLARKV_RAID_MOUNT``: where to mount, below a folder whose mounts reach the other containers.
- ``POLARKV_RAID_OWNER``: number of the user and group that the file system's root must belong to.

What a user may add by ``cacheNodes.podTemplate`` are the program's other settings: ``POLARKV_RAID_OVERWRITE`` names
what members hold and may lose, in the words of the refusal. It names contents, not devices, and so means nothing once
they are gone.
"""

from __future__ import annotations

from polarkv_operator.api.cache_nodes import Layout
from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import names, settings
from polarkv_operator.resources.common import Object, Release, container, from_field

NAME = "raid"
PROGRAM = ("python3", "-m", "polarkv_dataplane.raid")
ARRAY_VOLUME = "array"
DEVICES_FOLDER = "/dev/polarkv"
# Mounting makes an ext4 of many terabytes once in a cache node's life.
_START_SECONDS = 600
# A file system of many terabytes that has to be checked after a crash takes its maps; usually it is a fraction.
_CHECKING_MEMORY = "1Gi"


def is_needed(cluster: PolarKVCluster) -> bool:
    """Whether volumes are striped."""
    return cluster.spec.cache_nodes.storage.layout is Layout.RAID0


def device(index: int) -> str:
    """Where the container finds a member."""
    return f"{DEVICES_FOLDER}/{index}"


def assembler(cluster: PolarKVCluster, release: Release, volumes: list[str]) -> Object:
    """The container; ``volumes`` are the names of the volume claims."""
    built = container(
        cluster,
        release,
        NAME,
        [*PROGRAM, "hold"],
        restartPolicy="Always",
        env=[
            from_field("POD_NAME", "metadata.name"),
            from_field("POD_NAMESPACE", "metadata.namespace"),
            {"name": "POLARKV_RAID_ARRAY", "value": "$(POD_NAMESPACE)/$(POD_NAME)"},
            {"name": "POLARKV_RAID_DEVICES", "value": ",".join(device(index) for index in range(len(volumes)))},
            {"name": "POLARKV_RAID_MOUNT", "value": settings.ARRAY_MOUNT},
            {"name": "POLARKV_RAID_OWNER", "value": str(names.USER_ID)},
        ],
        resources={"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": _CHECKING_MEMORY}},
        volumeDevices=[{"name": name, "devicePath": device(index)} for index, name in enumerate(volumes)],
        volumeMounts=[{"name": ARRAY_VOLUME, "mountPath": settings.ARRAY_FOLDER, "mountPropagation": "Bidirectional"}],
        startupProbe={
            "exec": {"command": [*PROGRAM, "check"]},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": _START_SECONDS,
            "successThreshold": 1,
        },
    )
    built["securityContext"] = {
        "privileged": True,
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": True,
    }
    return built


def array_volume() -> Object:
    """Where the array is mounted.

    In memory, because the kubelet removes such a volume by unmounting it, which fails while anything is mounted below;
    one on disk it would empty, files of the cache included, should the mount have been left behind.
    """
    return {"name": ARRAY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
