"""`Queue`, for one process that puts and one that gets, and `wait` for several queues."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic

import torch

from shmloader.channel.consumer import Consumer
from shmloader.channel.end import LOOK_S, Elapsed, End
from shmloader.channel.parts import Parts, make_parts
from shmloader.channel.producer import Producer
from shmloader.errors import LoaderError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Item = TypeVar("_Item", default=Any)
else:
    from typing import TypeVar

    _Item = TypeVar("_Item")

_Result = TypeVar("_Result")

_CLOSE_S = 2.0  # how long another thread may take to leave a call after the queue was closed


class Queue(Generic[_Item]):
    """A queue of any Python objects between two processes, or two threads of one, without copies in between.

    Tensors, arrays and large ``bytes`` are written once, into shared memory, and arrive in place; the rest
    is pickled as ``multiprocessing`` does it. Small objects travel in the pipe. What was got stays as it is
    for as long as the program holds it.

    The process that puts first is the producer, and the one that gets first the consumer, for good; each may
    use several threads. For many producers make a queue for each and use `shmloader.wait`. The queue reaches
    other processes by fork, or as an argument of ``multiprocessing.Process``, by any start method.

    Args:
        maxsize: Objects that may wait in the queue, at least 1. ``put`` waits while there are so many.
        memory_budget_nbytes: Bytes of shared memory for all objects that wait or that the consumer keeps.
            None stands for half of the memory that is available now. An object may have the budget divided by
            ``maxsize + 2``. What the consumer keeps beyond the budget is copied to private memory.

    Raises:
        TypeError: If ``maxsize`` is no whole number.
        ValueError: If ``maxsize`` is less than 1, or larger than a pipe of this system can hold.
    """

    def __init__(self, maxsize: int, *, memory_budget_nbytes: int | None = None) -> None:
        if not hasattr(maxsize, "__index__"):
            raise TypeError(f"maxsize must be a whole number, not {maxsize!r:.100}: give one, such as 16")
        if maxsize < 1:
            raise ValueError(
                f"maxsize is {maxsize}, and must be at least 1: a queue's memory is bounded. Give the number "
                "of objects that may wait, such as 16"
            )
        self.__setstate__(make_parts(maxsize, memory_budget_nbytes))

    def __getstate__(self) -> Parts:
        """The parts, for a process that is being started."""
        multiprocessing.context.assert_spawning(self)
        self._require_open()
        self._started.append(multiprocessing.context.get_spawning_popen())
        return self._parts

    def __setstate__(self, parts: Parts) -> None:
        self._parts, self._roles = parts, parts.roles
        self._started: list[Any] = []  # ``Popen`` objects of processes that were given the queue
        self._forget()
        live[id(self)] = self

    def _forget(self) -> None:
        self._ends: dict[type[End], End] = {}  # those that this process has
        self._claiming = threading.Lock()
        self._closed = False

    # --- putting

    def put(self, obj: _Item, block: bool = True, timeout: float | None = None) -> None:
        """Put an object; when this returns it is in shared memory, and ``obj`` may be changed.

        Args:
            obj: Any object that ``multiprocessing`` can pickle.
            block: Whether to wait while the queue is full.
            timeout: Seconds to wait at most.

        Raises:
            queue.Full: If there was no room in time.
            PeerDied: If there is no room and the consumer has ended.
            QueueClosed: If the consumer has closed the queue.
            ValueError: If this process has closed the queue.
            SharedMemoryExhausted: If the object does not fit in the budget, or the host lacks the memory.
            LoaderError: If another process puts into this queue.
        """
        self._in_turn(Producer, Producer.put, queue.Full, _deadline(block, timeout), obj)

    def put_nowait(self, obj: _Item) -> None:
        """Put an object if there is room now: ``put(obj, block=False)``."""
        self.put(obj, block=False)

    def new_empty(
        self,
        size: int | Iterable[int],
        dtype: torch.dtype | None = None,
        *,
        block: bool = True,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """An uninitialised CPU tensor in the memory of the next object, so that ``put`` copies nothing.

        Fill it, and put an object with it in it. ``put`` gives its memory away: the tensor is empty then, of
        shape ``[0]``. Views of it that are left keep their values, which costs a copy; so does a view that is
        put in its place. Several such tensors may be in one object: what does not fit is copied once more.

        Args:
            size: Its shape, in items.
            dtype: Its dtype; None stands for torch's default one.
            block: Whether to wait while the queue is full.
            timeout: Seconds to wait at most.

        Raises:
            queue.Full: If there was no room in time. Other errors are those of `put`.
        """
        wanted = tuple(size) if isinstance(size, Iterable) else (size,), dtype or torch.get_default_dtype()
        deadline = _deadline(block, timeout)
        return self._in_turn(Producer, Producer.new_empty, queue.Full, deadline, *wanted)

    # --- getting

    def get(self, block: bool = True, timeout: float | None = None) -> _Item:
        """Get the next object. Its tensors and arrays lie in shared memory, and may be written to.

        Args:
            block: Whether to wait while the queue is empty.
            timeout: Seconds to wait at most.

        Raises:
            queue.Empty: If there was none in time.
            PeerDied: If all was got and the producer has ended without ``close()``.
            QueueClosed: If all was got and the producer has closed the queue.
            ValueError: If this process has closed the queue.
            LoaderError: If another process gets from this queue.
        """
        got: _Item = self._in_turn(Consumer, Consumer.get, queue.Empty, _deadline(block, timeout))
        return got

    def get_nowait(self) -> _Item:
        """Get the next object if it is there: ``get(block=False)``."""
        return self.get(block=False)

    def fileno(self) -> int:
        """A descriptor for ``selectors``: readable while `get` has an object, or the producer has ended.

        A producer that ends before it has put anything is seen by `get` and `shmloader.wait` alone.
        """
        return self._end(Consumer).fileno()

    def has_news(self) -> bool:
        """Whether `get` would return an object, or raise, at once."""
        try:
            return self._in_turn(Consumer, Consumer.has_news, queue.Empty, 0.0)
        except queue.Empty:  # another thread is waiting
            return False

    # --- how full it is

    @property
    def maxsize(self) -> int:
        """Objects that may wait in the queue."""
        return self._parts.maxsize

    def qsize(self) -> int:
        """Objects that wait in the queue; about, while another process puts or gets."""
        return self._roles.waiting()

    def empty(self) -> bool:
        """Whether no object waits. For memory in the queue there is `new_empty`."""
        return self._roles.waiting() == 0

    def full(self) -> bool:
        """Whether as many objects wait as there may be."""
        return self._roles.waiting() >= self.maxsize

    # --- the end

    def close(self) -> None:
        """End this process's use of the queue. Objects that were put can still be got, and kept ones stay.

        The other end hears of it by `QueueClosed`, after the last object. Calls that wait in other threads
        end within a second. Closing twice does nothing, and the queue's death closes it too.
        """
        with self._claiming:
            if self._closed:
                return
            self._closed = True
            ends, self._ends = self._ends, {}
        closed = [end.close_from_outside(_CLOSE_S) for end in ends.values()]
        if all(closed):
            self._parts.close()

    def join_thread(self) -> None:
        """Do nothing: there is no thread that sends, and what was put is on its way."""

    def cancel_join_thread(self) -> None:
        """Do nothing, as `join_thread`."""

    def __del__(self) -> None:
        try:
            self.close()
            self._parts.close()  # no thread is inside any more
        except (AttributeError, TypeError):  # `__init__` has raised, or the interpreter ends
            pass

    # --- the ends

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self!r} is closed")

    def _end(self, kind: type[End]) -> End:
        """This process's end of a kind, for which it takes the role if it has not yet."""
        with self._claiming:
            if kind not in self._ends:
                self._require_open()
                party = self._roles.claim(kind.role)
                if not party.is_this_process:
                    raise LoaderError(
                        f"this process (pid {os.getpid()}) cannot do so: another one {kind.role.does}, "
                        f"{party}, and there is only one at each end. Use one queue for each producer, and "
                        "shmloader.wait(queues) to get from all of them"
                    )
                self._ends[kind] = kind(self._parts, self._started)
            return self._ends[kind]

    def _in_turn(
        self,
        kind: type[End],
        call: Callable[..., _Result],
        late: type[Exception],
        deadline: float | None,
        *of: Any,
    ) -> _Result:
        """Call an end when other threads have left it; raises ``late`` at the deadline."""
        end = self._ends.get(kind) or self._end(kind)
        try:
            end.enter(deadline)
            try:
                return call(end, *of, deadline)
            finally:
                end.lock.release()
        except Elapsed:
            raise late from None

    def has_forked(self) -> None:
        """Note that this process has forked another one."""
        self._roles.has_forked()

    def after_fork(self) -> None:
        """Give up the parent's ends, in a forked process."""
        for end in self._ends.values():
            End.close(end)  # its own descriptors alone
        closed = self._closed
        self._forget()
        self._started, self._closed = [], closed
        if not closed:
            self._roles.forked()


