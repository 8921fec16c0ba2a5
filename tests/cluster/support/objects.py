"""Objects of one kind, kept up to date by listing and watching: what the cluster's DNS and its provisioner stand on."""

from __future__ import annotations

import json
import logging
import ssl
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

Object = dict[str, Any]
Key = tuple[str, str]
WATCH_S = 240
RETRY_S = 0.5


def connect(kubeconfig: Path) -> httpx.Client:
    """Return a client of the API server with the identity that a kubeconfig of :mod:`pki` holds."""
    held = json.loads(kubeconfig.read_text(encoding="utf-8"))
    cluster, user = held["clusters"][0]["cluster"], held["users"][0]["user"]
    context = ssl.create_default_context(cadata=b64decode(cluster["certificate-authority-data"]).decode())
    with TemporaryDirectory() as folder:
        # The ssl module reads a client's certificate from files only.
        pair = Path(folder) / "pair.pem"
        pair.write_bytes(b64decode(user["client-certificate-data"]) + b64decode(user["client-key-data"]))
        context.load_cert_chain(pair)
    return httpx.Client(base_url=cluster["server"], verify=context, timeout=httpx.Timeout(30, read=WATCH_S + 30))


class Objects:
    """A mirror of one resource, such as ``/api/v1/services``, in a thread of its own."""

    def __init__(self, client: httpx.Client, path: str, changed: Callable[[Object], None] = lambda _: None) -> None:
        """Start to follow it; ``changed`` is called with each object that is new or changed, in that thread."""
        self._client = client
        self._path = path
        self._changed = changed
        self._objects: dict[Key, Object] = {}
        self._never = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=path, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for ever: a mirror ends with its process."""
        self._thread.join()

    def get(self, namespace: str, name: str) -> Object | None:
        return self._objects.get((namespace, name))

    def all(self) -> list[Object]:
        return list(self._objects.values())

    def _follow(self) -> None:
        while True:
            try:
                version = self._list()
                for event in self._watch(version):
                    self._take(event)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                logging.warning("%s: %r", self._path, error)
                self._never.wait(RETRY_S)

    def _list(self) -> str:
        listed = self._client.get(self._path).raise_for_status().json()
        self._objects = {key(each): each for each in listed["items"]}
        for each in self.all():
            self._changed(each)
        return str(listed["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> Iterator[Object]:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        with self._client.stream("GET", self._path, params=query) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                yield json.loads(line)

    def _take(self, event: Object) -> None:
        changed = event["object"]
        if event["type"] == "ERROR":
            raise ValueError(changed.get("message", "the watch ended with an error"))
        if event["type"] == "DELETED":
            self._objects.pop(key(changed), None)
        else:
            self._objects[key(changed)] = changed
            self._changed(changed)


def key(found: Object) -> Key:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]
