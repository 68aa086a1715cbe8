"""The worker processes of one iterator, as the main process sees them: start, talk, watch, stop.

Each worker has a pipe each way that only the two of them hold, so a worker that dies can leave neither a
lock taken nor half a message behind. Its death is an event of its own (a pidfd, elsewhere the process
sentinel), waited for together with the pipes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from shmloader.errors import WorkerDied, WorkerStartError
from shmloader.messages import DONE_NBYTES
from shmloader.segment import Descriptor
from shmloader.worker import WorkerArguments, run

_READ_NBYTES = DONE_NBYTES * 8
_STOP_S = 5.0  # how long a worker may take to finish its sample after its pipe was closed

# Whose main-side pipe ends a forked child of this process must not keep open.
_live: weakref.WeakSet[Workers] = weakref.WeakSet()


class Worker:
    """One worker process and its two pipes.

    Attributes:
        worker_id: 0 to ``num_workers - 1``.
        process: The ``multiprocessing`` process object.
        pid: Its process id.
        tasks_fd: Write end of the task pipe, non-blocking.
        dones_fd: Read end of the done pipe, non-blocking.
        death_fd: Becomes readable when the process ends.
        heard: Whether a record came from it yet.
    """

    def __init__(self, worker_id: int, process: Any, tasks_fd: int, dones_fd: int) -> None:
        self.worker_id = worker_id
        self.process = process
        self.pid: int = process.pid
        self.tasks_fd = tasks_fd
        self.dones_fd = dones_fd
        self.death_fd = _open_death_fd(process)
        self.heard = False
        self._unsent: deque[bytes] = deque()

    def send(self, record: bytes) -> None:
        """Send a packed `Task`; one that the pipe has no room for now is sent with the next call.

        A dead worker's broken pipe is not an error here: its death is found where batches are waited for.
        """
        if self._unsent:
            self._unsent.append(record)
            self.flush()
            return
        try:
            os.write(self.tasks_fd, record)
        except BlockingIOError:
            self._unsent.append(record)
        except BrokenPipeError:
            pass

    def flush(self) -> bool:
        """Send what an earlier `send` could not; False if the pipe is still full."""
        try:
            while self._unsent:
                os.write(self.tasks_fd, self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._unsent.clear()
        return True

    def receive(self) -> bytes | None:
        """Records that have arrived: none of them as b"", or None if the worker closed its end."""
        try:
            records = os.read(self.dones_fd, _READ_NBYTES)
        except BlockingIOError:
            return b""
        if self._unsent:
            self.flush()
        if not records:
            return None
        self.heard = True
        return records

    def close_descriptors(self) -> None:
        """Close this side's descriptors; the worker takes it as the order to end."""
        for fd in (self.tasks_fd, self.dones_fd):
            if fd >= 0:
                os.close(fd)
        if self.death_fd >= 0 and self.death_fd != getattr(self.process, "sentinel", -1):
            os.close(self.death_fd)
        self.tasks_fd = self.dones_fd = self.death_fd = -1


def _open_death_fd(process: Any) -> int:
    # Not the sentinel where it can be helped: it is a pipe, and a process that the worker forked holds
    # it open after the worker's death.
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return int(process.sentinel)


