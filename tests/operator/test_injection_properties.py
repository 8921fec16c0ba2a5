"""What holds for every pod, sane or not: no error, a valid patch or a reason, once is enough, the user's stays."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from polarkv_operator.webhooks.injection import STATUS_ANNOTATION, Decision, inject
from tests.operator.support.inference_pods import CONNECTION, SETTINGS, VLLM_JSON, patched

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["server", "proxy", "polarkv-client", "models", "a"])
WORDS = st.sampled_from(
    [
        "vllm", "serve", "python3", "-m", "vllm.entrypoints.openai.api_server", "sglang.launch_server", "sglang", "\r",
        "sh", "bash", "-c", "-lc", "tini", "--", "env", "A=1", "PYTHONPATH=/x", "-I", "--config", "f.yaml", "$X",
        "--kv-transfer-config", "--kv_transfer_config={}", VLLM_JSON, "--hicache-storage-backend", "dynamic", "-X", "",
        "--disable-radix-cache", "--enable-hierarchical-cache", "$@", "$(X)", ";", "&&", "exec", "\n", "'", "#", "\\",
    ]
) | st.text(max_size=6)  # fmt: skip
# A script is words put together; most of what comes out is nonsense, some is not.
SCRIPTS = st.lists(WORDS, max_size=8).map(" ".join)
COMMANDS = (
    st.lists(WORDS | SCRIPTS, max_size=6)
    | st.tuples(st.sampled_from(["sh", "bash"]), st.just("-c"), SCRIPTS).map(list)
    | st.lists(WORDS, max_size=4).map(lambda more: ["vllm", "serve", *more])
    | st.lists(WORDS, max_size=4).map(lambda more: ["sh", "-c", " ".join(["vllm serve", *more])])
)
VARIABLES = st.fixed_dictionaries(
    {"name": st.sampled_from(["PYTHONPATH", "POLARKV_ENDPOINT", "POLARKV_TOKEN", "POLARKV_CONNECTION", "X"])},
    optional={
        "value": st.sampled_from(["", "/mine", "/mine:/polarkv-client/python", CONNECTION.endpoint]) | SCRIPTS,
        "valueFrom": st.just({"fieldRef": {"fieldPath": "metadata.name"}}),
    },
)
MOUNTS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "mountPath": st.sampled_from(["/models", "/polarkv-client", "/polarkv-client/", "/polarkv-client/x"]),
    }
)


def few(of: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(of, max_size=most)


CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "image": st.sampled_from(["vllm/vllm-openai:v1", "engine", ""]),
        "command": st.none() | COMMANDS,
        "args": st.none() | COMMANDS,
        "env": few(VARIABLES),
        "envFrom": few(JSON),
        "volumeMounts": few(MOUNTS),
        "more": JSON,
    },
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"labels": st.just({"polarkv.io/inject": "kv"})},
            optional={
                "annotations": st.none()
                | st.dictionaries(
                    st.sampled_from(
                        ["polarkv.io/engine", "polarkv.io/container", "polarkv.io/argument", STATUS_ANNOTATION]
                    ),
                    st.sampled_from(["vllm", "sglang", "server", "manual", "auto", "injected: "]),
                ),
            },
        ),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=3)},
            optional={
                "initContainers": few(CONTAINERS),
                "volumes": few(st.fixed_dictionaries({"name": NAMES}, optional={"emptyDir": st.just({})})),
                "imagePullSecrets": few(st.fixed_dictionaries({"name": NAMES})),
                "securityContext": st.fixed_dictionaries({}, optional={"runAsUser": st.integers(0, 2)}),
                "hostNetwork": st.booleans(),
                "more": JSON,
            },
        ),
    }
)
MANY = settings(max_examples=400, deadline=None)


def decided(document: Any) -> Decision:
    decision = inject(document, CONNECTION, SETTINGS)
    event("injected" if decision.reason is None else str(decision.reason))
    return decision


def kept(before: Any, after: Any, path: str = "") -> None:
    """Assert that ``after`` is ``before`` and more: nothing removed, changed or moved."""
    if isinstance(before, dict):
        assert isinstance(after, dict), path
        for name in before:
            kept(before[name], after.get(name), f"{path}/{name}")
    elif isinstance(before, list):
        assert isinstance(after, list) and len(after) >= len(before), path
        for at, item in enumerate(before):
            kept(item, after[at], f"{path}/{at}")
    elif before is None:
        pass  # null and absent are one to the API server
    elif isinstance(before, str) and before != after:
        assert isinstance(after, str)
        if path.endswith("/value"):
            assert after == (f"{before}:" if before else "") + "/polarkv-client/python", path
        elif "/args/" in path or "/command/" in path:
            assert after.startswith(before.rstrip(" \t\n") + " --"), path
        else:
            assert path == f"/metadata/annotations/{STATUS_ANNOTATION}"
    else:
        assert before == after, path


@MANY
@given(JSON)
def test_any_nonsense_gets_an_answer(document: Any) -> None:
    decision = decided(document)
    assert decision.reason is not None and str(decision.reason) in decision.status
    if isinstance(document, dict):
        kept(document, patched(document, decision))


@MANY
@given(st.dictionaries(st.sampled_from(["metadata", "spec"]), JSON | PODS))
def test_pieces_in_wrong_places_get_an_answer(document: Any) -> None:
    kept(document, patched(document, decided(document)))


@MANY
@given(PODS)
def test_nothing_of_the_users_is_removed_or_changed(document: Any) -> None:
    decision = decided(document)
    after = patched(document, decision)
    kept(document, after)
    assert {operation["op"] for operation in decision.patch} <= {"add", "replace"}
    json.dumps(list(decision.patch))  # the API server gets it as JSON
    if decision.reason is not None:
        assert len(after["metadata"]["annotations"]) - len(document["metadata"].get("annotations") or {}) in {0, 1}
        assert after["spec"] == document["spec"]


@MANY
@given(PODS)
def test_twice_is_once(document: Any) -> None:
    once = patched(document, decided(document))
    again = inject(once, CONNECTION, SETTINGS)
    assert list(again.patch) == []
    assert again.status == once["metadata"]["annotations"][STATUS_ANNOTATION]


def test_a_pod_as_deep_as_the_parser_takes_gets_an_answer() -> None:
    deep: Any = json.loads("[" * 900 + "]" * 900)
    document = {
        "metadata": {"annotations": None},
        "spec": {"containers": [{"name": "a", "command": ["vllm", "serve"], "livenessProbe": deep}], "affinity": deep},
    }
    assert inject(document, CONNECTION, SETTINGS).reason is None
