"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. A worker process has a pipe each way, which it
shares with the main process only. So one that dies leaves neither a lock taken nor half a message behind. Its
death is an event of its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.

* `shmloader.supervisor.base`: the interface of both kinds; workers in a process that the program forks
* `shmloader.supervisor.processes`: all worker processes of one iterator
* `shmloader.supervisor.worker_process`: one worker process and its pipes
* `shmloader.supervisor.launch`: the start of a worker process, and its first line
* `shmloader.supervisor.spawn_payload`: arguments of workers that start together, pickled once
* `shmloader.supervisor.fork_server`, `fork_server_ready`: the fork server, and its last import
* `shmloader.supervisor.death_reports`: messages about workers that died or do not answer
* `shmloader.supervisor.threads`: all worker threads of one iterator, and their queues
"""

from __future__ import annotations

from typing import Any

import torch

from shmloader.arguments import THREAD, check_context, check_worker_type
from shmloader.supervisor.base import MakeArguments, Worker, Workers
from shmloader.supervisor.death_reports import log_replacement, worker_timeout
from shmloader.supervisor.processes import ProcessWorkers
from shmloader.supervisor.threads import ThreadWorkers

__all__ = [
    "Worker",
    "Workers",
    "log_replacement",
    "start_workers",
    "worker_timeout",
]


def start_workers(loader: Any, make_arguments: MakeArguments) -> Workers:
    """Start the workers that a loader's arguments ask for.

    Args:
        loader: The loader. Its arguments are checked again: some frameworks set them late.
        make_arguments: See `MakeArguments`.

    Raises:
        ValueError: If worker threads cannot do what the arguments ask for.
        WorkerStartError: If spawned workers could not import what they are given.
        WorkerDied: If one ended at once.
    """
    if loader.worker_type == THREAD:
        check_worker_type(loader, loader.dataset, loader.multiprocessing_context)
        return ThreadWorkers(make_arguments, loader.num_workers)
    check_context(loader.multiprocessing_context)
    context = loader.multiprocessing_context or torch.multiprocessing
    return ProcessWorkers(context, make_arguments, loader.num_workers)
