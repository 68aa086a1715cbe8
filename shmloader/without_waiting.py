"""`WithoutWaiting`: how a program asks a pass for its next batch, and does not wait for it. Main process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from shmloader.statistics import Counters
from shmloader.torch_private import never_compiled


class WithoutWaiting:
    """The methods of an iterator for programs that have other things to do; see docs/waiting.md.

    An iterator has a ``fileno()`` too.
    """

    _counters: Counters
    _timeout: float

    __next__: Callable[..., Any]  # the iterator's own; with False it raises `NotReady` where it would wait

    @never_compiled
    def try_next(self) -> Any:
        """The next batch if it is here: as ``next()``, with the same order, exceptions and states.

        It waits for no worker, and for no other thread inside ``next()``, but maybe for an accelerator that
        still reads all slots. The loader's ``timeout`` counts from the first of consecutive calls that found
        nothing. Without workers the batch is made in the call, so it is always here. See docs/waiting.md.

        Raises:
            NotReady: If the batch is not here yet. Nothing was taken.
            StopIteration: After the epoch's last batch.
        """
        return self.__next__(False)

    def __aiter__(self) -> AsyncIterator[Any]:
        """The further batches for ``async for``; see `DataLoader.__aiter__`."""
        from shmloader.async_batches import AsyncBatches

        return AsyncBatches(self, float(self._timeout), self._counters.note_wait)
