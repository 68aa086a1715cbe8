"""A dataset that runs in a process of its own, joined to the program by a queue."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from shmloader.channel.end import LOOK_S
from shmloader.channel.queue import Queue
from shmloader.errors import LoaderError, PeerDied, QueueClosed
from shmloader.failures.exceptions import capture, restore
from shmloader.messages import ending_of
from shmloader.torch_private import DATAPIPES
from shmloader.worker import parent_watch
from shmloader.worker.random_state import seed_worker_process
from shmloader.workers.launch import explain_no_process

_END_S = 5.0  # how long a process may take to end by itself after its queue was closed

_numbers = itertools.count()


class _End(NamedTuple):
    """Comes after the last item. `close` alone says nothing of a queue that was never put into."""

    failure: bytes  # the exception in place of further items; empty for none


class _Unwanted(BaseException):
    """Nobody wants more items. Not `QueueClosed`, which the dataset may raise for a queue of its own."""


class OwnProcess(IterableDataset[Any]):
    """An iterable-style dataset, or torch's DataPipe, that runs in a process of its own.

    Each ``iter()`` starts the process, which iterates and puts ahead of the program, and ends it. Use it in
    the process that loads (``num_workers=0``), or without a loader: a loader's workers are daemons, and may
    have no processes. An exception arrives as it was raised.

    In the process the global generators are seeded as a worker's, and torch uses one thread. The seed is
    drawn from torch's generator in the program; for a DataPipe that goes on as without this draw, and torch
    seeds and shards the pipe in its graph as if it were not in a process of its own. If the dataset has a
    method ``lazy_init()``, that is called once before the first ``len`` or ``iter``, where that is.

    Args:
        dataset: The dataset. It is sent to the process as to a worker.
        maxsize: Items that may wait.
        multiprocessing_context: A start method or context; None for Python's default.

    Raises:
        PeerDied: From ``next()``, if the process was killed.
        LoaderError: From ``next()``, in a process that may not start others.
    """

    def __new__(cls, dataset: Any = None, *_: Any, **__: Any) -> Any:
        """An `OwnProcess`, which for a DataPipe is a DataPipe too."""
        return super().__new__(OwnPipe if isinstance(dataset, DATAPIPES) else cls)

    def __init__(self, dataset: Any, maxsize: int = 16, *, multiprocessing_context: Any = None) -> None:
        super().__init__()
        self._number = next(_numbers)
        self.dataset = dataset
        self.maxsize = maxsize
        self.multiprocessing_context = multiprocessing_context
        self._is_ready = not hasattr(dataset, "lazy_init")

    def _make_ready(self) -> None:
        if not self._is_ready:
            self.dataset.lazy_init()
            self._is_ready = True

    def __len__(self) -> int:
        self._make_ready()
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        return self._items()

    def is_shardable(self) -> bool:
        """Whether the dataset says that it takes `sharding_settings`."""
        says = getattr(self.dataset, "is_shardable", None)
        return callable(says) and bool(says())

    def sharding_settings(self, total_num_of_shards: int, id_of_shard: int) -> None:
        """Tell the dataset its shard: before its process starts, which gets it so."""
        self.dataset.sharding_settings(total_num_of_shards, id_of_shard)

    def _draw_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_().item())

    def _items(self) -> Iterator[Any]:
        if multiprocessing.current_process().daemon:
            raise LoaderError(
                "OwnProcess cannot start a process in a worker, which is a daemon: use num_workers=0, so "
                "that the dataset's own process is the worker"
            )
        context = self.multiprocessing_context
        if context is None or isinstance(context, str):
            context = multiprocessing.get_context(context)
        items, main_pid = Queue(self.maxsize), os.getpid()
        arguments = (items, self._draw_seed(), main_pid)
        process = context.Process(target=self._run, args=arguments, daemon=True)
        try:
            process.start()
        except OSError as error:
            explain_no_process(error, f"The {type(self.dataset).__name__}")
            raise
        try:
            while type(item := _next(items, process)) is not _End:
                yield item
            if item.failure:
                raise restore(item.failure)
        finally:
            items.close()
            if os.getpid() == main_pid:  # a fork of this process has the iterator too, and no child
                for end in (lambda: None, process.terminate, process.kill):
                    end()
                    process.join(_END_S)
                process.close()

    def _run(self, items: Queue, seed: int, main_pid: int) -> None:
        """Iterate over the dataset; runs in its process."""
        parent_watch.begin(main_pid)
        torch.set_num_threads(1)
        seed_worker_process(seed, 0)
        end = _End(b"")
        try:
            self._make_ready()
            for item in self.dataset:
                _put(items, item)
        except _Unwanted:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the items go
            where = f"Raised in the process (pid {os.getpid()}) of a {type(self.dataset).__name__}"
            end = _End(capture(error, where))
        with contextlib.suppress(_Unwanted):
            _put(items, end)


def _next(items: Queue, process: Any) -> Any:
    """The next item; `PeerDied` also for a process that has ended without one.

    The queue alone cannot tell that in a program with threads: one of them might be the producer.
    """
    lives = True
    while True:
        try:
            return items.get(timeout=LOOK_S if lives else 0.0)
        except queue.Empty:
            if not lives:
                raise PeerDied(
                    f"the process of an OwnProcess (pid {process.pid}) {ending_of(process.exitcode)} before "
                    "its first item. Its own error output says why if it could.",
                    pid=process.pid,
                    exit_code=process.exitcode,
                ) from None
            lives = process.is_alive()


def _put(items: Queue, item: Any) -> None:
    try:
        items.put(item)
    except (PeerDied, QueueClosed) as error:
        raise _Unwanted from error


_Pipe: Any = DATAPIPES[0] if DATAPIPES else IterableDataset


class OwnPipe(OwnProcess, _Pipe):  # type: ignore[misc]
    """An `OwnProcess` of a DataPipe: in torch's graphs, whose seeds and shards reach what it contains."""

    def __iter__(self) -> Iterator[Any]:
        yield from self._items()

    def _draw_seed(self) -> int:
        with torch.random.fork_rng(devices=[]):
            return (super()._draw_seed() + self._number) % (1 << 63)
