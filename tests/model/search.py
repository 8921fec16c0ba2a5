"""Breadth-first search over every history of a tiny world: the shortest story that breaks a rule, or none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.model.audit import Violation, audit, require, settles
from tests.model.copying import copy_of
from tests.model.scope import Scope
from tests.model.world import Action, World

LONGEST_MS = 20  # of TINY: tickets and leases, then quarantine, then an operation that is never answered, twice


@dataclass
class Result:
    """What a search found. ``violation`` is None when every rule holds in every state."""

    scope: Scope
    states: int
    steps: int
    depth: int
    violation: str | None = None
    story: str = ""

    def __str__(self) -> str:
        found = f"{self.scope.name}: {self.states} states, {self.steps} steps, depth {self.depth}"
        return found if self.violation is None else f"{found}\nbroken: {self.violation}\n{self.story}"


def search(scope: Scope, most_states: int = 2_000_000) -> Result:
    """Visit every state that can be reached. Raises RuntimeError when there are more than ``most_states``."""
    first = start(scope)
    came_from: list[tuple[int, Action | None]] = [(-1, None)]
    seen = {hash(first.fingerprint())}
    settled: set[int] = set()
    frontier = deque([(0, 0, first)])
    steps = depth = 0
    while frontier:
        number, depth, world = frontier.popleft()
        for action in world.actions(scope):
            if action[0] == "time" and scope.horizon_ms and world.now > scope.horizon_ms:
                continue
            steps += 1
            later: World = copy_of(world, {})
            try:
                later.apply(action, scope)
                mark = hash(later.fingerprint())
                if mark in seen:
                    continue
                inspect(later, scope, settled)
            except AssertionError as broken:
                story = tell(scope, [*_path(came_from, number), action])
                return Result(scope, len(seen), steps, depth + 1, f"{type(broken).__name__}: {broken}", story)
            seen.add(mark)
            came_from.append((number, action))
            frontier.append((len(came_from) - 1, depth + 1, later))
        if len(seen) > most_states:
            raise RuntimeError(f"{scope.name}: more than {most_states} states; make the world smaller")
    return Result(scope, len(seen), steps, depth)


def start(scope: Scope) -> World:
    """A world whose node has just become Active, empty."""
    world = World(scope)
    for action in (("register",), ("report", 0), ("attach",), ("report", 0)):
        world.apply(action, scope)
    return world


def inspect(world: World, scope: Scope, settled: set[int]) -> None:
    """All rules, in one state. Raises Violation."""
    audit(world.directory)
    world.check(scope)
    core = hash(world.fingerprint()[0])
    if core not in settled:  # these depend on the core's state alone
        settled.add(core)
        world.check_lookups()
        settled_core = settles(copy_of(world.directory, {}), world.now, LONGEST_MS)
        require(settled_core, "nothing waits beyond the longest time-out")


def tell(scope: Scope, actions: list[Action]) -> str:
    """The history as a story, one line a step: who does what, and what comes of it."""
    world = start(scope)
    lines = []
    for place, action in enumerate(actions, 1):
        before = world.now
        line = f"{place:3}. t={before:<2} {_who(world, action):8} "
        try:
            outcome = world.apply(action, scope)
            inspect(world, scope, set())
        except AssertionError as broken:
            outcome = f"✗ {broken}"
        lines.append(f"{line}{_what(action)}" + (f" → {outcome}" if outcome else ""))
    return "\n".join(lines)


def _path(came_from: list[tuple[int, Action | None]], number: int) -> list[Action]:
    actions: list[Action] = []
    while number > 0:
        number, action = came_from[number]
        assert action is not None
        actions.append(action)
    return actions[::-1]


ACTORS = {
    "time": "clock", "tick": "manager", "restart": "manager", "register": "node", "attach": "disk", "crash": "node",
    "return": "node", "restart disk": "disk", "execute": "disk", "fail": "disk", "answer": "disk", "echo": "disk",
    "report": "node", "drain": "admin", "cancel drain": "admin", "purge": "admin", "evict": "admin", "pin": "admin",
    "prefetch": "admin",
}  # fmt: skip


def _who(world: World, action: Action) -> str:
    return ACTORS.get(action[0]) or f"client {'AB'[action[1]]}"


def _what(action: Action) -> str:
    name, *rest = action
    if name in ("begin", "acquire"):
        return f"{name} key {rest[1]}"
    if name in ("purge", "evict", "pin", "prefetch"):
        return f"{name} key {rest[0]}"
    return f"{name} {rest[0]}" if name == "drain" else name


__all__ = ["Result", "Violation", "search", "start", "tell"]
