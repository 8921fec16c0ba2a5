"""Builds ``polarkv_client/native/move.so`` when the package is built or installed editable (a hatch build hook).

Without a C compiler the package is pure Python and slower on the same host. ``CC`` and ``CFLAGS`` are heeded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("client/polarkv_client/native")


class NativeHook(BuildHookInterface[Any]):
    """Compiles before files are gathered; the library then belongs to them, and the wheel to one kind of machine."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. A failure is said, and is none of the build."""
        folder = Path(self.root) / FOLDER
        target = folder / "move.so"
        fresh = target.with_name(f"move.{os.getpid()}.so")  # another environment may be using the old one
        compiler = os.environ.get("CC", "cc")
        flags = ["-O3", "-std=gnu11", "-fPIC", "-shared", *shlex.split(os.environ.get("CFLAGS", ""))]
        command = [*shlex.split(compiler), *flags, "-o", str(fresh), str(folder / "move.c")]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            fresh.replace(target)
        except (OSError, subprocess.SubprocessError) as error:
            fresh.unlink(missing_ok=True)
            target.unlink(missing_ok=True)  # it could be of other sources
            why = getattr(error, "stderr", None) or error
            print(f"{FOLDER}/move.c is not compiled ({why}): same-host copies will be slower", file=sys.stderr)
            return
        build_data["artifacts"].append(str(FOLDER / "move.so"))
        build_data["pure_python"] = False
        # No Python in it, so one wheel serves every version of Python on this kind of machine.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
