"""Volumes of the test cluster: a loop device over a sparse file for each claim, of exactly the size that was asked for.

``python -m tests.cluster.support.provisioner FOLDER KUBECONFIG``. It stands in for a cloud's CSI driver: the
StorageClass waits for the pod's node; ``Block`` claims get the device, ``Filesystem`` claims an ext4 that kubelet makes
on it. The data outlives pods, and goes with the claim.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock

import httpx

from tests.cluster.support.objects import Object, Objects, connect

PROVISIONER = "polarkv.io/loop"
STORAGE_CLASS = "loop"
NODE = "volume.kubernetes.io/selected-node"
BY = "volume.kubernetes.io/storage-provisioner"
VOLUMES = "/api/v1/persistentvolumes"
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_one_at_a_time = Lock()


def storage_class() -> Object:
    """The cluster's default StorageClass."""
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS, "annotations": default},
        "provisioner": PROVISIONER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete",
    }


def size_bytes(quantity: str) -> int:
    """Read a whole Kubernetes quantity such as ``2Gi``."""
    found = re.fullmatch(r"(\d+)([kMGT]?|[KMGT]i)", quantity)
    if not found:
        raise ValueError(f"not a whole quantity: {quantity}")
    return int(found[1]) * UNITS[found[2]]


def volume(claim: Object, device: str) -> Object:
    """The PersistentVolume that satisfies a claim with a device of its node."""
    metadata, spec = claim["metadata"], claim["spec"]
    fields = ("namespace", "name", "uid", "resourceVersion")
    affinity = {"key": "kubernetes.io/hostname", "operator": "In", "values": [metadata["annotations"][NODE]]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name_of(claim), "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "volumeMode": spec.get("volumeMode", "Filesystem"),
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": spec["storageClassName"],
            "local": {"path": device},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [affinity]}]}},
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **{f: metadata[f] for f in fields}},
        },
    }


def name_of(claim: Object) -> str:
    return f"pvc-{claim['metadata']['uid']}"


def provision(folder: Path, client: httpx.Client, claim: Object) -> None:
    """Make the volume of a claim that asks for one and has a node."""
    annotations = claim["metadata"].get("annotations", {})
    if annotations.get(BY) != PROVISIONER or NODE not in annotations or claim["spec"].get("volumeName"):
        return
    with _one_at_a_time:
        if client.get(f"{VOLUMES}/{name_of(claim)}").status_code != httpx.codes.NOT_FOUND:
            return
        file = folder / name_of(claim)
        with file.open("wb") as backing:
            backing.truncate(size_bytes(claim["spec"]["resources"]["requests"]["storage"]))
        device = run("losetup", "--find", "--show", str(file)).strip()
        client.post(VOLUMES, json=volume(claim, device)).raise_for_status()


def reclaim(folder: Path, client: httpx.Client, found: Object) -> None:
    """Remove a volume of ours whose claim is gone."""
    ours = found["metadata"].get("annotations", {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER
    if (
        not ours
        or found["status"].get("phase") != "Released"
        or found["spec"]["persistentVolumeReclaimPolicy"] != "Delete"
    ):
        return
    with _one_at_a_time:
        name = found["metadata"]["name"]
        # Detached only when its last user lets go; the file's blocks are freed with it.
        run("losetup", "--detach", found["spec"]["local"]["path"])
        (folder / name).unlink(missing_ok=True)
        client.delete(f"{VOLUMES}/{name}")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def main(folder: str, kubeconfig: str) -> None:
    """Serve claims for ever."""
    client = connect(Path(kubeconfig))
    files = Path(folder)
    files.mkdir(exist_ok=True)
    answer = client.post("/apis/storage.k8s.io/v1/storageclasses", json=storage_class())
    if answer.status_code != httpx.codes.CONFLICT:
        answer.raise_for_status()
    mirrors = [
        Objects(client, "/api/v1/persistentvolumeclaims", _surviving(partial(provision, files, client))),
        Objects(client, VOLUMES, _surviving(partial(reclaim, files, client))),
    ]
    for mirror in mirrors:
        mirror.join()


def _surviving(work: Callable[[Object], None]) -> Callable[[Object], None]:
    def done(found: Object) -> None:
        try:
            work(found)
        except (httpx.HTTPError, subprocess.SubprocessError, ValueError, OSError) as error:
            logging.warning("%s: %r", found["metadata"]["name"], error)

    return done


if __name__ == "__main__":
    main(*sys.argv[1:])
