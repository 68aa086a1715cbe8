"""The worker processes of one iterator."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import Any

from shmloader.diagnostics.stacks import StackFile
from shmloader.errors import LoaderClosed, WorkerDied
from shmloader.host.interrupts import HeldInterrupts
from shmloader.host.limits import memory_headroom, oom_kills
from shmloader.shared_memory import Descriptor
from shmloader.supervisor import forks
from shmloader.supervisor.interface import MakeArguments, Worker
from shmloader.supervisor.launch import start_process
from shmloader.supervisor.process import ProcessWorker, describe_exit
from shmloader.supervisor.spawn_payload import Parcel
from shmloader.wire.channel import Pipes
from shmloader.wire.messages import SPIN_NS

_STOP_S = 5.0  # how long a worker may take to finish its sample after its pipe was closed
_LOOK_S = 0.1  # how often to look for a Ctrl-C meanwhile
_DEATH_S = 1.0  # how long to wait for the exit code of a worker whose pipe is closed


class ProcessWorkers:
    """All worker processes of one iterator; a `Workers`.

    Args:
        context: ``multiprocessing`` context (or module) to start processes with.
        make_arguments: See `MakeArguments`.
        num_workers: How many.

    Attributes:
        workers: By their number; empty after `close`.
        closed_because: Why they were stopped.
        look_again_ns: See `Workers`.
        given_nbytes: Likewise.
    """

    look_again_ns = SPIN_NS

    def __init__(self, context: Any, make_arguments: MakeArguments, num_workers: int) -> None:
        self.workers: list[ProcessWorker] = []
        self._dismissed: list[ProcessWorker] = []  # told to end
        self.given_nbytes = 0
        self.closed_because = ""
        self._context = context
        self._make_arguments = make_arguments
        self._poller: select.poll | None = None
        self._by_fd: dict[int, ProcessWorker] = {}
        self._starting: tuple[int, ...] = ()  # main-side ends of the worker that is being started
        self._oom_kills = oom_kills()
        with HeldInterrupts():
            self._stacks = StackFile()
            try:
                self._wake = _Wake()
            except OSError:
                self._stacks.close()
                raise
            forks.begin(self)
        try:
            with Parcel(context, make_arguments) as parcel:
                for worker_id in range(num_workers):
                    with HeldInterrupts():
                        self.workers.append(self._start(worker_id, parcel))
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def __del__(self) -> None:
        # Usually there is nothing left to do, and at the interpreter's end no name of this module either. But
        # a Ctrl-C may have cut `__init__` short, or the iterator's finalizer, which runs only once.
        try:
            if self.workers or self._wake.fd >= 0:
                self.close()
        except AttributeError:
            pass

    def _start(self, worker_id: int, parcel: Parcel | None = None) -> ProcessWorker:
        """Start a worker's process, with what others are given too, or with a parcel of its own."""
        if parcel is None:
            with Parcel(self._context, self._make_arguments) as its_own:
                return self._start(worker_id, its_own)
        self.given_nbytes = parcel.arrays_nbytes
        tasks_read, tasks_write = os.pipe()
        try:
            dones_read, dones_write = os.pipe()
        except OSError:
            os.close(tasks_read)
            os.close(tasks_write)
            raise
        self._starting = (tasks_write, dones_read)
        pipes = Pipes(Descriptor(tasks_read), Descriptor(dones_write), self._stacks.descriptor)
        try:
            process = start_process(self._context, worker_id, parcel.for_worker(worker_id), pipes)
        except BaseException:
            os.close(tasks_write)
            os.close(dones_read)
            raise
        finally:
            self._starting = ()
            # The worker's ends: only the worker may hold them, or its death would not close the pipe.
            os.close(tasks_read)
            os.close(dones_write)
        os.set_blocking(tasks_write, False)
        os.set_blocking(dones_read, False)
        return ProcessWorker(worker_id, process, tasks_write, dones_read)

    def add(self) -> ProcessWorker:
        """Start one more worker; where that fails, the others are as they were.

        Returns:
            The new worker, which has been sent nothing yet.
        """
        with HeldInterrupts():
            worker = self._start(len(self.workers))
            worker.is_spare = True
            self.workers.append(worker)
            self._poller = None
        return worker

    def dismiss(self) -> None:
        """Let the last worker, which has nothing to do, end. It is not waited for before `close`."""
        with HeldInterrupts():
            worker = self.workers.pop()
            self._dismissed.append(worker)
            self._poller = None
            worker.hang_up()

    def restart(self, worker: Worker) -> ProcessWorker:
        """Replace a worker, dead or not, by a new process with new pipes.

        If no process can be started, that is raised and all workers are stopped.

        Returns:
            The new worker, which has been sent nothing yet.
        """
        with HeldInterrupts():
            old = self.workers[worker.worker_id]
            self._end([old])
            self._poller = None
            try:
                fresh = self._start(worker.worker_id)
            except BaseException:
                self.close(f"worker {worker.worker_id} could not be replaced", grace_s=0.0)
                raise
            if old not in self.workers:  # closed meanwhile, by another thread, which has not seen the new one
                fresh.hang_up()
                self._end([fresh])
                raise LoaderClosed("the loader was closed while a worker was being replaced")
            self.workers[worker.worker_id] = fresh
        return fresh

    def wait(self, timeout_s: float | None) -> list[ProcessWorker]:
        """Wait until a worker has sent something or has ended, or until `interrupt` is called.

        Args:
            timeout_s: Most seconds to wait, or None for as long as it takes.

        Returns:
            The workers to receive from; empty after the timeout.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poller = self._poller or self._register_all()
        while True:
            # A worker may be waiting for a record that its full pipe had no room for.
            full = [worker for worker in self.workers if not worker.flush()]
            for worker in full:
                poller.register(worker.tasks_fd, select.POLLOUT)
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            try:
                ready = poller.poll(left_ms)
            finally:
                for worker in full:
                    poller.unregister(worker.tasks_fd)
            spoke = list(dict.fromkeys(self._by_fd[fd] for fd, _ in ready if fd in self._by_fd))
            if spoke or not ready or self._wake.called:
                return spoke

    def _register_all(self) -> select.poll:
        poller = select.poll()
        self._by_fd.clear()
        for worker in self.workers:
            for fd in (worker.dones_fd, worker.death_fd):
                self._by_fd[fd] = worker
                poller.register(fd, select.POLLIN)
        poller.register(self._wake.fd, select.POLLIN)
        self._poller = poller  # last: a poller that an interrupt has left half made would wait for ever
        return poller

    def interrupt(self) -> None:
        """Let `wait`, in another thread, return at once, now and from now on."""
        self._wake.call()

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called."""
        return self._wake.called

    @property
    def processes(self) -> list[Any]:
        """See `Workers`."""
        return [worker.process for worker in self.workers]

    def stack_of(self, worker: Worker) -> str:
        """What a live worker is doing: the Python stacks of its threads, or why they could not be had."""
        return self._stacks.ask(worker.pid)

    def died(self, worker: Worker, indices: tuple[object, ...], memory: str, why: str = "") -> WorkerDied:
        """See `Workers`; with its exit code."""
        dead = self.workers[worker.worker_id]
        dead.process.join(_DEATH_S)
        code = dead.process.exitcode
        held = f"It held {len(indices)} index batch(es): {_shorten(indices)}." if indices else ""
        when = "" if dead.heard else " before it made its first batch"
        hint = "" if dead.heard or code == -signal.SIGKILL else _SEE_OUTPUT
        if code == -signal.SIGKILL:
            hint = self._explain_kill(memory)
        parts = (
            f"shmloader worker {worker.worker_id} ({worker.place}) {describe_exit(code)}{when}.",
            why,
            held,
            hint,
        )
        return WorkerDied(
            " ".join(part for part in parts if part),
            worker_id=worker.worker_id,
            pid=worker.pid,
            exit_code=code,
            indices=indices,
        )

    def _explain_kill(self, memory: str) -> str:
        now = oom_kills()
        if now is None or self._oom_kills is None or now <= self._oom_kills:
            return ""
        room = memory_headroom()
        return (
            f"The kernel's out-of-memory killer has ended {now - self._oom_kills} process(es) since the "
            f"workers were started, so this looks like its work: {room.available_nbytes:,} of "
            f"{room.limit_nbytes:,} bytes are available in {room.source}. {memory} Use fewer workers, a "
            "smaller batch_size or prefetch_factor, or less memory per sample in the dataset."
        )

    def close(self, because: str = "its workers were stopped", grace_s: float = _STOP_S) -> None:
        """Stop all workers and close all descriptors. Only the first call does anything.

        Args:
            because: The reason, kept in ``closed_because``.
            grace_s: Seconds that workers may take to finish the sample at hand before they are terminated,
                and a second later killed.
        """
        self.closed_because = self.closed_because or because
        with HeldInterrupts() as interrupts:
            # One that is being replaced has been released already.
            workers = [worker for worker in self.workers + self._dismissed if not worker.released]
            self.workers, self._dismissed = [], []
            self._poller = None
            forks.end(self)
            for worker in workers:
                worker.hang_up()
                if worker.is_spare and not worker.heard:
                    worker.process.terminate()  # it is still starting, which nobody has waited for
            deadline = time.monotonic() + grace_s
            for worker in workers:
                # A second Ctrl-C means that the user will not wait.
                while not worker.is_dead() and not interrupts.came:
                    if time.monotonic() >= deadline:
                        break
                    worker.process.join(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            self._end(workers)
            self._stacks.close()
            self._wake.close()

    def _end(self, workers: list[ProcessWorker]) -> None:
        """End what has not ended by itself, and close what is left of it."""
        for order in ("terminate", "kill"):
            stuck = [worker for worker in workers if not worker.is_dead()]
            for worker in stuck:
                getattr(worker.process, order)()
            deadline = time.monotonic() + 1.0
            for worker in stuck:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.release()

    def leave_to_parent(self) -> None:
        """Close this object's descriptors in a forked child, where they would keep pipes open."""
        for worker in self.workers:
            worker.close_descriptors()
        for fd in self._starting:
            os.close(fd)
        self.workers, self._dismissed, self._starting = [], [], ()
        self._wake.close()
        self.closed_because = "its workers belong to the process that this one was forked from"


_SEE_OUTPUT = "Its own error output, above, says why if it could."


class _Wake:
    """Something to poll that becomes readable, and stays so, when it is called from another thread."""

    def __init__(self) -> None:
        self.called = False
        self.fd, self._write_fd = _wake_pipe()

    def call(self) -> None:
        self.called = True
        if self._write_fd >= 0:
            os.write(self._write_fd, (1).to_bytes(8, "little"))

    def close(self) -> None:
        for fd in {self.fd, self._write_fd} - {-1}:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fd = self._write_fd = -1


def _wake_pipe() -> tuple[int, int]:
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0)
        return fd, fd
    return os.pipe()


def _shorten(indices: tuple[object, ...], most: int = 300) -> str:
    text = ", ".join(map(repr, indices))
    return text if len(text) <= most else f"{text[: most - 3]}..."
