"""What the README tells people to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def blocks_in(text: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, under "Use it"."""
    section = README.read_text(encoding="utf-8").partition("\n## Use it\n")[2].partition("\n## ")[0]
    return blocks_in(section, language)


def polarkv_lines() -> list[list[str]]:
    """Arguments of every ``polarkv …`` line."""
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["polarkv"]]
