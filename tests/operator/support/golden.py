"""What each sample is rendered to, as files to review. ``python -m tests.operator.support.golden`` writes them anew."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import yaml

from polarkv_operator.api import parse
from polarkv_operator.resources import render, secrets
from polarkv_operator.resources.common import Release

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = sorted((ROOT / "crds" / "samples").glob("*.yaml"))
FOLDER = ROOT / "tests" / "operator" / "golden"
RELEASE = Release("registry.example.com/polarkv:1.2.3", "polarkv-system", has_pod_monitors=True)


def load(path: Path) -> dict[str, Any]:
    """A sample as the API server has it: with a uid."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["metadata"]["uid"] = "00000000-0000-0000-0000-000000000001"
    return content


def tokens() -> secrets.TokenSource:
    """Tokens that are the same in every run."""
    numbers = itertools.count()
    return lambda: f"token-for-tests-{next(numbers):04d}"


def rendered(path: Path) -> str:
    """All objects of a sample, as YAML."""
    cluster = parse(load(path))
    contents = secrets.complete(cluster, {}, tokens())
    objects = render.children(cluster, RELEASE, contents, cluster.spec.cache_nodes.replicas)
    # Without anchors: every object is read on its own.
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    return yaml.dump_all(objects, Dumper=dumper, sort_keys=False, width=120)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for sample in SAMPLES:
        (FOLDER / sample.name).write_text(rendered(sample), encoding="utf-8")
