"""Many runs in parallel, each in a process of its own; what they find does not depend on how many run at once."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from polarkv_client.cli.trace import Request
from polarkv_dataplane.planner.sim.run import Result, simulate
from polarkv_dataplane.planner.sim.scenario import Scenario
from polarkv_dataplane.planner.sim.workload import conversations

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

_LOOK_S = 0.2
_TELL_EVERY = 50  # requests


@dataclass(frozen=True)
class Job:
    """One run of a sweep. ``share`` of the trace's conversations; ``labels`` are its place in the sweep."""

    scenario: Scenario
    share: float
    labels: dict[str, float | str]


class _Worker:
    """What a worker process has been given once. The last number of ``done`` is not zero when it is to stop."""

    trace: Sequence[Request] = ()
    done: SynchronizedArray[int] | None = None

    @classmethod
    def begin(cls, trace: Sequence[Request], done: SynchronizedArray[int]) -> None:
        cls.trace, cls.done = trace, done


class _StoppedError(Exception):
    """Nobody waits for this run any more."""


def _run(place: int, job: Job) -> Result:
    def tell(count: int) -> None:
        if _Worker.done is None:
            return
        if _Worker.done[-1]:
            raise _StoppedError
        if count % _TELL_EVERY == 0:
            _Worker.done[place] = count

    return simulate(conversations(_Worker.trace, job.share, job.scenario.seed), job.scenario, tell)


def _add(on_progress: Callable[[int], None], before: int, count: int) -> None:
    on_progress(before + count)


def run_all(
    trace: Sequence[Request], jobs: Sequence[Job], workers: int, on_progress: Callable[[int], None] = lambda _: None
) -> list[Result]:
    """The result of each job, in order; ``on_progress`` is told how many requests of all jobs have ended.

    When one fails, or the caller is interrupted, the others stop at their next look.
    """
    if workers <= 1 or len(jobs) <= 1:
        found = []
        before = 0
        for job in jobs:
            part = conversations(trace, job.share, job.scenario.seed)
            found.append(simulate(part, job.scenario, partial(_add, on_progress, before)))
            before += len(part) * job.scenario.passes
        return found
    # Not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    done: SynchronizedArray[int] = context.Array("q", len(jobs) + 1)
    with ProcessPoolExecutor(
        min(workers, len(jobs)), mp_context=context, initializer=_Worker.begin, initargs=(list(trace), done)
    ) as pool:
        try:
            with _deaf_children():
                futures: list[Future[Result]] = [pool.submit(_run, place, job) for place, job in enumerate(jobs)]
            left = set(futures)
            while left:
                ended, left = wait_for(left, timeout=_LOOK_S)
                on_progress(sum(done[:-1]))
                for future in ended:
                    future.result()
            return [future.result() for future in futures]
        except BaseException:
            done[-1] = 1
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes begun in here do not hear Ctrl-C, which a terminal sends to all: the caller ends them.

    It is the main thread's mask that they inherit; another thread's Ctrl-C never comes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
