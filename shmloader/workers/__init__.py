"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. A worker process shares its pipes with the main
process only: one that dies leaves neither a lock taken nor half a message behind. Its death is an event of
its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.
"""

from __future__ import annotations

from typing import Any

import torch

from shmloader.settings import THREAD, check_workers
from shmloader.workers.base import MakeArguments, Worker, Workers
from shmloader.workers.death_messages import log_replacement, worker_timeout
from shmloader.workers.processes import ProcessWorkers
from shmloader.workers.threads import ThreadWorkers

__all__ = ["Worker", "Workers", "log_replacement", "start_workers", "worker_timeout"]


def start_workers(loader: Any, make_arguments: MakeArguments) -> Workers:
    """Start the workers for a loader's arguments, which some frameworks set late.

    Raises:
        ValueError: If workers of this kind do not support the arguments.
    """
    check_workers(loader, loader.dataset, loader.multiprocessing_context)
    if loader.worker_type == THREAD:
        return ThreadWorkers(make_arguments, loader.num_workers)
    context = loader.multiprocessing_context or torch.multiprocessing
    return ProcessWorkers(context, make_arguments, loader.num_workers)
