"""The start of one worker process, and its first line."""

from __future__ import annotations

import gc
import os
import signal
import threading
from multiprocessing import resource_tracker
from typing import Any

from shmloader.errors import WorkerDied
from shmloader.failures.stacks import answer_with_stacks, report_start_error
from shmloader.worker import parent_watch
from shmloader.worker.process import Pipes, run_in_process
from shmloader.workers.spawn_payload import take_arguments

_DESCRIPTORS = 6  # pairs: the worker's two pipes, and those that starting a process needs for a moment


def start_process(context: Any, worker_id: int, given: Any, pipes: Pipes) -> Any:
    """Start a worker's process with the result of `SpawnPayload.for_worker` and its ends of its pipes.

    Raises `WorkerDied` if it ended during its start.
    """
    method = context.get_start_method()
    by_leader = threading.get_native_id() == os.getpid()
    process = context.Process(target=_worker, args=(given, pipes, os.getpid(), by_leader), daemon=True)
    # A terminal sends SIGINT to the worker too, which inherits this mask until it has a handler.
    blocked = set() if method == "forkserver" else {signal.SIGINT}
    try:
        if method == "spawn":
            resource_tracker.ensure_running()  # as start() does, which unblocks SIGINT
        mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
    except (ConnectionError, EOFError) as error:
        raise WorkerDied(
            f"shmloader worker {worker_id} ended while it was being started (start method "
            f"{method!r}), before it had read its dataset and settings: {error!r}. Its own error "
            "output, above, says why if it could; a SIGKILL leaves none (is memory short?).",
            worker_id=worker_id,
        ) from error
    return process


def _worker(given: Any, pipes: Pipes, main_pid: int, by_leader: bool) -> None:
    """Run a worker process: set up its protection, import the dataset's modules, then enter its loop."""
    gc.freeze()  # and once more below: a collection would visit, and so copy, all that a fork shares
    parent_watch.begin(main_pid, by_leader)
    answer_with_stacks(pipes.stacks)
    try:
        arguments = take_arguments(given)
    except BaseException:  # noqa: BLE001 - whatever the modules and classes of the program raise
        report_start_error(pipes.stacks)
        raise SystemExit(1) from None
    run_in_process(arguments, pipes)


def check_descriptors() -> None:
    """Fail early if there are too few descriptors to start a worker: multiprocessing would leak some."""
    spare: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            spare.extend(os.pipe())
    except OSError as error:
        error.add_note(
            "A worker takes 5 descriptors of the main process, and up to 13 while it is being started: raise "
            "the limit (ulimit -n)."
        )
        raise
    finally:
        for fd in spare:
            os.close(fd)
