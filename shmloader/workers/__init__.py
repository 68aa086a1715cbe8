"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. A worker process shares its pipes with the main
process only: one that dies leaves neither a lock taken nor half a message behind. Its death is an event of
its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.
"""

from __future__ import annotations

import torch

from shmloader.settings import THREAD, Settings, check_workers
from shmloader.workers.base import MakeArguments, Worker, Workers
from shmloader.workers.death_messages import log_replacement, worker_timeout
from shmloader.workers.processes import ProcessWorkers
from shmloader.workers.threads import ThreadWorkers

__all__ = ["Worker", "Workers", "log_replacement", "start_workers", "worker_timeout"]


def start_workers(settings: Settings, make_arguments: MakeArguments) -> Workers:
    """Start the workers for a loader's settings, which some frameworks set late.

    Raises `ValueError` if workers of this kind do not support the arguments.
    """
    check_workers(settings, settings.dataset, settings.multiprocessing_context)
    if settings.worker_type == THREAD:
        return ThreadWorkers(make_arguments, settings.num_workers)
    context = settings.multiprocessing_context or torch.multiprocessing
    return ProcessWorkers(context, make_arguments, settings.num_workers)
