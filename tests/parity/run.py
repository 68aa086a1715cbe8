"""Runs the same play with torch's loader and with ours, and compares all results."""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from caught_warnings import caught_warnings
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader

from .compare import differences

Build = Callable[..., Any]
SEED = 20_240
_TORCHS_DESCRIPTORS = 1024


@dataclass
class Outcome:
    """The outcome of one play: its result or its error, and the generators' states afterwards."""

    result: Any = None
    error: tuple[type, str] | None = None
    warned: list[tuple[type, str]] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)


def builder(loader: type, context: str = "fork") -> Build:
    """The loader's class, with a start method added if there are workers."""

    def build(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_workers", 0) > 0:
            kwargs.setdefault("multiprocessing_context", context)
        return loader(*args, **kwargs)

    return build


def in_process(*args: Any, **kwargs: Any) -> Any:
    """torch's loader without workers, for plays that its transport would change for good."""
    return TorchLoader(*args, **kwargs | {"num_workers": 0})


@contextlib.contextmanager
def descriptors_for_torch() -> Iterator[None]:
    """Raise the limit for torch's loader, which needs a descriptor for each tensor. With too few it hangs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _TORCHS_DESCRIPTORS:
        yield
        return
    most = hard if hard == resource.RLIM_INFINITY else max(hard, _TORCHS_DESCRIPTORS)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_TORCHS_DESCRIPTORS, most))
    except (OSError, ValueError):
        pytest.skip(f"torch's loader, for comparison, needs more than the {soft} descriptors allowed")
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def seed_everything(seed: int = SEED) -> None:
    """Seed the three global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def states() -> dict[str, Any]:
    """The three global generators' states."""
    numpy_state = np.random.get_state(legacy=False)
    return {"torch": torch.get_rng_state(), "numpy": numpy_state, "random": random.getstate()}


def outcome(play: Callable[[Build], Any], build: Build) -> Outcome:
    """Seed, play, and note the result, the warnings and the generators' states."""
    seed_everything()
    seen = Outcome()
    with caught_warnings() as caught:
        try:
            seen.result = play(build)
        except Exception as error:
            seen.error = (type(error), str(error))
    seen.warned = [(warned.category, str(warned.message)) for warned in caught]
    seen.states = states()
    return seen


def assert_parity(play: Callable[[Build], Any], context: str = "fork", reference: Build | None = None) -> Any:
    """Play on both loaders; the outcomes are the same. Returns what our loader's play returned.

    torch's loader always forks: its batches do not depend on its start method. It plays second, since its
    batches may hold more descriptors than ours may open.
    """
    actual = outcome(play, builder(DataLoader, context))
    with descriptors_for_torch():
        expected = outcome(play, reference or builder(TorchLoader))
    found = differences(actual, expected)
    assert not found, "\n".join(found)
    return actual.result


def assert_plays(play: Callable[[Build], Any], context: str = "fork", reference: Build | None = None) -> Any:
    """Assert parity for a play that must end without an error in both loaders."""
    result = assert_parity(play, context, reference)
    assert result is not None, "the play ended in an error, or saw nothing"
    return result


def take(iterator: Any, count: int) -> list[Any]:
    """The next `count` batches."""
    return [next(iterator) for _ in range(count)]
