"""Nonsense of every kind: a spec is read or refused with the one error that names a field; nothing else is raised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarkv_operator.api import SpecInvalid, parse
from polarkv_operator.api.schema import open_api_schema
from polarkv_operator.resources import cache_nodes, render, secrets
from polarkv_operator.resources.common import Release
from tests.operator.support import golden
from tests.operator.support.clusters import body

TEXTS = ["0", "-1", "1Gi", "1e99", "2Mi", "RAID0", "RDMA", "None", "9" * 300, "\n", "Ä", "a/b", "x" * 64]
NAMES = ["name", "spec", "containers", "volumes", "requests", "cpu", "env", "labels"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=3),
    max_leaves=10,
)


def places(schema: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of the spec, however deep."""
    below = [place for name, child in schema.get("properties", {}).items() for place in places(child, (*path, name))]
    return [path, *below] if path else below


PLACES = places(open_api_schema()["properties"]["spec"])


def put(spec: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    for name in place[:-1]:
        if not isinstance(spec.get(name), dict):
            spec[name] = {}
        spec = spec[name]
    spec[place[-1]] = value


def read(given_body: dict[str, Any]) -> None:
    """What the operator does with an object, as far as it is pure."""
    before = copy.deepcopy(given_body)
    refusal = None
    try:
        cluster = parse(given_body)
        contents = secrets.complete(cluster, {}, golden.tokens())
        made = render.children(cluster, Release("polarkv:1"), contents, cluster.spec.cache_nodes.replicas)
        cache_nodes.differences_in_volumes(cluster, made[-1])
    except SpecInvalid as error:
        refusal = error
    if refusal is not None:
        assert refusal.field.startswith(("spec", "metadata", "apiVersion", "kind")), refusal
        assert refusal.fix
        assert len(str(refusal)) < 2000
    assert repr(given_body) == repr(before)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), ANYTHING), min_size=1, max_size=5))
def test_nonsense_in_any_field_is_refused_by_its_name(changes: list[tuple[tuple[str, ...], object]]) -> None:
    changed = body()
    for place, value in changes:
        put(changed["spec"], place, value)
    read(changed)


@settings(max_examples=100, deadline=None)
@given(ANYTHING, st.sampled_from(["spec", "metadata", "kind", "apiVersion", "status"]))
def test_nonsense_in_place_of_a_part_is_refused(value: object, part: str) -> None:
    read({**body(), part: value})


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_field_refuses_what_no_field_can_be(place: tuple[str, ...]) -> None:
    changed = body()
    put(changed["spec"], place, [{"a": [1.5]}, "x"])
    with pytest.raises(SpecInvalid) as caught:
        parse(changed)
    assert caught.value.field.startswith("spec")
