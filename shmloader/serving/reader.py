"""`attach`: a loader whose batches another process of this host makes."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch

from shmloader import torch_private
from shmloader.errors import LoaderClosed, SharedMemoryExhausted
from shmloader.serving import meeting, records
from shmloader.serving.link import Link
from shmloader.serving.roster import Join


class ReaderStatistics(NamedTuple):
    """Counts of a reader's life so far; `AttachedLoader.statistics` returns them."""

    batches: int  # that ``next()`` has returned
    wait_s: float  # in ``next()``, for the server
    held: int  # batches that the program holds in shared memory now
    copies: int  # batches that were copied to private memory, because readers hold too many
    server_pid: int


_kept: list[Link] = []  # whose batches could not be moved to private memory


class AttachedLoader:
    """A loader over the batches that another process makes: see `attach`.

    Batches lie in the server's shared memory. What the program writes to them stays in this process, and a
    batch that it holds never changes. One iterator at a time; `state_dict` may be called by other threads.
    """

    def __init__(self, link: Link, *, pin_memory: bool, device: torch.device | None) -> None:
        self._link = link
        self._lock = threading.RLock()
        on_accelerator = device is not None and device.type not in ("cpu", "mps")
        self._pins = (pin_memory or on_accelerator) and torch.accelerator.is_available()
        self._device = device
        self._wants = -1  # the epoch's number
        self._live: Callable[[], AttachedIterator | None] = lambda: None  # the iterator, while it lives
        self._left_at = -1  # the batches of the epoch that was left, up to the last one that was returned
        self._batches = self._wait_ns = 0

    def __len__(self) -> int:
        length: int | None = self._link.welcome["length"]
        if length is None:
            raise TypeError(f"the loader that is served as {self._link.name!r} has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        """Ask for the next epoch; what is left of the present one is not read.

        The first ``next()`` waits until it begins: all readers that took part in the last one have to ask.
        """
        with self._lock:
            before = self._live()
            if before is not None:
                before.end(LoaderClosed("iter() was called again: this iterator reads no more"))
            self._link.ask(self._wants)
            self._left_at = -1
            iterator = AttachedIterator(self, self._link, self._lock)
            self._live = weakref.ref(iterator)
            return iterator

    def set_epoch(self, epoch: int) -> None:
        """Have the server call ``loader.set_epoch(epoch)`` before the next epoch; readers have to agree."""
        self._wants = epoch

    def state_dict(self, *, taken: int | None = None) -> dict[str, Any]:
        """The serving loader's state after the batches that this reader's ``next()`` has returned.

        It is what a program gets that iterates over the loader itself, and can be loaded there. The server
        answers between two batches. Right after an exception, it begins with the batch that raised.

        Args:
            taken: The place after so many of the batches that were returned since ``iter()``.

        Raises:
            ResumeError: If the served loader has no such state, or other readers are in a later epoch.
        """
        with self._lock:
            live = self._live()
            place = self._left_at if live is None else live.place(taken)
            state: dict[str, Any] = self._link.state(place)
            return state

    def leave(self, place: int) -> None:
        """Leave the epoch after so many of its batches."""
        with self._lock:
            self._left_at = place
            self._link.leave()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the serving loader's next epoch continue from a state. Readers have to load the same one.

        It waits until all readers have left the epoch that is running, for 60 s at most.

        Raises:
            ResumeError: If it does not fit the loader, this reader is in an epoch, others stay in one, or one
                has loaded another state.
        """
        with self._lock:
            self._link.load(json.dumps(dict(state_dict)).encode())

    def statistics(self) -> ReaderStatistics:
        """Counts of this reader so far."""
        slots = self._link.slots
        return ReaderStatistics(self._batches, self._wait_ns / 1e9, slots.held, slots.copies, self._link.pid)

    def deliver(self, batch: Any, waited_ns: int) -> Any:
        """A batch as it is returned: in pinned memory or on the device, if that was asked for."""
        if self._pins:
            batch = torch_private.pin_memory(batch, None)
        if self._device is not None:
            from shmloader.device import numbered, to_device

            batch = to_device(batch, numbered(self._device) if self._pins else self._device)
        self._batches += 1
        self._wait_ns += waited_ns
        return batch

    def __del__(self) -> None:
        try:
            self._link.close()
        except SharedMemoryExhausted:
            _kept.append(self._link)  # else batches that the program holds would change

    def close(self) -> None:
        """Leave the server. Batches that the program holds stay valid: they become private memory.

        A ``next()`` that waits in another thread ends with `LoaderClosed`.
        """
        self._link.interrupt()
        with self._lock:
            self._link.close()

    def __enter__(self) -> Self:
        """Use as ``with attach(...) as loader:``: `close` is called at the block's end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"a reader of {self._link.name!r} cannot be sent: attach in the other process")


class AttachedIterator:
    """One pass over an `AttachedLoader`; leaves the epoch when it dies. Threads may share it."""

    def __init__(self, loader: AttachedLoader, link: Link, lock: threading.RLock) -> None:
        self._loader, self._link, self._lock = loader, link, lock
        self._first = -1  # batches of the epoch before this reader's first, once it has begun
        self._taken = 0
        self._raised: list[int] = []  # which of these were exceptions, counted from 1
        self._made: dict[int, Any] = {}  # the batches that are about to be returned, by thread
        self._ended: Exception | None = None

    def __iter__(self) -> Self:
        return self

    def place(self, taken: int | None = None) -> int:
        """The batches of the epoch up to the one returned last, or the ``taken``-th; -1 outside it."""
        if self._first < 0 or self._ended is not None:
            return -1
        if taken is None:
            failed = self._raised[-1:] == [self._taken]  # what it came in place of is not passed over yet
            return self._first + self._taken - failed - len(self._made)
        for raised in self._raised:
            taken += raised <= taken
        return self._first + taken

    def end(self, why: Exception) -> None:
        """Give no more batches."""
        self._ended = self._ended or why

    def __next__(self) -> Any:
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._made:
                self._make(thread)
        # No call from here on: an interrupt comes before, and the thread's next call returns the batch.
        batch = self._made[thread]
        del self._made[thread]
        return batch

    def _make(self, thread: int) -> None:
        link = self._link
        if self._ended is not None:
            raise copy.copy(self._ended)  # the traceback of one that is kept would refer to this object
        began_ns = time.perf_counter_ns()
        if self._first < 0:
            self._first = link.begun()
        stored = link.next(self._first + self._taken + 1)
        waited_ns = time.perf_counter_ns() - began_ns
        if stored is None:
            self._ended = StopIteration()
            link.leave()
            raise StopIteration
        try:
            batch = self._loader.deliver(link.read(stored), waited_ns)
        except Exception as error:  # in the batch's place, or for lack of memory, which may pass
            lacks_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            if stored.flags & records.RAISES or not lacks_memory:
                self._taken += 1
                self._raised.append(self._taken)
            raise
        self._made[thread] = batch
        self._taken += 1  # without a call between

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._ended is None:
                self._loader.leave(self.place())


def attach(
    name: str,
    *,
    pin_memory: bool = False,
    device: torch.device | str | int | None = None,
    join: Join = "next",
    timeout_s: float = 60.0,
    job: str | None = None,
) -> AttachedLoader:
    """A loader over the batches that another process of this host serves by `serve`.

    Args:
        name: The name that it is served by.
        pin_memory: Return tensors in page-locked memory, if there is an accelerator; each batch is copied
            once, and its slot is free at once.
        device: The accelerator that batches are returned on, by way of pinned memory.
        join: When a reader that comes while an epoch runs enters: ``"next"``, with the next epoch, or
            ``"now"``, with the next batch.
        timeout_s: Most seconds to wait for a server of that name.
        job: As in `serve`.

    Raises:
        ShareTimeout: If nobody serves the name.
        PermissionError: If another user does, or a container that maps users otherwise.
        LoaderError: If the server refuses this process: it has other versions, belongs to another run, or has
            its readers already.
        ServerDied: From here and all calls later, if the server ends.
        LoaderClosed: From calls later, if the server has ended on purpose or has let this reader go.
    """
    if join not in ("now", "next"):
        raise ValueError(f'join is "now" or "next", and got {join!r}')
    target = None if device is None else torch.device(device)
    about = meeting.introduction(job) | {"join": join}
    return AttachedLoader(Link(name, timeout_s, about), pin_memory=pin_memory, device=target)
