"""What the guides in docs/engines tell users to type: tests run engines with it, so that a guide cannot be wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.readme import blocks_in

GUIDES = Path(__file__).parents[3] / "docs" / "engines"


class Command(NamedTuple):
    """A line of a guide: ``NAME=VALUE`` before it, and its words."""

    variables: dict[str, str]
    words: list[str]

    def flags(self) -> dict[str, str]:
        """Its flags by name, as the engine's settings are called; one without a value is "true"."""
        found: dict[str, str] = {}
        for word, following in zip(self.words, [*self.words[1:], "--"], strict=True):
            if word.startswith("--"):
                name = word.removeprefix("--").replace("-", "_")
                found[name] = "true" if following.startswith("--") else following
        return found


def block(engine: str, language: str) -> str:
    """A guide's first block of a language."""
    page = (GUIDES / f"{engine}.md").read_text(encoding="utf-8")
    found = blocks_in(page, language)
    assert found, f"docs/engines/{engine}.md has no block of {language}"
    return found[0]


def command(engine: str, program: str) -> Command:
    """The command in a guide's first block of shell that has ``program`` among its words."""
    words = next(words for words in _commands(block(engine, "bash")) if program in words)
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    return Command(variables, words)


def _commands(script: str) -> Iterator[list[str]]:
    """The words of each command; a quotation may go over several lines."""
    begun = ""
    for line in script.replace("\\\n", " ").splitlines(keepends=True):
        begun += line
        try:
            words = shlex.split(begun)
        except ValueError:  # within a quotation
            continue
        begun = ""
        if words:
            yield words
