"""Fixtures: a namespace of an API server with our CRD, an operator for it, and a manager to talk to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from polarkv_operator.clients.kube import Writer, connect
from tests.cluster.support.kubectl import Kubectl
from tests.operator.support.playground import Playground
from tests.support.managers import Running, make_settings, running_manager
from tests.support.waiting import wait_until

_numbers = itertools.count(1)
CRD = Path(__file__).parents[2] / "crds" / "polarkv.io_polarkvclusters.yaml"


@pytest.fixture(scope="session")
def prepared(api_server: Path) -> Path:
    """Return the kubeconfig of an API server that knows our CRD."""
    kubectl = Kubectl(api_server)
    kubectl.run("apply", "--server-side", "-f", str(CRD))
    kubectl.run("wait", "--for=condition=Established", "crd/polarkvclusters.polarkv.io")
    wait_until(lambda: "default" in kubectl.run("get", "namespaces", "-o", "name"), "the default namespace", 60)
    return api_server


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Running]:
    with running_manager(make_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def playground(prepared: Path, manager: Running) -> Iterator[Playground]:
    """A namespace with a cluster's manager; the operator is started by the test."""
    with make_playground(prepared, manager) as made:
        yield made


@pytest.fixture
def empty_playground(prepared: Path) -> Iterator[Playground]:
    """A namespace whose clusters' managers never answer."""
    with make_playground(prepared, None) as made:
        yield made


@contextmanager
def make_playground(kubeconfig: Path, manager: Running | None) -> Iterator[Playground]:
    stop = threading.Event()
    api = Writer(connect(str(kubeconfig)), stop.wait)
    namespace = f"test-{next(_numbers)}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    with ExitStack() as stack:
        made = Playground(kubeconfig, namespace, api, manager, stack)
        yield made


__all__ = ["Callable", "make_playground"]
