"""Loaders with worker threads: functions to make them, compare them with others, and find their threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from parity.compare import differences
from parity.run import Build, descriptors_for_torch, outcome
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader


def threads(*args: Any, **kwargs: Any) -> DataLoader[Any]:
    """Our loader with worker threads."""
    return DataLoader(*args, **kwargs, worker_type="thread")


def assert_same(play: Callable[[Build], Any], reference: Any = TorchLoader) -> Any:
    """Check that a play does the same with torch's loader and threads, also to the global generators."""
    actual = outcome(play, threads)
    with descriptors_for_torch():
        expected = outcome(play, reference)
    found = differences(actual, expected)
    assert not found, "\n".join(found)
    assert actual.error is None
    assert actual.result is not None
    return actual.result


def workers_alive() -> list[threading.Thread]:
    """Worker threads of any loader."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("shmloader-worker")]


def join_workers() -> None:
    """Wait for worker threads that were told to end: close() gives them half a second."""
    for thread in workers_alive():
        thread.join(30)