def _deadline(block: bool, timeout: float | None) -> float | None:
    """The moment until which a call may wait, by ``time.monotonic()``; None for ever."""
    if not block:
        return 0.0
    return None if timeout is None else time.monotonic() + timeout


def wait(queues: Iterable[Queue], timeout: float | None = None) -> list[Queue]:
    """Wait until one of several queues has an object, or its producer has ended.

    Args:
        queues: Queues that this process gets from.
        timeout: Seconds to wait at most; None for ever.

    Returns:
        Those of which `Queue.get` returns an object, or raises, at once; empty after ``timeout``.

    Raises:
        ValueError: If there is no queue, for which it would wait for ever.
    """
    queues, deadline = list(queues), _deadline(True, timeout)
    if not queues:
        raise ValueError("queues is empty, so nothing can come: leave the loop when the last one is closed")
    poller = select.poll()
    for one in queues:
        poller.register(one.fileno(), select.POLLIN)
    while True:
        ready = [one for one in queues if one.has_news()]
        if ready:
            return ready
        left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
        if left_s < 0:
            return []
        poller.poll(left_s * 1000)


live: weakref.WeakValueDictionary[int, Queue] = weakref.WeakValueDictionary()
"""Queues that this process has, by ``id``."""


def _call_all(method: Callable[[Queue], None]) -> None:
    for reference in live.valuerefs():  # a list: another thread may make a queue meanwhile
        if (one := reference()) is not None:
            method(one)


os.register_at_fork(
    after_in_child=functools.partial(_call_all, Queue.after_fork),
    after_in_parent=functools.partial(_call_all, Queue.has_forked),
)
