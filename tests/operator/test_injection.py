"""Injection as an equality: a pod in, a pod out. What is skipped says why, and changes nothing else."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polarkv_operator.webhooks.injection import Skip, inject
from tests.operator.support.inference_pods import (
    CONNECTION,
    SETTINGS,
    SGLANG_JSON,
    VLLM_JSON,
    command_line,
    container,
    environment,
    injected,
    patched,
    pod,
    status,
)

VLLM_ARGUMENTS = ["--kv-transfer-config", VLLM_JSON]
SGLANG_BACKEND = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", SGLANG_JSON]
SGLANG_PAGE = ["--page-size", "64"]
SGLANG_ARGUMENTS = ["--enable-hierarchical-cache", *SGLANG_BACKEND, *SGLANG_PAGE]


def refused(document: dict[str, Any]) -> tuple[Skip | None, str]:
    decision = inject(document, CONNECTION, SETTINGS)
    after = patched(document, decision)
    assert status(after) == decision.status
    # Apart from the annotation nothing happened.
    annotations = after["metadata"]["annotations"]
    del annotations["polarkv.io/injection"]
    if not annotations and "annotations" not in document["metadata"]:
        del after["metadata"]["annotations"]
    assert after == document
    return decision.reason, decision.status


def test_a_vllm_pod_gets_library_environment_and_argument() -> None:
    before = pod(container("vllm", "serve", "meta/model", args=["--port", "8000"]))
    after = injected(before)
    assert after["spec"] == {
        "containers": [
            {
                "name": "server",
                "image": "engine:1",
                "command": ["vllm", "serve", "meta/model"],
                "args": ["--port", "8000", *VLLM_ARGUMENTS],
                "env": [
                    {"name": "PYTHONPATH", "value": "/polarkv-client/python"},
                    {"name": "POLARKV_ENDPOINT", "value": "tcp://kv-manager.models.svc:7000"},
                    {
                        "name": "POLARKV_TOKEN",
                        "valueFrom": {"secretKeyRef": {"name": "kv-client", "key": "default", "optional": True}},
                    },
                    {
                        "name": "POLARKV_CLIENT_NAME",
                        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}},
                    },
                ],
                "volumeMounts": [{"name": "polarkv-client", "mountPath": "/polarkv-client", "readOnly": True}],
            }
        ],
        "initContainers": [
            {
                "name": "polarkv-client",
                "image": "registry.example/polarkv:1",
                "command": ["python3", "-m", "polarkv_client.install", "/polarkv-client"],
                "resources": {
                    "requests": {"cpu": "250m", "memory": "128Mi"},
                    "limits": {"cpu": "250m", "memory": "128Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "privileged": False,
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumeMounts": [{"name": "polarkv-client", "mountPath": "/polarkv-client"}],
            }
        ],
        "volumes": [{"name": "polarkv-client", "emptyDir": {"sizeLimit": "512Mi"}}],
    }
    assert status(after) == "injected: container=server engine=vllm argument=polarkv"


ENGINES = [
    (["vllm", "serve", "m"], [], VLLM_ARGUMENTS),
    (["/opt/venv/bin/vllm", "serve"], ["m"], VLLM_ARGUMENTS),
    (["python3", "-m", "vllm.entrypoints.openai.api_server"], ["--model", "m"], VLLM_ARGUMENTS),
    (["python3.12", "-u", "-X", "dev", "-m", "vllm.entrypoints.openai.api_server"], [], VLLM_ARGUMENTS),
    (["python3", "/usr/local/bin/vllm", "serve", "m"], [], VLLM_ARGUMENTS),
    (["/usr/bin/tini", "-s", "--", "vllm", "serve", "m"], [], VLLM_ARGUMENTS),
    (["env", "HF_HUB_OFFLINE=1", "vllm", "serve", "m"], [], VLLM_ARGUMENTS),
    ([], ["vllm", "serve", "m"], VLLM_ARGUMENTS),
    (["python3", "-m", "sglang.launch_server", "--model-path", "m"], [], SGLANG_ARGUMENTS),
    (["sglang", "serve", "--model-path", "m"], [], SGLANG_ARGUMENTS),
    (["python3", "-m", "sglang.launch_server"], ["--enable-hierarchical-cache"], [*SGLANG_BACKEND, *SGLANG_PAGE]),
    (["python3", "-m", "sglang.launch_server"], ["--page-size", "128"], SGLANG_ARGUMENTS[:-2]),
    (["python3", "-m", "sglang.launch_server"], ["--page_size=128"], SGLANG_ARGUMENTS[:-2]),
    (["python3", "-m", "sglang.launch_server"], ["--speculative-eagle-topk", "4"], SGLANG_ARGUMENTS[:-2]),
    (["python3", "-m", "sglang.launch_server"], ["--disaggregation-mode", "prefill"], SGLANG_ARGUMENTS),
]


@pytest.mark.parametrize(("command", "args", "added"), ENGINES)
def test_an_engine_is_known_by_its_command(command: list[str], args: list[str], added: list[str]) -> None:
    more: dict[str, Any] = {"args": args} if args else {}
    assert command_line(injected(pod(container(*command, **more)))) == [*command, *args, *added]


SCRIPTS = [
    "vllm serve m --port 8000",
    "exec vllm serve m\n",
    "cd /models && exec vllm serve m --served-model-name 'my model'",
    "set -euo pipefail\nexport HF_HUB_OFFLINE=1\nvllm serve m \\\n  --port 8000 \\\n  --tensor-parallel-size 2\n",
    "ulimit -l unlimited; VLLM_LOGGING_LEVEL=DEBUG python3 -m vllm.entrypoints.openai.api_server --model m",
    "vllm serve $MODEL --port $PORT",
    'vllm serve "${MODEL}"',
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "shell", [["sh", "-c"], ["/bin/bash", "-euo", "pipefail", "-c"], ["tini", "--", "bash", "-lc"]]
)
def test_a_script_gets_the_argument_at_its_end(shell: list[str], script: str) -> None:
    end = len(script.rstrip())
    expected = f"{script[:end]} --kv-transfer-config {shlex.quote(VLLM_JSON)}{script[end:]}"
    for one in (container(*shell, script), container(*shell, args=[script]), container(args=[*shell, script])):
        assert command_line(injected(pod(one))) == [*shell, expected]


@pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if "/models" not in script and "python3" not in script]
)
def test_a_real_shell_passes_the_argument_to_the_engine(script: str, tmp_path: Path) -> None:
    engine = tmp_path / "vllm"
    engine.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n", encoding="utf-8")
    engine.chmod(0o755)
    shell = shutil.which("bash") or "/bin/sh"
    after = command_line(injected(pod(container(shell, "-c", script))))
    variables = {"PATH": str(tmp_path), "MODEL": "m", "PORT": "8000"}
    heard = [
        json.loads(subprocess.run(one, env=variables, check=True, capture_output=True, timeout=30).stdout)
        for one in ([shell, "-c", script], after)
    ]
    assert heard[1] == [*heard[0], *VLLM_ARGUMENTS]


def test_a_scripts_positional_words_are_looked_at() -> None:
    before = pod(container("sh", "-c", 'vllm serve m "$@"', "sh", args=["--kv-transfer-config", "{}"]))
    after = injected(before)
    assert command_line(after) == command_line(before)
    assert status(after).endswith("argument=own")


UNSAFE = [
    "vllm serve m | tee /logs/out",
    "vllm serve m > /logs/out 2>&1",
    "vllm serve m &\nwait",
    "vllm serve m & wait",
    "vllm serve m # the server",
    "# don't\nvllm serve m",
    "vllm serve $(cat /model)",
    "vllm serve `cat /model`",
    "if true; then vllm serve m; fi",
    "while true; do vllm serve m; done",
    "(vllm serve m)",
    "{ vllm serve m; }",
    "cat <<EOF\nvllm serve m\nEOF",
    "vllm serve m; echo done",
    "vllm serve 'm",
    "vllm serve $'m'",
    "vllm serve m \\",
    "vllm serve m\r\n",
    "echo ';' vllm serve m",
    "echo \\; vllm serve m",
    "python3 prepare.py",
    "",
]


@pytest.mark.parametrize("script", UNSAFE)
def test_a_script_that_is_not_understood_is_left_alone(script: str) -> None:
    reason, text = refused(pod(container("sh", "-c", script)))
    assert reason is Skip.ENGINE_NOT_FOUND
    assert "polarkv.io/argument: manual" in text


@pytest.mark.parametrize(
    "one",
    [
        container("bash", "/scripts/start.sh"),
        container("sh", "-c"),
        container("sleep", "infinity"),
        container("vllm", "bench"),
        container("echo", "vllm", "serve"),
        container("python3", "-m", "http.server"),
        container("python3"),
        container(),
        container(args=["--model", "m"]),
    ],
)
def test_a_command_that_is_no_engine_is_left_alone(one: dict[str, Any]) -> None:
    assert refused(pod(one))[0] is Skip.ENGINE_NOT_FOUND


@pytest.mark.parametrize("script", ["vllm serve m $EXTRA_ARGS", "vllm serve m --trust-remote-code $VLLM_OPTIONS"])
def test_variables_that_may_hold_arguments(script: str) -> None:
    assert refused(pod(container("sh", "-c", script)))[0] is Skip.ARGUMENT_NOT_SAFE
    name = script.partition("$")[2]
    seen = container("sh", "-c", script, env=[{"name": name, "value": "--port 1"}])
    assert command_line(injected(pod(seen)))[-1].endswith(f"--kv-transfer-config {shlex.quote(VLLM_JSON)}")
    own = container("sh", "-c", script, env=[{"name": name, "value": "--kv-transfer-config {}"}])
    assert command_line(injected(pod(own)))[-1] == script


OWN = [
    (["vllm", "serve", "m", "--kv-transfer-config", "{}"], "own"),
    (["vllm", "serve", "m", "--kv_transfer_config={}"], "own"),
    (["vllm", "serve", "m", "--kv-transfer-config.kv_connector", "Other"], "own"),
    (["vllm", "serve", "m", "--kv-transfer", "{}"], "own"),
    (["vllm", "serve", "m", *VLLM_ARGUMENTS], "polarkv"),
    (["vllm", "serve", "m", f"--kv-transfer-config={VLLM_JSON}"], "polarkv"),
    (["python3", "-m", "sglang.launch_server", "--hicache-storage-backend", "file"], "own"),
    (["python3", "-m", "sglang.launch_server", "--hicache-storage-backend-extra-config", "{}"], "own"),
    (["python3", "-m", "sglang.launch_server", *SGLANG_ARGUMENTS], "polarkv"),
]


@pytest.mark.parametrize(("command", "whose"), OWN)
def test_the_users_own_argument_stays(command: list[str], whose: str) -> None:
    after = injected(pod(container(*command)))
    assert command_line(after) == command
    assert status(after).endswith(f"argument={whose}")


CONFLICTS = [
    (["vllm", "serve", "m", "--config", "/etc/vllm.yaml"], "--config"),
    (["vllm", "serve", "--config=/etc/vllm.yaml"], "--config"),
    (["vllm", "serve", "m", "--kv-offloading-size", "8"], "--kv-offloading"),
    (["python3", "-m", "sglang.launch_server", "--disable-radix-cache"], "--disable-radix-cache"),
    (["python3", "-m", "sglang.launch_server", "--enable-lmcache"], "--enable-lmcache"),
    (["python3", "-m", "sglang.launch_server", "--disaggregation-mode=decode"], "decode"),
    (["sglang", "serve", "--config", "/etc/sglang.yaml"], "--config"),
    (["sglang", "serve", "--enable-unified-cache-external-linker"], "linker"),
]


@pytest.mark.parametrize(("command", "named"), CONFLICTS)
def test_arguments_that_do_not_go_together_with_ours(command: list[str], named: str) -> None:
    reason, text = refused(pod(container(*command)))
    assert reason is Skip.ARGUMENT_NOT_SAFE
    assert named in text


def test_an_images_own_entry_point() -> None:
    known = container(image="docker.io/vllm/vllm-openai:v0.32.0", args=["--model", "m"])
    assert command_line(injected(pod(known))) == ["--model", "m", *VLLM_ARGUMENTS]
    told = pod(container(args=["--model", "m"]), annotations={"polarkv.io/engine": "sglang"})
    assert command_line(injected(told)) == ["--model", "m", *SGLANG_ARGUMENTS]
    # Args would take the place of the image's own, which are not seen.
    without = pod(container(image="vllm/vllm-openai"), annotations={"polarkv.io/engine": "vllm"})
    assert "args" in refused(without)[1]


def test_the_container_is_chosen() -> None:
    proxy, engine = container("envoy", name="proxy"), container("vllm", "serve", "m", name="engine")
    after = injected(pod(proxy, engine))
    assert after["spec"]["containers"][0] == proxy
    assert "container=engine" in status(after)
    both = pod(container("vllm", "serve", "a", name="a"), container("vllm", "serve", "b", name="b"))
    assert "container=a" in status(injected(both))
    named = pod(*both["spec"]["containers"], annotations={"polarkv.io/container": "b"})
    assert "container=b" in status(injected(named))
    missing = pod(proxy, engine, annotations={"polarkv.io/container": "nginx"})
    assert refused(missing) == (
        Skip.CONTAINER_NOT_FOUND,
        "skipped: ContainerNotFound: polarkv.io/container is 'nginx'; the pod's containers are proxy, engine",
    )


def test_an_init_container_is_never_the_engine() -> None:
    sidecar = container("vllm", "serve", "m", name="engine", restartPolicy="Always")
    assert refused(pod(container("envoy"), initContainers=[sidecar]))[0] is Skip.ENGINE_NOT_FOUND


def test_annotations_decide_and_are_checked() -> None:
    other = pod(container("vllm", "serve", "m"), annotations={"polarkv.io/engine": "sglang"})
    assert "runs vllm, but polarkv.io/engine is sglang" in refused(other)[1]
    wrong = pod(container("vllm", "serve", "m"), annotations={"polarkv.io/engine": "trtllm"})
    assert refused(wrong)[1] == "skipped: AnnotationWrong: polarkv.io/engine is 'trtllm': use vllm or sglang"
    wrong = pod(container("vllm", "serve", "m"), annotations={"polarkv.io/argument": "no"})
    assert refused(wrong)[1] == "skipped: AnnotationWrong: polarkv.io/argument is 'no': use auto or manual"


def test_with_manual_the_user_passes_the_argument() -> None:
    by_hand = {"polarkv.io/argument": "manual"}
    after = injected(pod(container("bash", "/start.sh"), annotations=by_hand))
    assert command_line(after) == ["bash", "/start.sh"]
    assert environment(after)["PYTHONPATH"] == "/polarkv-client/python"
    assert status(after) == "injected: container=server engine=manual argument=own"
    two = (container("bash", "/start.sh"), container("envoy", name="proxy"))
    assert refused(pod(*two, annotations=by_hand))[0] is Skip.CONTAINER_NOT_FOUND
    after = injected(pod(*two, annotations={**by_hand, "polarkv.io/container": "server"}))
    assert "container=server" in status(after)


@pytest.mark.parametrize(
    ("env", "env_from", "expected"),
    [
        ([], None, "/polarkv-client/python"),
        ([{"name": "PYTHONPATH", "value": "/mine"}], None, "/mine:/polarkv-client/python"),
        ([{"name": "PYTHONPATH", "value": "/a:/b:"}], None, "/a:/b::/polarkv-client/python"),
        ([{"name": "PYTHONPATH"}], None, "/polarkv-client/python"),
        ([{"name": "PYTHONPATH", "value": "/polarkv-client/python:/x"}], None, "/polarkv-client/python:/x"),
        ([], [{"configMapRef": {"name": "settings"}}], "$(PYTHONPATH):/polarkv-client/python"),
    ],
)
def test_python_path_is_extended(env: list[Any], env_from: Any, expected: str) -> None:
    one = container("vllm", "serve", "m", env=env, **({"envFrom": env_from} if env_from else {}))
    assert environment(injected(pod(one)))["PYTHONPATH"] == expected


def test_of_two_python_paths_the_one_that_counts_is_extended() -> None:
    env = [{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}]
    after = injected(pod(container("vllm", "serve", "m", env=env)))
    assert after["spec"]["containers"][0]["env"][:2] == [
        env[0],
        {"name": "PYTHONPATH", "value": "/b:/polarkv-client/python"},
    ]


def test_a_python_path_from_elsewhere_is_left_alone() -> None:
    env = [{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}]
    reason, text = refused(pod(container("vllm", "serve", "m", env=env)))
    assert reason is Skip.PYTHON_PATH_NOT_SEEN
    assert "write it as a value" in text


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "-I", "-m", "vllm.entrypoints.openai.api_server"],
        ["python3", "-uE", "-m", "sglang.launch_server"],
        ["env", "PYTHONPATH=/mine", "vllm", "serve", "m"],
        ["sh", "-c", "export PYTHONPATH=/mine\nvllm serve m"],
        ["sh", "-c", "unset PYTHONPATH; vllm serve m"],
        ["sh", "-c", "python3 -I -m vllm.entrypoints.openai.api_server"],
    ],
)
def test_a_command_that_takes_python_path_away(command: list[str]) -> None:
    assert refused(pod(container(*command)))[0] is Skip.PYTHON_PATH_NOT_USED


def test_a_script_that_extends_python_path_is_fine() -> None:
    script = "export PYTHONPATH=/mine:$PYTHONPATH; vllm serve m"
    assert command_line(injected(pod(container("sh", "-c", script))))[-1].startswith(script)


def test_the_users_variables_stay() -> None:
    env = [{"name": "POLARKV_DEADLINE_MS", "value": "9"}, {"name": "POLARKV_CLIENT_NAME", "value": "me"}]
    after = environment(injected(pod(container("vllm", "serve", "m", env=env))))
    assert (after["POLARKV_DEADLINE_MS"], after["POLARKV_CLIENT_NAME"]) == ("9", "me")


def test_a_token_goes_to_no_endpoint_but_its_own() -> None:
    elsewhere = [{"name": "POLARKV_ENDPOINT", "value": "tcp://elsewhere:1"}]
    after = environment(injected(pod(container("vllm", "serve", "m", env=elsewhere))))
    assert after["POLARKV_ENDPOINT"] == "tcp://elsewhere:1"
    assert "POLARKV_TOKEN" not in after
    by_file = [{"name": "POLARKV_CONNECTION", "value": "/etc/polarkv"}]
    after = environment(injected(pod(container("vllm", "serve", "m", env=by_file))))
    assert set(after) == {"POLARKV_CONNECTION", "PYTHONPATH"}


@pytest.mark.parametrize(
    "document",
    [
        pod(volumes=[{"name": "polarkv-client", "emptyDir": {}}]),
        pod(volumes=[{"name": "polarkv-client", "hostPath": {"path": "/x"}}]),
        pod(initContainers=[{"name": "polarkv-client", "image": "other"}]),
        pod(container("vllm", "serve", "m", name="polarkv-client")),
        pod(container("vllm", "serve", "m", volumeMounts=[{"name": "x", "mountPath": "/polarkv-client/"}])),
        pod(container("vllm", "serve", "m", volumeMounts=[{"name": "x", "mountPath": "/polarkv-client/python"}])),
    ],
)
def test_a_name_that_is_taken(document: dict[str, Any]) -> None:
    reason, text = refused(document)
    assert reason is Skip.NAME_TAKEN
    assert "rename" in text or "elsewhere" in text


def test_root_is_replaced_and_no_other_user() -> None:
    root = injected(pod(securityContext={"runAsUser": 0}))["spec"]["initContainers"][0]["securityContext"]
    assert (root["runAsUser"], root["runAsGroup"]) == (65532, 65532)
    other = injected(pod(securityContext={"runAsUser": 1000}))["spec"]["initContainers"][0]["securityContext"]
    assert "runAsUser" not in other


def test_pull_secrets_are_added_once() -> None:
    settings = type(SETTINGS)(image="i", image_pull_policy="Always", image_pull_secrets=("ours", "theirs"))
    before = pod(imagePullSecrets=[{"name": "theirs"}])
    after = patched(before, inject(before, CONNECTION, settings))
    assert after["spec"]["imagePullSecrets"] == [{"name": "theirs"}, {"name": "ours"}]
    assert after["spec"]["initContainers"][0]["imagePullPolicy"] == "Always"


def test_on_the_hosts_network_a_name_that_cannot_be_resolved_is_warned_of() -> None:
    decision = inject(pod(hostNetwork=True), CONNECTION, SETTINGS)
    assert decision.reason is None
    assert "ClusterFirstWithHostNet" in decision.warnings[0]
    assert not inject(pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), CONNECTION, SETTINGS).warnings


def test_a_pod_for_windows_is_left_alone() -> None:
    assert refused(pod(os={"name": "windows"}))[0] is Skip.NOT_LINUX
    assert inject(pod(os={"name": "linux"}), CONNECTION, SETTINGS).reason is None


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"metadata": {"name": "a"}, "spec": {"containers": []}}, "spec.containers"),
        ({"metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "args": [1]}]}}, "spec.containers.0.args.0"),
        ({"metadata": {"name": "a"}}, "spec"),
    ],
)
def test_what_is_no_pod_is_left_alone(document: dict[str, Any], named: str) -> None:
    reason, text = refused(document)
    assert reason is Skip.NOT_READABLE
    assert f"NotReadable: {named}: " in text


def test_without_metadata_there_is_nowhere_to_say_it() -> None:
    decision = inject({"spec": {"containers": []}}, CONNECTION, SETTINGS)
    assert (decision.patch, decision.reason) == ((), Skip.NOT_READABLE)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, {"cpu": "250m", "memory": "128Mi"}),
        ({"requests": {"cpu": "8", "memory": "64Gi"}}, {"cpu": "8", "memory": "64Gi"}),
        ({"limits": {"memory": "1Gi", "nvidia.com/gpu": 8}}, {"cpu": "250m", "memory": "1Gi"}),
        ({"requests": {"cpu": "100m", "ephemeral-storage": "2Gi"}},
         {"cpu": "250m", "memory": "128Mi", "ephemeral-storage": "2Gi"}),
        ({"requests": {"cpu": "many"}, "limits": 7}, {"cpu": "250m", "memory": "128Mi"}),
    ],
)  # fmt: skip
def test_the_init_container_asks_for_no_less_than_the_engine_so_that_a_limit_range_lets_it_pass(
    given: Any, wanted: Any
) -> None:
    document = pod(container("vllm", "serve", "m", resources=given))
    after = patched(document, inject(document, CONNECTION, SETTINGS))
    assert after["spec"]["initContainers"][0]["resources"] == {"requests": wanted, "limits": wanted}
