"""`Replay`: an epoch in which one batch comes again and again, so that the loader takes no time."""

from __future__ import annotations

import copy
from typing import Any

from shmloader.statistics import Recorder

_BATCHES = 1_000  # of an epoch without a length


class Replay:
    """Gives the first batch of an iterator as often as the epoch has batches.

    The iterator is dropped with its first batch. So its workers end; persistent ones wait. A batch that is a
    list or dict is copied, one level deep: the program may take entries out of it.
    """

    def __init__(self, iterator: Any, length: int | None, recorder: Recorder) -> None:
        self._iterator, self._recorder = iterator, recorder
        self._left = _BATCHES if length is None else length
        self._batch: Any = None

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._iterator is not None and self._left:
            self._batch, self._iterator = next(self._iterator), None
            self._recorder.begin_epoch()  # making that batch does not count
        self._recorder.begin_next(0)  # at the end too: the last step counts
        if not self._left:
            raise StopIteration
        self._left -= 1
        batch = copy.copy(self._batch) if type(self._batch) in (list, dict) else self._batch
        self._recorder.end_next(0, 0)
        return batch