class Workers:
    """All worker processes of one iterator.

    Args:
        context: ``multiprocessing`` context (or module) to start processes with.
        make_arguments: Makes the arguments of worker ``i`` from its two pipe ends.
        num_workers: How many.
    """

    def __init__(
        self,
        context: Any,
        make_arguments: Callable[[int, Descriptor, Descriptor], WorkerArguments],
        num_workers: int,
    ) -> None:
        self.workers: list[Worker] = []
        self.closed_because = ""
        self._poller: select.poll | None = None
        self._by_fd: dict[int, Worker] = {}
        self._starting: tuple[int, ...] = ()  # main-side ends of the worker that is being started
        _close_in_forked_children()
        _live.add(self)
        try:
            for worker_id in range(num_workers):
                self._start(context, make_arguments, worker_id)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        context: Any,
        make_arguments: Callable[[int, Descriptor, Descriptor], WorkerArguments],
        worker_id: int,
    ) -> None:
        tasks_read, tasks_write = os.pipe()
        dones_read, dones_write = os.pipe()
        self._starting = (tasks_write, dones_read)
        try:
            arguments = make_arguments(worker_id, Descriptor(tasks_read), Descriptor(dones_write))
            process = context.Process(target=run, args=(arguments,), daemon=True)
            process.start()
        except BaseException as error:
            self._starting = ()
            os.close(tasks_write)
            os.close(dones_read)
            _explain_start_failure(error, context)
            raise
        finally:
            # The worker's ends: only the worker may hold them, or its death would not close the pipe.
            os.close(tasks_read)
            os.close(dones_write)
        os.set_blocking(tasks_write, False)
        os.set_blocking(dones_read, False)
        self._starting = ()
        self.workers.append(Worker(worker_id, process, tasks_write, dones_read))

    def wait(self, timeout_s: float | None) -> list[Worker]:
        """Wait until a worker has sent something or has ended.

        Args:
            timeout_s: Most seconds to wait, or None for as long as it takes.

        Returns:
            The workers to `receive` from; empty after the timeout.

        Raises:
            WorkerDied: See `died`; raised by the caller, which knows the indices.
        """
        if self._poller is None:
            self._poller = select.poll()
            for worker in self.workers:
                for fd in (worker.dones_fd, worker.death_fd):
                    self._by_fd[fd] = worker
                    self._poller.register(fd, select.POLLIN)
        timeout_ms = None if timeout_s is None else max(0.0, timeout_s) * 1000
        while True:
            # A worker may be waiting for a record that its full pipe had no room for.
            full = [worker for worker in self.workers if not worker.flush()]
            for worker in full:
                self._poller.register(worker.tasks_fd, select.POLLOUT)
            ready = self._poller.poll(timeout_ms)
            for worker in full:
                self._poller.unregister(worker.tasks_fd)
            spoke = list(dict.fromkeys(self._by_fd[fd] for fd, _ in ready if fd in self._by_fd))
            if spoke or not ready:
                return spoke

    def is_dead(self, worker: Worker) -> bool:
        """Whether a worker's process has ended."""
        poller = select.poll()
        poller.register(worker.death_fd, select.POLLIN)
        return bool(poller.poll(0))

    def died(self, worker: Worker, indices: tuple[object, ...]) -> WorkerDied:
        """The error for a dead worker, with its exit code."""
        worker.process.join(1.0)
        code = worker.process.exitcode
        how = _describe_exit(code)
        held = f"It held {len(indices)} index batch(es): {_shorten(indices)}." if indices else ""
        when = "" if worker.heard else " before it made its first batch"
        hint = "" if worker.heard else " Its own error output, above, says why if it could."
        return WorkerDied(
            f"shmloader worker {worker.worker_id} (pid {worker.pid}) {how}{when}. {held}{hint}".rstrip(),
            worker_id=worker.worker_id,
            pid=worker.pid,
            exit_code=code,
            indices=indices,
        )

    def close(self, because: str = "its workers were stopped") -> None:
        """Stop all workers and close all descriptors. Only the first call does anything.

        A worker finishes the sample at hand; one that takes longer than ``_STOP_S`` is terminated, then
        killed.

        Args:
            because: The reason, kept in ``closed_because``.
        """
        self.closed_because = self.closed_because or because
        workers, self.workers = self.workers, []
        self._poller = None
        _live.discard(self)
        for worker in workers:
            worker.close_descriptors()
        deadline = time.monotonic() + _STOP_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for end in ("terminate", "kill"):
            stuck = [worker for worker in workers if worker.process.exitcode is None]
            for worker in stuck:
                getattr(worker.process, end)()
            for worker in stuck:
                worker.process.join(1.0)
        for worker in workers:
            with contextlib.suppress(ValueError):
                worker.process.close()

    def drop_descriptors(self) -> None:
        """Close this object's descriptors in a forked child, where they would keep pipes open."""
        for worker in self.workers:
            worker.close_descriptors()
        for fd in self._starting:
            os.close(fd)
        self.workers, self._starting = [], ()
        self.closed_because = "its workers belong to the process that this one was forked from"


@functools.cache
def _close_in_forked_children() -> None:
    """From the first start on, forked children of this process drop main-side descriptors.

    A child, of ours or of the user's program, that kept the write end of a task pipe would keep that
    worker from seeing the main process close it.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    for workers in list(_live):
        workers.drop_descriptors()
    _live.clear()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}"


def _explain_start_failure(error: BaseException, context: Any) -> None:
    method = context.get_start_method()
    error.add_note(
        f"A shmloader worker could not be started with start method {method!r}, which pickles the dataset, "
        "collate_fn and worker_init_fn. Use classes and functions defined at the top of a module (no "
        "lambdas), or multiprocessing_context='fork'."
    )


def check_importable(context: Any, objects: dict[str, object]) -> None:
    """Refuse objects that a spawned worker cannot import, before a process is started for nothing.

    Args:
        context: ``multiprocessing`` context or module.
        objects: What workers are given, by argument name.

    Raises:
        WorkerStartError: If the start method is not fork and a class or function is defined in an
            interactive ``__main__`` (a notebook, the REPL, ``python -c``).
    """
    main = sys.modules.get("__main__")
    if context.get_start_method() == "fork" or main is None:
        return
    if getattr(main, "__spec__", None) is not None or hasattr(main, "__file__"):
        return
    for argument, value in objects.items():
        name = _defined_in_main(value, depth=4)
        if name is not None:
            raise WorkerStartError(
                f"{argument} uses {name!r}, which is defined in an interactive session (__main__): worker "
                f"processes started with {context.get_start_method()!r} cannot import it. Put it in a "
                "module file and import it from there, or pass multiprocessing_context='fork'."
            )


def _defined_in_main(value: object, depth: int) -> str | None:
    """Name of the first class or function of ``__main__`` that pickling ``value`` would refer to."""
    if value is None or depth == 0:
        return None
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    if getattr(named, "__module__", None) == "__main__":
        return str(getattr(named, "__qualname__", named))
    inner = list(getattr(value, "__dict__", {}).values()) if named is not value else []
    if isinstance(value, list | tuple):
        inner = list(value[:8])
    for item in inner:
        found = _defined_in_main(item, depth - 1)
        if found is not None:
            return found
    return None


def _shorten(indices: tuple[object, ...], most: int = 300) -> str:
    text = ", ".join(map(repr, indices))
    return text if len(text) <= most else f"{text[: most - 3]}..."
