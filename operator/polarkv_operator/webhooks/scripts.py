"""Reading a shell script given with ``-c``, as far as is safe: is its last command one simple command, and which words?

What is not understood is refused. A wrong guess would put an argument where the shell reads something else.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_COMMAND_FLAG = re.compile(r"-[a-zA-Z]*c")
_SEPARATORS = re.compile(r"[;&|\n]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Each can end, hide or repeat what stands before it, so that text at the script's end is not where it seems to be.
_BEYOND_US = {
    "<<": "a here-document",
    "$'": "$'…'",
    "`": "a command in backquotes",
    "(": "parentheses",
    ")": "parentheses",
    "\r": "carriage returns",
    "set --": "arguments of its own (set --)",
}
# Written as a separator but read as a word: the parser cannot tell it from a real one afterwards.
_QUOTED_SEPARATOR = re.compile(r"""(['"])[;&|\n]+\1|\\[;&|]""")
# What the shell ignores at the end; other blanks, such as a no-break space, are words to it.
_BLANKS = " \t\n"
_WORDS_OF_BLOCKS = frozenset(
    {"if", "then", "else", "elif", "while", "until", "for", "do", "case", "{", "}", "!", "time"}
)


class NotUnderstood(ValueError):
    """Why a command line is left alone, in words that follow "because"."""


def script_index(words: Sequence[str]) -> int:
    """Where in a shell's command line (the shell first) its script is.

    Raises:
        NotUnderstood: the shell runs a file, or nothing.
    """
    for index, word in enumerate(words[1:], 1):
        if _COMMAND_FLAG.fullmatch(word):
            if index + 1 < len(words):
                return index + 1
            break
        if not word.startswith(("-", "+")) and word not in {"pipefail", "errexit", "nounset", "xtrace"}:
            raise NotUnderstood(f"it runs the script file {word!r}, whose text cannot be seen from here")
    raise NotUnderstood(f"{words[0]!r} is given no script")


def last_command(script: str) -> list[str]:
    """The words of the script's last simple command, without assignments before it.

    Raises:
        NotUnderstood: text added at the script's end might not become arguments of that command.
    """
    text = script.rstrip(_BLANKS).replace("\\\n", " ")
    for sign, name in _BEYOND_US.items():
        if sign in text:
            raise NotUnderstood(f"the script has {name}")
    if _QUOTED_SEPARATOR.search(text):
        raise NotUnderstood("the script has a quoted separator")
    if text.endswith("\\"):
        raise NotUnderstood("the script ends in a backslash")
    command: list[str] = []
    for token in _tokens(text):
        if token.startswith("#"):
            raise NotUnderstood("the script has a comment")
        if not _SEPARATORS.fullmatch(token):
            command.append(token)
            continue
        if "|" in token and "||" not in token:
            raise NotUnderstood("the script has a pipe")
        if "&" in token and "&&" not in token:
            raise NotUnderstood("the script puts a command into the background")
        command = []
    if any(sign in word for word in command for sign in "<>"):
        raise NotUnderstood("the engine's output is redirected")
    while command and (_ASSIGNMENT.match(command[0]) or command[0] == "exec"):
        command.pop(0)
    if not command or command[0] in _WORDS_OF_BLOCKS:
        raise NotUnderstood("the script's last command is not a simple command")
    return command


def extended(script: str, words: Sequence[str]) -> str:
    """The script with ``words`` as further arguments of its last command, which :func:`last_command` has understood."""
    end = len(script.rstrip(_BLANKS))
    return f"{script[:end]} {shlex.join(words)}{script[end:]}"


def sets_variable(script: str, name: str) -> bool:
    """Whether the script may take away what a variable held: it names it, other than to extend it."""
    return name in script and f"${name}" not in script and f"${{{name}" not in script


def program(word: str) -> str:
    """A program's name without its folder."""
    return os.path.basename(word)


def _tokens(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        raise NotUnderstood("its quotes do not match") from None
