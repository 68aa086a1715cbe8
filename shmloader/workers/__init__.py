"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. A worker process shares its pipes with the main
process only: one that dies leaves neither a lock taken nor half a message behind. Its death is an event of
its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.
"""

from __future__ import annotations

import os

import torch

from shmloader.interrupts import HeldInterrupts
from shmloader.settings import THREAD, Settings, check_workers
from shmloader.slots import PlaceTable
from shmloader.torch_private import never_compiled
from shmloader.workers.base import MakeArguments
from shmloader.workers.processes import ProcessWorker, ProcessWorkers
from shmloader.workers.threads import ThreadWorker, ThreadWorkers

__all__ = ["Worker", "Workers", "start_workers", "stop_workers"]

Worker = ProcessWorker | ThreadWorker
Workers = ProcessWorkers | ThreadWorkers


def start_workers(settings: Settings, make_arguments: MakeArguments) -> Workers:
    """Start the workers; settings that these do not support, which some frameworks set late, are errors."""
    check_workers(settings, settings.dataset, settings.multiprocessing_context)
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
