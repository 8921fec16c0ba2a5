"""Takes the plan's steps, one at a time: look, plan, act, until there is nothing left to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from polarkv_dataplane.raid.plan import next_release, next_step
from polarkv_dataplane.raid.state import Seen, Wanted
from polarkv_dataplane.raid.steps import Command, Step
from polarkv_dataplane.raid.tools import ToolFailed, run
from polarkv_dataplane.runtime.stopping import Stop

logger = logging.getLogger(__name__)
# The longest way there has ten steps; whoever needs more is undone by somebody else.
MOST_STEPS = 40
_PAUSE_S = 0.5

Look = Callable[[], Seen]
Act = Callable[[Command], None]


class StepFailed(RuntimeError):
    """A step did not succeed, tried again for as long as is allowed; says which command, and what it said."""


class Runner:
    """Brings one array about, and takes it apart."""

    def __init__(
        self,
        wanted: Wanted,
        look: Look,
        act: Act | None = None,
        *,
        retry_s: float = 20.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``look`` says what is there, ``act`` runs a command (by default as a process)."""
        self._wanted = wanted
        self._look = look
        self._act = act or execute
        self._retry_s = retry_s
        self._now = now

    def assemble(self, stop: Stop) -> bool:
        """Bring the mounted array about; whether it is there. Not so when ``stop`` was set first.

        Raises:
            Refused: what is there must not be changed. ConfigurationError: a device is none.
            StepFailed: a command failed for as long as it was tried.
        """
        return self._until_done(next_step, stop)

    def release(self) -> None:
        """Unmount the file system and stop the array. Raises StepFailed when something else still uses it."""
        self._until_done(next_release, Stop())

    def _until_done(self, plan: Callable[[Wanted, Seen], Step | None], stop: Stop) -> bool:
        failing_since: float | None = None
        said = ""
        for _ in range(MOST_STEPS):
            while not stop.is_set():
                try:
                    step = plan(self._wanted, self._look())
                    if step is None:
                        return True
                    self._take(step)
                    failing_since = None
                    break
                except (ToolFailed, OSError) as error:
                    # A machine's udev may look at devices, or assemble the very same array, at this moment.
                    failing_since = self._now() if failing_since is None else failing_since
                    if self._now() - failing_since >= self._retry_s:
                        raise StepFailed(str(error)) from error
                    if said != str(error):
                        said = str(error)
                        logger.warning("%s; trying again for %.0f s", said, self._retry_s)
                    stop.wait(_PAUSE_S)
            if stop.is_set():
                return False
        raise StepFailed(f"no end after {MOST_STEPS} steps: something else on this machine changes the array")

    def _take(self, step: Step) -> None:
        logger.info("array %s: %s", self._wanted.array, type(step).__name__)
        for command in step.commands(self._wanted):
            self._act(command)


def execute(command: Command) -> None:
    """Run a command as a process. Raises ToolFailed with what it said."""
    run(command.argv, command.timeout_s, command.accepted)
