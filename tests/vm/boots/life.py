"""``python -m tests.vm.boots.life …``: one life of a cache node's array, in a guest that is then cut off or turned off.

``bring``: bring the array about, and cut the power after so many commands, or after so many milliseconds.
``serve``: run a cluster whose files lie on the array; load what an earlier life stored, store, and end as told.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from functools import partial
from pathlib import Path

from polarkv_dataplane.raid import observe
from polarkv_dataplane.raid.runner import Runner, execute
from polarkv_dataplane.raid.state import Wanted
from polarkv_dataplane.raid.steps import Command
from polarkv_dataplane.runtime import log
from polarkv_dataplane.runtime.stopping import Stop

WANTED = Wanted("space/pod-0", "/scratch/array/data", 0)


def cut() -> None:
    """The power goes: nothing that is still in memory reaches a disk."""
    Path("/proc/sysrq-trigger").write_text("o", encoding="ascii")
    threading.Event().wait()


def runner(after: int | None = None) -> tuple[Runner, list[str]]:
    """A runner on the guest's disks, and the names of the programs that it has run. ``after`` so many, a cut."""
    done: list[str] = []

    def act(command: Command) -> None:
        execute(command)
        done.append(command.argv[0])
        print("ran", *command.argv[:2], flush=True)
        if len(done) == after:
            cut()

    disks = os.environ["POLARKV_VM_DISKS"].split()
    return Runner(WANTED, partial(observe.see, WANTED, disks), act), done


def bring(arguments: argparse.Namespace) -> None:
    """Bring the array about, and cut the power: at the latest at the end."""
    bringing, done = runner(arguments.commands)
    if arguments.milliseconds is not None:
        timer = threading.Timer(arguments.milliseconds / 1000, cut)
        timer.daemon = True
        timer.start()
    assert bringing.assemble(Stop())
    print(json.dumps({"commands": len(done)}), flush=True)
    cut()


def serve(arguments: argparse.Namespace) -> None:
    """Bring the array about, and run a cluster on it."""
    # Most lives do without, and a guest takes seconds to read all this.
    from tests.vm.boots.cluster import live

    bringing, _ = runner()
    assert bringing.assemble(Stop())
    print(json.dumps(live(Path(WANTED.mount) / "files", arguments, cut)), flush=True)
    if arguments.end != "release":
        cut()
    bringing.release()


def main() -> None:
    log.set_up("WARNING")
    parser = argparse.ArgumentParser()
    lives = parser.add_subparsers(required=True)
    life = lives.add_parser("bring")
    life.add_argument("--commands", type=int, help="cut the power after so many commands")
    life.add_argument("--milliseconds", type=int, help="cut the power after so long")
    life.set_defaults(live=bring)
    life = lives.add_parser("serve")
    life.add_argument("--load", type=int, default=0, help="load so many chunks: all must be hits")
    life.add_argument("--maybe", type=int, default=0, help="load so many more: each is right or a miss")
    life.add_argument("--store", type=int, default=0, help="store so many chunks, and wait until they are on disk")
    life.add_argument("--end", choices=["cut", "cut while storing", "release"], required=True)
    life.set_defaults(live=serve)
    arguments = parser.parse_args()
    arguments.live(arguments)


if __name__ == "__main__":
    main()
