"""The cluster that these tests run on: one of their own, or the one that KUBECONFIG names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.support import cluster as clusters
from tests.cluster.support import images
from tests.cluster.support.kubectl import Kubectl


@pytest.fixture(scope="session")
def own_cluster() -> Iterator[clusters.Cluster]:
    """Run a whole cluster on this machine, for tests that also break it; skipped where the user names another.

    It has the project's image (``images.PROJECT_IMAGE``), the image's base and a default StorageClass.
    """
    if os.environ.get("KUBECONFIG"):
        pytest.skip("this test ends programs and nodes of its cluster: unset KUBECONFIG")
    with clusters.running(images.archives()) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """Return the administrator's kubeconfig of the cluster under test: KUBECONFIG's, else one of the tests' own."""
    if named := os.environ.get("KUBECONFIG"):
        return Path(named)
    cluster: clusters.Cluster = request.getfixturevalue("own_cluster")
    return cluster.kubeconfig


@pytest.fixture
def kubectl(kubeconfig: Path) -> Iterator[Kubectl]:
    """Return kubectl in a namespace that is the test's alone and goes with it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    Kubectl(kubeconfig).run("create", "namespace", name)
    yield Kubectl(kubeconfig, name)
    Kubectl(kubeconfig).run("delete", "namespace", name, "--wait=false")
