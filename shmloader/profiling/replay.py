"""`Replay`: an epoch in which one batch comes again and again, so that the loader takes no time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from shmloader.statistics import Counters, Recorder
from shmloader.without_waiting import AlwaysHere

_LEAVES = torch.Tensor, np.ndarray, str, bytes, int, float, type(None)
_BATCHES = 1_000  # of an epoch without a length


class Replay(AlwaysHere):
    """Gives the first batch of an iterator as often as the epoch has batches.

    The iterator is dropped with its first batch, for which also `try_next` and ``async for`` wait. So its
    workers end; persistent ones wait. The program may take entries out of a batch: its dicts, lists and
    tuples are copied, tensors are not.
    """

    def __init__(self, iterator: Any, length: int | None, recorder: Recorder) -> None:
        self._iterator, self._length, self._recorder = iterator, length, recorder
        self._counters, self._timeout = Counters(), 0.0  # it never waits
        self._left = _BATCHES if length is None else length
        self._batch: Any = None

    def __iter__(self) -> Replay:
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader that is replayed has no length")
        return self._length

    def __next__(self, waits: bool = True) -> Any:
        if self._iterator is not None and self._left:
            self._batch, self._iterator = next(self._iterator), None
            self._recorder.begin_epoch()  # making that batch does not count
        self._recorder.begin_next(0)  # at the end too: the last step counts
        if not self._left:
            raise StopIteration
        self._left -= 1
        batch = _copied(self._batch, {})
        self._recorder.end_next(0, 0)
        return batch


def _copied(part: Any, known: dict[int, Any]) -> Any:
    """A copy, of dicts, lists and tuples with what they hold, each of them once: ``known`` are those so far.

    Leaves, and what cannot be copied, are given themselves.
    """
    if isinstance(part, _LEAVES):
        return part
    if isinstance(part, tuple):
        make = tuple if type(part) is tuple else getattr(part, "_make", None)  # a named one, or torch.Size
        return part if make is None else make(_copied(each, known) for each in part)
    if id(part) in known:
        return known[id(part)]
    try:
        copied = known[id(part)] = copy.copy(part)
        # Not by methods of a subclass, which may run the program's code.
        if isinstance(part, dict):
            for key, value in dict.items(part):
                dict.__setitem__(copied, key, _copied(value, known))
        elif isinstance(part, list):
            list.__setitem__(copied, slice(None), [_copied(each, known) for each in list.__iter__(part)])
    except Exception:  # noqa: BLE001 - of a class of the program's
        return part
    return copied
