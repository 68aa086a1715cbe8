"""Readers ahead of the program, as programs and frameworks have them, for the tests of `follow()`."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

END = object()


def in_this_thread(loader: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
    """A generator that reads some batches ahead."""
    batches = iter(loader)
    waiting = deque(itertools.islice(batches, ahead))
    for batch in batches:
        waiting.append(batch)
        yield waiting.popleft()
    yield from waiting


class Eager:
    """Begins to read when it is made, and is its own iterator, as apex's ``data_prefetcher`` is."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.batches = iter(loader)
        self.next_batch = next(self.batches, END)

    def __iter__(self) -> Eager:
        return self

    def __next__(self) -> Any:
        if (batch := self.next_batch) is END:
            raise StopIteration
        self.next_batch = next(self.batches, END)
        return batch


class InThread:
    """A thread that reads one epoch into a queue, anew in each ``iter()``."""

    def __init__(self, loader: Iterable[Any], ahead: int = 3) -> None:
        self.loader, self.ahead = loader, ahead

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        read: queue.Queue[Any] = queue.Queue(self.ahead)
        left = threading.Event()
        thread = threading.Thread(target=self._read, args=[read, left], daemon=True)
        thread.start()
        try:
            yield from iter(read.get, END)
        finally:
            left.set()
            thread.join()

    def _read(self, read: queue.Queue[Any], left: threading.Event) -> None:
        for batch in itertools.chain(self.loader, [END]):
            while not left.is_set():
                with contextlib.suppress(queue.Full):
                    read.put(batch, timeout=0.05)
                    break
            else:
                return


class InThreadForGood:
    """One thread reads all epochs into a queue; each ``iter()`` gives the next of them."""

    def __init__(self, loader: Iterable[Any], epochs: int, ahead: int) -> None:
        self.loader, self.epochs = loader, epochs
        self.read: queue.Queue[Any] = queue.Queue(ahead)
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.thread is None:
            self.thread = threading.Thread(target=self._read, daemon=True)
            self.thread.start()
        return iter(self.read.get, END)

    def await_all(self) -> None:
        """Wait until it has read as far as it can."""
        assert self.thread is not None
        while self.thread.is_alive() and not self.read.full():
            time.sleep(0.001)

    def _read(self) -> None:
        for _ in range(self.epochs):
            for batch in self.loader:
                self.read.put(batch)
            self.read.put(END)


def cycled(loader: Iterable[Any], epochs: int) -> Iterator[Any]:
    """All epochs in one pass."""
    for _ in range(epochs):
        yield from loader
