"""`WithoutWaiting`: how a program asks a pass for its next batch, and does not wait for it. Main process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from shmloader.errors import LoaderError, NotReady
from shmloader.memory.segment import OwnDescriptor
from shmloader.statistics import Counters
from shmloader.torch_private import never_compiled

NOT_HERE = object()
"""Stands for a batch that is not here yet."""


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
            LoaderError: In place of a `NotReady` that a sample or the sampler raised.
        """
        try:
            return self.__next__(False)
        except NotReady as error:
            if self._is_own(error):
                raise
            raise LoaderError(
                "a sample or the sampler raised NotReady, for a loader of its own say. try_next() raises "
                "that only for a batch that is not here yet, and this one is lost: wait there with next()"
            ) from error

    @never_compiled
    def next_if_here(self) -> Any:
        """The next batch, as ``next()`` with all its exceptions, or `NOT_HERE` where that would wait."""
        try:
            return self.__next__(False)
        except NotReady as error:
            if self._is_own(error):
                return NOT_HERE
            raise

    def _is_own(self, error: NotReady) -> bool:
        """Whether this iterator says so, and not a nested one in the program's code."""
        return error.raised_by is not None and error.raised_by is getattr(self, "_lifecycle", None)

    def __aiter__(self) -> AsyncIterator[Any]:
        """The further batches for ``async for``; see `DataLoader.__aiter__`."""
        return AsyncBatches(self, float(self._timeout), self._counters.note_wait)


class AlwaysHere(WithoutWaiting):
    """`WithoutWaiting` of an iterator that makes each batch in the call."""

    _ready: OwnDescriptor | None = None  # of `fileno`, once that was called

    def fileno(self) -> int:
        """A descriptor that is always readable, as long as the iterator lives: see `try_next`."""
        ready = self._ready
        if ready is None:  # another thread may make one, too
            ready = vars(self).setdefault("_ready", OwnDescriptor(os.eventfd(1)))
        return ready.fd


_waited_for: set[int] = set()
"""Descriptors of iterators for whose next batch a task waits."""


class AsyncBatches:
    """The batches of one pass. Tasks may share it: each batch comes to one of them.

    A batch is taken only in the step in which it is returned, so a task that is cancelled while it waits has
    taken none. Other tasks run before each batch, also where it is here already.
    """

    def __init__(self, iterator: Any, timeout_s: float, note_wait: Callable[[int], None]) -> None:
        self._iterator = iterator  # with `next_if_here` and `fileno`
        self._timeout_s = timeout_s  # after which the iterator is to look at its workers; 0 for never
        self._note_wait = note_wait  # counts nanoseconds
        self._turns = asyncio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next batch; `StopAsyncIteration` after the last one, and else the exceptions of ``next()``."""
        async with self._turns:
            await asyncio.sleep(0)
            while True:
                try:
                    batch = self._iterator.next_if_here()
                except StopIteration:
                    raise StopAsyncIteration from None
                except StopAsyncIteration as error:
                    raise LoaderError(
                        "a sample or the sampler raised StopAsyncIteration, which would end the loop as if "
                        "the epoch were over"
                    ) from error
                if batch is not NOT_HERE:
                    return batch
                await self._ready()

    async def _ready(self) -> None:
        """Wait until there may be a batch, or for as long as the timeout."""
        fd, loop = self._iterator.fileno(), asyncio.get_running_loop()
        if fd in _waited_for:  # an event loop has one reader for each descriptor
            raise LoaderError(
                "another task waits for the next batch of this iterator. Let the tasks share one "
                "aiter(loader): each batch then comes to one of them"
            )
        ready = loop.create_future()
        _waited_for.add(fd)
        began_ns = time.perf_counter_ns()
        loop.add_reader(fd, _end_wait, ready)
        timer = loop.call_later(self._timeout_s, _end_wait, ready) if self._timeout_s > 0 else None
        try:
            await ready
        finally:
            _waited_for.discard(fd)
            loop.remove_reader(fd)
            if timer is not None:
                timer.cancel()
            self._note_wait(time.perf_counter_ns() - began_ns)


def _end_wait(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
