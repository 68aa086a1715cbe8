"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. A worker process shares its pipes with the main
process only: one that dies leaves neither a lock taken nor half a message behind. Its death is an event of
its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from typing import Any

import torch

from shmloader.interrupts import HeldInterrupts
from shmloader.resume.passes import Pass
from shmloader.settings import THREAD, check_workers
from shmloader.slots import PlaceTable
from shmloader.torch_private import never_compiled
from shmloader.worker.epoch_settings import EpochCall
from shmloader.worker.fetcher import FetchRules
from shmloader.worker.loop import WorkerArguments
from shmloader.workers.processes import ProcessWorker, ProcessWorkers
from shmloader.workers.threads import ThreadWorker, ThreadWorkers

__all__ = ["Worker", "Workers", "start_workers", "stop_workers"]

Worker = ProcessWorker | ThreadWorker
Workers = ProcessWorkers | ThreadWorkers


def start_workers(
    one_pass: Pass,
    table: PlaceTable,
    dataset: Any,
    most_workers: int,
    calls: list[EpochCall],
    base_seed: int,
) -> Workers:
    """Start the workers; settings that these do not support, which some frameworks set late, are errors.

    Dataset and seed are those of torch's iterator. Each worker is told of ``most_workers``. The list of
    ``calls`` is that of the moment in which a worker starts.
    """
    settings, stream = one_pass.settings, one_pass.stream
    check_workers(settings, settings.multiprocessing_context)
    make_arguments = functools.partial(
        WorkerArguments,
        num_workers=most_workers,
        segment=table.segment,
        dataset=dataset,
        rules=FetchRules.of(settings, None if stream is None else stream.rules),
        base_seed=base_seed,
        calls=calls,
        init_fn=settings.worker_init_fn,
        seeds_samples=settings.seeds_samples,
        places=settings.place_results,
        max_nbytes=settings.worker_max_nbytes,
    )
    if settings.worker_type == THREAD:
        return ThreadWorkers(make_arguments, settings.num_workers)
    context = settings.multiprocessing_context or torch.multiprocessing
    return ProcessWorkers(context, make_arguments, settings.num_workers)


@never_compiled
def stop_workers(owner_pid: int, workers: Workers, table: PlaceTable) -> None:
    """Stop an iterator's workers and free its slots; in a forked child they are left to the parent."""
    if os.getpid() == owner_pid:
        with HeldInterrupts():
            workers.interrupt()  # at the interpreter's end a daemon thread may be waiting for a batch
            workers.close()
            table.close()
    else:
        workers.leave_to_parent()


_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterators that may have workers."""


def stop_with_program(iterator: Any) -> None:
    """Have an iterator that lives at the program's end stop its workers, by its `__del__`."""
    _open.add(iterator)


@atexit.register
def _stop_all() -> None:
    with HeldInterrupts():  # a handler's exception may leave out no iterator
        for iterator in list(_open):
            try:
                iterator.__del__()
            except Exception:  # noqa: BLE001 - of one that cannot be closed
                sys.excepthook(*sys.exc_info())
