"""Visits every state of the protocol's model once, nearest first.

The trace found to a broken invariant is therefore a shortest one.
"""

import logging
import re
from collections import deque
from dataclasses import dataclass, field

from protocol_main import ENDS, PROGRESS, Broken, Setting
from protocol_model import Model, World


@dataclass
class Found:
    """The result of an exploration.

    Attributes:
        states: States seen.
        main_states: Different states of the main process among them.
        ends: States in which all was done.
        raised: States among these in which the loader had raised.
        kinds: The kinds of steps taken, without numbers.
        invariant: The broken invariant, or "".
        trace: The steps that lead to it.
    """

    states: int = 0
    main_states: int = 0
    ends: int = 0
    raised: int = 0
    kinds: set[str] = field(default_factory=set)
    invariant: str = ""
    trace: list[str] = field(default_factory=list)


def explore(setting: Setting, most_states: int = 60_000) -> Found:
    """Visit every state, nearest first, until an invariant is broken.

    Args:
        setting: The setting that is explored.
        most_states: A bound on the work; reaching it is an error of the setting.
    """
    log = logging.getLogger("shmloader")
    was_disabled, log.disabled = log.disabled, True
    try:
        return _explore(Model(setting), most_states)
    finally:
        log.disabled = was_disabled


def _explore(model: Model, most_states: int) -> Found:
    found = Found()
    first = model.first()
    came: dict[World, tuple[World | None, str]] = {first: (None, "")}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        try:
            steps = list(model.steps(world))
            if not any(by_itself for _, _, by_itself in steps):
                _check_end(model, world, found)
        except Broken as broken:
            found.invariant = broken.invariant
            found.trace = [*_trace(came, world), str(broken)]
            break
        for name, after, _ in steps:
            found.kinds.add(re.sub(r" ?\d+", "", name))
            if after not in came:
                came[after] = (world, name)
                queue.append(after)
        if len(came) > most_states:
            raise RuntimeError(f"more than {most_states} states: does a new attribute count something?")
    found.states, found.main_states = len(came), len(model.mains.states)
    return found


def _check_end(model: Model, world: World, found: Found) -> None:
    if not model.is_end(world):
        alive = [worker_id for worker_id, process in enumerate(world.processes) if process.lives]
        raise Broken(
            PROGRESS if model.main_runs(world) else ENDS, f"workers {alive} live and nothing can happen"
        )
    found.ends += 1
    found.raised += world.main >= 0 and model.mains.states[world.main].phase == "raised"


def _trace(came: dict[World, tuple[World | None, str]], world: World) -> list[str]:
    names = []
    before: World | None = world
    while before is not None:
        before, name = came[before]
        names.append(name)
    return [name for name in reversed(names) if name]
