"""Finding an engine in a container's command and adding its arguments, or saying why that is not safe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from polarkv_operator.resources.engine_arguments import (
    SGLANG_BACKEND,
    SGLANG_CONFIG,
    SGLANG_ENABLE,
    SGLANG_PAGE,
    SGLANG_PAGE_TOKENS,
    VLLM_FLAG,
    Engine,
)
from polarkv_operator.webhooks import scripts
from polarkv_operator.webhooks.pods import Container
from polarkv_operator.webhooks.scripts import NotUnderstood, program

# Programs that run the rest of their command line as it is.
_WRAPPERS = frozenset({"tini", "dumb-init", "catatonit", "nohup", "exec", "env", "nvidia_entrypoint.sh"})
_PYTHON = re.compile(r"python[0-9.]*")
_MODULES = {"vllm.entrypoints.openai.api_server": Engine.VLLM, "sglang.launch_server": Engine.SGLANG}
_SERVING_PROGRAMS = {"vllm": Engine.VLLM, "sglang": Engine.SGLANG}
_SERVING_IMAGE = re.compile(r"(?:^|/)vllm-openai[^/:@]*(?:[:@]|$)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_REFERENCE = re.compile(r"\$(?:\{(\w+)[^}]*\}|\((\w+)\)|(\w+))")
_HOLDS_ARGUMENTS = re.compile(r"ARG|OPT|FLAG|EXTRA|PARAM", re.IGNORECASE)

Outcome = Literal["added", "present", "own"]


@dataclass(frozen=True)
class Invocation:
    """An engine's command line: where it is in the container, and the arguments that the engine gets.

    ``place`` is the list of the container that holds its end; with ``script`` its end is inside that element's text.
    ``behind`` is the word before the arguments.
    """

    engine: Engine
    arguments: tuple[str, ...]
    behind: str
    place: Literal["command", "args"]
    script: int | None = None


@dataclass(frozen=True)
class Addition:
    """What becomes of the engine's arguments. ``own``: the user gave them, whatever they are; they stay."""

    outcome: Outcome
    words: tuple[str, ...] = ()


def find(container: Container, hint: Engine | None = None) -> Invocation:
    """The engine that a container runs. ``hint`` is what the user says it is.

    Raises:
        NotUnderstood: no engine is seen, or it is one whose arguments cannot be extended safely.
    """
    command, args = container.command or [], container.args or []
    words = [*command, *args]
    place: Literal["command", "args"] = "args" if args else "command"
    start = _unwrapped(words)
    if start < len(words) and program(words[start]) in scripts.SHELLS:
        return _in_script(words[start:], start, len(command))
    if (found := _engine(words[start:])) is not None:
        engine, rest = found
        return Invocation(engine, tuple(words[start + rest :]), words[start + rest - 1], place)
    if command:
        raise NotUnderstood(f"no engine is seen in its command ({_shown(words)})")
    # The image's own entry point runs: what it is can only be told by the image's name or by the user.
    engine_of_image = Engine.VLLM if _SERVING_IMAGE.search(container.image or "") else hint
    if engine_of_image is None:
        raise NotUnderstood("it runs its image's own entry point, which cannot be seen from here")
    if not args:
        raise NotUnderstood("it has no args, and adding some would replace those of its image")
    return Invocation(engine_of_image, tuple(args), "", "args")


def plan_arguments(container: Container, invocation: Invocation, wanted: Sequence[str]) -> Addition:
    """Which of the words ``wanted`` (as ``engine_arguments`` has them) the engine's command line lacks.

    Raises:
        NotUnderstood: the user's other arguments do not go together with them, or cannot be seen.
    """
    given = [*_visible(container, invocation)]
    if invocation.engine is Engine.VLLM:
        return _plan_vllm(given, wanted)
    return _plan_sglang(given, wanted)


def keeps_python_path(container: Container) -> bool:
    """Whether PYTHONPATH, as the container's environment has it, reaches the engine's interpreter."""
    words = [*(container.command or ()), *(container.args or ())]
    for word in words:
        if scripts.sets_variable(word, "PYTHONPATH"):
            return False
    for at, word in enumerate(words):
        if _PYTHON.fullmatch(program(word)):
            for option in words[at + 1 :]:
                if not option.startswith("-") or option.startswith("--"):
                    break
                if not option.startswith(("-X", "-W", "-m")) and set(option) & {"I", "E"}:
                    return False
    # Within a script the words are not apart.
    return not any(re.search(r"python[0-9.]* +(-\w+ +)*-\w*[IE]", word) for word in words)


def _in_script(words: list[str], offset: int, command_length: int) -> Invocation:
    index = scripts.script_index(words)
    positional = words[index + 2 :]
    last = scripts.last_command(words[index])
    start = _unwrapped(last)
    found = _engine(last[start:])
    if found is None:
        raise NotUnderstood(f"the last command of its script is no engine ({_shown(last)})")
    engine, rest = found
    behind, given = last[start + rest - 1], last[start + rest :]
    if any(word in {"$@", "$*"} for word in given):
        given = [word for word in given if word not in {"$@", "$*"}] + positional
    at = offset + index
    if at < command_length:
        return Invocation(engine, tuple(given), behind, "command", at)
    return Invocation(engine, tuple(given), behind, "args", at - command_length)


def _unwrapped(words: Sequence[str]) -> int:
    """Where the command line begins behind programs that only run it."""
    at = 0
    while at < len(words) and (name := program(words[at])) in _WRAPPERS:
        at += 1
        while at < len(words) and words[at].startswith("-") and name != "env":
            at += 1
        while at < len(words) and name == "env" and _ASSIGNMENT.match(words[at]):
            at += 1
    return at


