"""The choice between worker processes and worker threads."""

from __future__ import annotations

from typing import Any

import torch

from shmloader.arguments import THREAD, check_worker_type
from shmloader.supervisor.base import MakeArguments, Workers
from shmloader.supervisor.processes import ProcessWorkers
from shmloader.supervisor.threads import ThreadWorkers


def start_workers(loader: Any, make_arguments: MakeArguments) -> Workers:
    """Start the workers that a loader's arguments ask for.

    Args:
        loader: The loader. Its arguments are looked at again: some frameworks set them late.
        make_arguments: See `MakeArguments`.

    Raises:
        ValueError: If worker threads cannot do what the arguments ask for.
        WorkerStartError: If spawned workers could not import what they are given.
        WorkerDied: If one ended at once.
    """
    if loader.worker_type == THREAD:
        check_worker_type(loader, loader.dataset, loader.multiprocessing_context)
        return ThreadWorkers(make_arguments, loader.num_workers)
    context = loader.multiprocessing_context or torch.multiprocessing
    return ProcessWorkers(context, make_arguments, loader.num_workers)
