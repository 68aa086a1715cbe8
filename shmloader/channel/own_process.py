"""A dataset that runs in a process of its own, joined to the program by a queue."""

from __future__ import annotations

import contextlib
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


class _End(NamedTuple):
    """Comes after the last item. `close` alone says nothing of a queue that was never put into."""

    failure: bytes  # the exception in place of further items; empty for none


class _Unwanted(BaseException):
    """Nobody wants more items. Not `QueueClosed`, which the dataset may raise for a queue of its own."""


class OwnProcess(IterableDataset[Any]):
    """An iterable-style dataset that runs in a process of its own.

    Each ``iter()`` starts the process, which iterates and puts ahead of the program, and ends it. Use it in
    the process that loads (``num_workers=0``), or without a loader: a loader's workers are daemons, and may
    have no processes. An exception arrives as it was raised.

    In the process the global generators are seeded as a worker's, by a number that is drawn from torch's
    generator in the program, and torch uses one thread.

    Args:
        dataset: The dataset. It is sent to the process as to a worker.
        maxsize: Items that may wait.
        multiprocessing_context: A start method or context; None for Python's default.

    Raises:
        TypeError: For a DataPipe.
        PeerDied: From ``next()``, if the process was killed.
        LoaderError: From ``next()``, in a process that may not start others.
    """

    def __init__(self, dataset: Any, maxsize: int = 16, *, multiprocessing_context: Any = None) -> None:
        super().__init__()
        if isinstance(dataset, DATAPIPES):
            raise TypeError(
                f"OwnProcess cannot run a DataPipe ({type(dataset).__name__}), whose sharding_filter would "
                "not apply there: iterate over it in an IterableDataset of your own, or give it to the "
                "loader's workers"
            )
        self.dataset = dataset
        self.maxsize = maxsize
        self.multiprocessing_context = multiprocessing_context

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        if multiprocessing.current_process().daemon:
            raise LoaderError(
                "OwnProcess cannot start a process in a worker, which is a daemon: use num_workers=0, so "
                "that the dataset's own process is the worker"
            )
        context = self.multiprocessing_context
        if context is None or isinstance(context, str):
            context = multiprocessing.get_context(context)
        items, main_pid = Queue(self.maxsize), os.getpid()
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        process = context.Process(target=self._run, args=(items, seed, main_pid), daemon=True)
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