def _engine(words: Sequence[str]) -> tuple[Engine, int] | None:
    """The engine that a simple command runs, and where its arguments begin."""
    if not words:
        return None
    if not _PYTHON.fullmatch(program(words[0])):
        engine = _SERVING_PROGRAMS.get(program(words[0]))
        return (engine, 2) if engine is not None and words[1:2] == ["serve"] else None
    at = 1
    while at < len(words) and words[at].startswith("-") and not words[at].endswith("m"):
        at += 2 if words[at] in {"-X", "-W"} else 1
    if at >= len(words):
        return None
    if not words[at].startswith("-"):
        # The same programs, named as a file: python3 /usr/local/bin/vllm serve …
        engine = _SERVING_PROGRAMS.get(program(words[at]))
        return (engine, at + 2) if engine is not None and list(words[at + 1 : at + 2]) == ["serve"] else None
    module = words[at + 1] if at + 1 < len(words) else ""
    return (_MODULES[module], at + 2) if module in _MODULES else None


def _visible(container: Container, invocation: Invocation) -> Iterator[str]:
    """The engine's arguments with what variables hold, as far as the pod says.

    Raises:
        NotUnderstood: a variable may hold further arguments, and its value cannot be seen.
    """
    in_script = invocation.script is not None
    before = invocation.behind
    for word in invocation.arguments:
        yield word
        for match in _REFERENCE.finditer(word):
            name = match[1] or match[2] or match[3]
            variable = container.variable(name)
            if variable is not None and variable.value is not None:
                yield from variable.value.split()
            # A whole word of a script may become many; a model's name and an option's value do not.
            elif in_script and match[0] == word and not _is_one_word(name, before):
                raise NotUnderstood(f"what ${name} adds to the engine's arguments cannot be seen from here")
        before = word


def _is_one_word(name: str, before: str) -> bool:
    """Whether a variable seems to hold one value: that of the option before it, or the model's name."""
    if _HOLDS_ARGUMENTS.search(name):
        return False
    return before == "serve" or (before.startswith("--") and "=" not in before)


def _plan_vllm(given: Sequence[str], wanted: Sequence[str]) -> Addition:
    if _has(given, VLLM_FLAG):
        return Addition("present" if _value(given, VLLM_FLAG) == wanted[1] else "own")
    if _has(given, "--config"):
        raise NotUnderstood(f"--config names a file that may set {VLLM_FLAG}, which an argument would override")
    if any(_spelled(word).startswith("--kv-offloading") for word in given):
        raise NotUnderstood("--kv-offloading-… chooses another connector")
    return Addition("added", tuple(wanted))


_SGLANG_CONFLICTS = {
    "--disable-radix-cache": "--disable-radix-cache turns off what the hierarchical cache is built on",
    "--enable-unified-cache-external-linker": "--enable-unified-cache-external-linker excludes the hierarchical cache",
    "--enable-lmcache": "--enable-lmcache chooses another cache",
    "--disaggregation-decode-enable-offload-kvcache": "a decode server's offload takes a backend of its own",
}


def _plan_sglang(given: Sequence[str], wanted: Sequence[str]) -> Addition:
    if _value(given, SGLANG_CONFIG) == wanted[-1] and _value(given, SGLANG_BACKEND) == "dynamic":
        return Addition("present")
    if any(_spelled(word).startswith(SGLANG_BACKEND) for word in given):
        return Addition("own")
    if _has(given, "--config"):
        raise NotUnderstood(f"--config names a file that may set {SGLANG_BACKEND}, which an argument would override")
    for flag, reason in _SGLANG_CONFLICTS.items():
        if _has(given, flag):
            raise NotUnderstood(reason)
    if _value(given, "--disaggregation-mode") == "decode":
        raise NotUnderstood("a decode server has no radix cache, on which the hierarchical cache is built")
    words = list(wanted[1:] if _has(given, SGLANG_ENABLE) else wanted)
    # With speculation in a tree SGLang refuses larger pages for some kernels: then its own choice stays.
    if not _has(given, SGLANG_PAGE) and not _has(given, "--speculative-eagle-topk"):
        words += [SGLANG_PAGE, str(SGLANG_PAGE_TOKENS)]
    return Addition("added", tuple(words))


def _spelled(word: str) -> str:
    """An option's name as it is declared: the engines take underscores too, and ``--name=value``."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else word


def _has(given: Sequence[str], flag: str) -> bool:
    """Whether an option is given: by its name, by parts of its JSON (``--flag.key``) or by an abbreviation."""
    names = [_spelled(word) for word in given]
    return any(name == flag or name.startswith(f"{flag}.") or _abbreviates(name, flag) for name in names)


def _abbreviates(name: str, flag: str) -> bool:
    return len(name) > len("--x") and name.startswith("--") and flag.startswith(name)


def _value(given: Sequence[str], flag: str) -> str | None:
    """The value of an option that is written in full, the last one that counts."""
    found = None
    for at, word in enumerate(given):
        if _spelled(word) == flag:
            found = word.partition("=")[2] if "=" in word else given[at + 1] if at + 1 < len(given) else None
    return found


def _shown(words: Sequence[str]) -> str:
    text = " ".join(words[:4])
    return f"{text[:60]}…" if len(text) > 60 or len(words) > 4 else text or os.devnull
