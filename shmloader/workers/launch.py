"""The start of worker processes: the fork server, the pipes, one process, and its first line."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch

from shmloader.codec.slot_allocator import set_current_allocator
from shmloader.errors import WorkerDied
from shmloader.failures.stacks import answer_with_stacks, report_error
from shmloader.worker import parent_watch
from shmloader.worker.heap import warm_heap
from shmloader.worker.links import Pipes, ProcessLink
from shmloader.worker.loop import Loop
from shmloader.worker.random_state import seed_worker_process
from shmloader.workers.base import name_worker
from shmloader.workers.spawn_payload import take_arguments

WORKER_FDS = 5
"""Descriptors of the main process for each worker process."""

START_FDS = {"fork": 12, "spawn": 13, "forkserver": 13}
"""Those that must be free for a worker's start, by start method; it keeps `WORKER_FDS` of them."""

_NO_PROCESS = {
    errno.EAGAIN: "there are as many processes and threads as there may be. Raise the limit (ulimit -u; a "
    "container's: pids.max of its cgroup, docker run --pids-limit)",
    errno.ENOMEM: "the kernel lacks the memory for another one. Free some, or let it promise more than it "
    "has (sysctl vm.overcommit_memory=1)",
}
"""Reasons for which the system starts no process, and their cures."""

_PRELOADED = ["torch", "shmloader"]
_GRACE, _GRACE_S = "SHMLOADER_SIGTERM_GRACE_S", 120.0
_DEFAULT = ["__main__"]  # multiprocessing's, which imports the program's script and with it its modules


def begin_fork_server() -> None:
    """Start the fork server, unless it runs already. Returns at once, while the server imports.

    A module that the server has imported stays the same in all later workers of the program, even if its file
    was edited since. So it imports torch, shmloader and the modules that the program chose, and no module of
    a dataset. In a program with a store it also imports the modules of stores, and so pyarrow, which each
    worker would import otherwise. A server that the program has started before is left as it is, and one that
    is to import nothing (``multiprocessing.set_forkserver_preload([])``) imports nothing.
    """
    server = getattr(forkserver.set_forkserver_preload, "__self__", None)
    chosen = list(getattr(server, "_preload_modules", []))  # has no getter; this Python may have it elsewhere
    if not chosen:
        return
    stores = [name for name in sys.modules if name.startswith("shmloader.store.")]
    forkserver.set_forkserver_preload([*(chosen if chosen != _DEFAULT else []), *_PRELOADED, *stores])
    try:
        forkserver.ensure_running()
    finally:
        forkserver.set_forkserver_preload(chosen)


def sigterm_grace_s() -> float:
    """Seconds for which workers that are started now go on after SIGTERM; called in the main process.

    0 unless this process handles SIGTERM: a process group gets the signal as a whole (from Slurm, say), and a
    program with a handler needs its workers until it has saved its state.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        return 0.0
    text = os.environ.get(_GRACE, "")
    try:
        return float(text or _GRACE_S)
    except ValueError:
        raise ValueError(f"{_GRACE} must be a number of seconds, not {text!r}") from None


def start_process(context: Any, worker_id: int, given: Any, pipes: Pipes, grace_s: float) -> Any:
    """Start a process with what a worker is given; `WorkerDied` if it ends at its start."""
    method = context.get_start_method()
    by_leader = threading.get_native_id() == os.getpid()
    arguments = given, pipes, os.getpid(), by_leader, grace_s
    process = context.Process(target=_worker, args=arguments, daemon=True)
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
    except OSError as error:
        explain_no_process(error, f"Worker {worker_id}", " Or use fewer workers.")
        raise
    return process


def explain_no_process(error: OSError, who: str, or_else: str = "") -> None:
    """Note on the error of a process that could not be started which limit it was, if it was one."""
    if error.errno in _NO_PROCESS:
        error.add_note(f"{who} has no process: {_NO_PROCESS[error.errno]}.{or_else}")


def _worker(given: Any, pipes: Pipes, main_pid: int, by_leader: bool, grace_s: float) -> None:
    """Run a worker process: set up its protection, import the dataset's modules, then enter its loop."""
    gc.freeze()  # and once more below: a collection would visit, and so copy, all that a fork shares
    name_worker(given.worker_id)  # also while it imports
    try:
        parent_watch.begin(main_pid, by_leader, grace_s)
        answer_with_stacks(pipes.stacks)
        arguments = take_arguments(given)
    except BaseException:  # noqa: BLE001 - the system, or what modules and classes of the program raise
        report_error(pipes.stacks)
        raise SystemExit(1) from None
    gc.freeze()
    name_worker(arguments.worker_id, arguments.dataset)
    set_current_allocator(None)  # of a worker thread that forked this process
    torch.set_num_threads(1)
    seed_worker_process(arguments.base_seed, arguments.worker_id)
    _refuse_ray()
    pid = os.getpid()
    try:
        Loop(arguments, ProcessLink(pipes), warm_heap(arguments.num_workers)).run()
    except Exception:
        if os.getpid() == pid:  # not a process that the dataset has forked
            report_error(pipes.stacks)
        raise


def _refuse_ray() -> None:
    """Make calls of Ray errors, which would wait for ever: a fork has its connection without its threads."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "Ray was asked for data in a forked worker process, where it would wait for ever: its threads "
            "are in the process that made the loader. Pass worker_type='thread' or num_workers=0 for a "
            "dataset that calls ray.get(), ray.wait() or ray.put()."
        )

    vars(ray).update(dict.fromkeys(("get", "wait", "put"), refuse))


def check_descriptors() -> None:
    """Fail early if there are too few descriptors to start a worker: multiprocessing would leak some."""
    spare, most = list[int](), max(START_FDS.values())
    try:
        for _ in range(most // 2):
            spare.extend(os.pipe())
    except OSError as error:
        limit = "sysctl fs.file-max" if error.errno == errno.ENFILE else "ulimit -n"
        error.add_note(
            f"A worker takes {WORKER_FDS} descriptors of the main process, and up to {most} "
            f"while it is being started: raise the limit ({limit})."
        )
        raise
    finally:
        for fd in spare:
            os.close(fd)


# This process's ends of the pipes to all worker processes. While a child held one, that worker would not see
# this process close the pipe. So no thread forks between what is done to an end and its note here.
_own_ends: set[int] = set()
_forks_wait = threading.RLock()


def open_pipes(ends: list[int]) -> None:
    """Open the pipe of requests to a worker, then that of its answers, each with the read end first.

    ``ends`` gets them as they come: the second and the third are this process's.
    """
    with _forks_wait:
        for own in (1, 2):
            ends += os.pipe()
            _own_ends.add(ends[own])


def close_own_ends(fds: Iterable[int]) -> None:
    """Close this process's ends of such pipes; -1 stands for one that is closed."""
    with _forks_wait:
        for fd in fds:
            if fd >= 0:
                _own_ends.discard(fd)
                os.close(fd)


def _leave_ends_to_parent() -> None:
    try:
        close_own_ends([*_own_ends])  # of workers that are being started or closed: others are closed already
    finally:
        _forks_wait.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_forks_wait.acquire,
        after_in_parent=_forks_wait.release,
        after_in_child=_leave_ends_to_parent,
    )
