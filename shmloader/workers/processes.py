"""Worker processes: one with its two pipes, and all of one iterator. Main process."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import os
import select
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmloader.errors import LoaderClosed, WorkerDied
from shmloader.failures.stacks import StackFile, answers
from shmloader.interrupts import HeldInterrupts
from shmloader.memory import Descriptor
from shmloader.memory.limits import note_end, oom_kills
from shmloader.wire.records import ANSWER_NBYTES, REQUEST_NBYTES, SPIN_NS
from shmloader.worker.links import Pipes
from shmloader.workers.base import MOST_WAIT_S, BaseWorkers, MakeArguments, live
from shmloader.workers.deaths import error_of, explain_kill
from shmloader.workers.launch import (
    begin_fork_server,
    check_descriptors,
    close_own_ends,
    open_pipes,
    sigterm_grace_s,
    start_process,
)
from shmloader.workers.spawn_payload import SpawnPayload

with contextlib.suppress(ImportError):  # Windows has neither
    import fcntl  # here: once the last descriptor is taken, nothing can be imported
    import termios

if TYPE_CHECKING:
    from shmloader.workers.readiness import Readiness

_STOP_S = 5.0  # how long a worker may take to finish its sample after its pipe was closed
_LOOK_S = 0.1  # how often to look for a Ctrl-C meanwhile
_READ_NBYTES = ANSWER_NBYTES * 8
_EXIT_CODE_S = 1.0  # how long a fork server may take to tell the exit code of a process that has ended


class ProcessWorker:
    """One worker process and its two pipes."""

    def __init__(
        self, worker_id: int, process: Any, requests_fd: int, answers_fd: int, *, ends_on_sigterm: bool = True
    ) -> None:
        self.worker_id = worker_id
        self.process = process
        self.pid: int = process.pid
        self.place = f"pid {self.pid}"
        self.requests_fd = requests_fd  # write end of the pipe that brings it requests, non-blocking
        self.answers_fd = answers_fd  # read end of the pipe that takes its answers, non-blocking
        # Becomes readable when the process ends. Not the sentinel where it can be helped: that is a pipe, and
        # a process that the worker forked holds it open after the worker's death.
        try:
            self.death_fd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            self.death_fd = int(process.sentinel)
        self._ends_on_sigterm = ends_on_sigterm
        self.heard = False  # whether a record came from it yet
        self.released = False  # whether it has ended and this side's descriptors are closed
        self._unsent: deque[bytes] = deque()
        self._lost = 0  # requests that came after its end

    def send(self, record: bytes) -> None:
        """Send a packed request, without waiting; if the pipe is full, the next call sends it.

        A dead worker's broken pipe is not an error here: its death is found where batches are waited for.
        """
        if self._unsent:
            self._unsent.append(record)
            self.flush()
            return
        try:
            os.write(self.requests_fd, record)
        except BlockingIOError:
            self._unsent.append(record)
        except BrokenPipeError:
            self._lost += 1

    def flush(self) -> bool:
        """Send what an earlier `send` could not; False if the pipe is still full."""
        try:
            while self._unsent:
                os.write(self.requests_fd, self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._lost += len(self._unsent)
            self._unsent.clear()
        return True

    def receive(self) -> bytes | None:
        """The records that have arrived, b"" for none; None if the worker has closed its end."""
        try:
            records = os.read(self.answers_fd, _READ_NBYTES)
        except BlockingIOError:
            return b""
        if self._unsent:
            self.flush()
        if not records:
            return None
        self.heard = True
        return records

    def has_begun(self, unanswered: int) -> bool:
        """Whether it has taken a task yet: until then all its ``unanswered`` tasks are in the pipe."""
        if self.heard:
            return True
        unread = array("i", [0])
        try:
            fcntl.ioctl(self.requests_fd, termios.FIONREAD, unread)
        except (OSError, ValueError):  # the pipe is closed
            return True
        return unread[0] < (unanswered - len(self._unsent) - self._lost) * REQUEST_NBYTES

    def is_dead(self) -> bool:
        """Whether the process has ended, even if other code has taken its exit code."""
        if self.released or self.process.exitcode is not None:
            return True
        if self.death_fd < 0:
            return False
        poller = select.poll()
        poller.register(self.death_fd, select.POLLIN)
        return bool(poller.poll(0))

    def terminate(self) -> None:
        """End the process at once, by SIGTERM where that does it."""
        end = self.process.terminate if self._ends_on_sigterm else self.process.kill
        end()

    def release(self) -> None:
        """Close this side's descriptors; the process has ended."""
        self.released = True
        self.process.join(_EXIT_CODE_S)
        self.close_descriptors()
        if self.process.exitcode is not None:
            # Not Process.close(): the object must still answer is_alive() and exitcode. Its descriptors are
            # in a private attribute; without that they are closed when the object dies.
            popen = getattr(self.process, "_popen", None)
            getattr(popen, "close", lambda: None)()

    def close_pipes(self) -> None:
        """Close the pipes, which tells the worker to end."""
        # First forgotten: another thread may open a descriptor of the same number.
        fds, self.requests_fd, self.answers_fd = (self.requests_fd, self.answers_fd), -1, -1
        close_own_ends(fds)

    def close_descriptors(self) -> None:
        """Close this side's descriptors; then only the exit code shows whether the process has ended."""
        self.close_pipes()
        fd, self.death_fd = self.death_fd, -1
        if fd >= 0 and fd != self.process.sentinel:
            os.close(fd)


class ProcessWorkers(BaseWorkers):
    """All worker processes of one iterator, started with a ``multiprocessing`` context or module."""

    workers: list[ProcessWorker]  # by their number; empty after `close`
    look_again_ns = SPIN_NS
    _readiness: Readiness | None = None  # once `fileno` was called

    def __init__(self, context: Any, make_arguments: MakeArguments, num_workers: int) -> None:
        self.workers = []
        self.processes = []
        self._context = context
        self._method: str = context.get_start_method()
        self._make_arguments = make_arguments
        self._poller: select.poll | None = None
        self._by_fd: dict[int, ProcessWorker] = {}
        self._added: set[int] = set()  # while others worked: until they are heard they have nothing to finish
        self._wake = Descriptor(-1)  # readable once `interrupt` was called
        self._oom_kills = oom_kills()
        with HeldInterrupts():
            self._stacks = StackFile()
            live.add(self)
        try:
            with HeldInterrupts():
                self._wake = Descriptor(os.eventfd(0))
            with self._payload() as give:
                for worker_id in range(num_workers):
                    with HeldInterrupts():
                        self._put(self._start(worker_id, give))
        except BaseException:
            self.close(grace_s=0.0)
            raise

    @contextlib.contextmanager
    def _payload(self) -> Iterator[MakeArguments]:
        """Give a function that returns what a worker's process is started with."""
        if self._method == "fork":
            yield self._make_arguments
            return
        if self._method == "forkserver":
            begin_fork_server()  # it imports while this process pickles
        with contextlib.closing(SpawnPayload(self._method, self._make_arguments)) as payload:
            self.given_nbytes, self.pickled_nbytes = payload.arrays_nbytes, payload.pickled_nbytes
            yield payload.for_worker

    def _start(self, worker_id: int, give: MakeArguments) -> ProcessWorker:
        grace_s = sigterm_grace_s()
        check_descriptors()
        ends: list[int] = []
        try:
            open_pipes(ends)
            requests_read, requests_write, answers_read, answers_write = ends
            for fd in (requests_write, answers_read):
                os.set_blocking(fd, False)
            pipes = Pipes(Descriptor(requests_read), Descriptor(answers_write), self._stacks.descriptor)
            process = start_process(self._context, worker_id, give(worker_id), pipes, grace_s)
        except BaseException:
            close_own_ends(ends[1:3])
            raise
        finally:
            # The worker's ends: only the worker may hold them, or its death would not close the pipe.
            for fd in ends[:1] + ends[3:]:
                os.close(fd)
        return ProcessWorker(worker_id, process, requests_write, answers_read, ends_on_sigterm=grace_s <= 0)

    def _put(self, worker: ProcessWorker) -> None:
        """Add a worker, or put it in the place of the one with its number."""
        number, self._poller = worker.worker_id, None
        self.workers[number : number + 1] = [worker]
        self.processes[number : number + 1] = [worker.process]

    def add(self) -> ProcessWorker:
        """Start one more, without a task; if that fails, the others are unchanged."""
        with HeldInterrupts():
            with self._payload() as give:
                worker = self._start(len(self.workers), give)
            self._added.add(worker.worker_id)
            self._put(worker)
        return worker

    def restart(self, worker_id: int, *, has_left: bool = False) -> ProcessWorker:
        """Replace one, dead or not, by a new process with new pipes, without a task.

        One that ``has_left`` is ending by itself, and may take as long for that as in `close`. Raises what
        kept the new one from starting, once all are stopped; `LoaderClosed` if another thread has done that.
        """
        with HeldInterrupts() as interrupts:
            old = self.workers[worker_id]
            self._note_ends([old])
            if has_left:
                _wait_for([old], _STOP_S, interrupts)
            if self._readiness is not None:  # before its descriptors' numbers are used again
                self._readiness.follow([worker for worker in self.workers if worker is not old])
            self._end([old])
            self._poller = None
            try:
                with self._payload() as give:
                    fresh = self._start(worker_id, give)
            except BaseException:
                self.close(f"worker {worker_id} could not be replaced", grace_s=0.0)
                raise
            if old not in self.workers:  # closed meanwhile, by another thread, which has not seen the new one
                fresh.close_pipes()
                self._end([fresh])
                raise LoaderClosed("the loader was closed while a worker was being replaced")
            self._added.discard(worker_id)
            self._put(fresh)
        return fresh

    def wait(self, timeout_s: float | None) -> list[ProcessWorker]:
        """Wait for all pipes, all deaths and `interrupt` at once; returns workers that sent or ended."""
        deadline = None if timeout_s is None else time.monotonic() + min(timeout_s, MOST_WAIT_S)
        poller = self._poller or self._register_all()
        if self._readiness is not None:
            self._readiness.news.clear()  # first; nobody else can take what comes during the wait
        while True:
            # A worker may be waiting for a record that its full pipe had no room for.
            full = [worker for worker in self.workers if not worker.flush()]
            for worker in full:
                poller.register(worker.requests_fd, select.POLLOUT)
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            try:
                ready = poller.poll(left_ms)
            finally:
                for worker in full:
                    poller.unregister(worker.requests_fd)
            spoke = list(dict.fromkeys(self._by_fd[fd] for fd, _ in ready if fd in self._by_fd))
            if spoke or not ready or self.interrupted:
                return spoke

    def _register_all(self) -> select.poll:
        poller = select.poll()
        self._by_fd.clear()
        for worker in self.workers:
            for fd in (worker.answers_fd, worker.death_fd):
                self._by_fd[fd] = worker
                poller.register(fd, select.POLLIN)
        poller.register(self._wake.fd, select.POLLIN)
        self._poller = poller  # last: a poller that an interrupt left incomplete would wait for ever
        return poller

    def ready(self) -> list[ProcessWorker]:
        """The workers that have sent something or ended, without a wait."""
        spoke = self.wait(0.0)
        if self._readiness is not None and not spoke:
            self._readiness.follow(self.workers)
        return spoke

    def fileno(self) -> int:
        """A descriptor that is readable once `ready` finds more than it did last, and after `close`."""
        if self._readiness is None:
            from shmloader.workers.readiness import Readiness

            # Another thread may have made one.
            readiness: Readiness = vars(self).setdefault("_readiness", Readiness())
            if self.interrupted or self.closed:
                readiness.set()
            return readiness.fd
        return self._readiness.fd

    def tell(self) -> None:
        """Make `fileno` readable until `ready` or `wait` looks for records."""
        if self._readiness is not None:
            self._readiness.news.ring()

    def interrupt(self) -> None:
        """Make `wait`, in another thread, return at once from now on."""
        self.interrupted = True
        if self._readiness is not None:
            self._readiness.set()
        if self._wake.fd >= 0:
            os.eventfd_write(self._wake.fd, 1)

    def stack_of(self, worker_id: int) -> str:
        """The stacks that a live process writes when it is asked by a signal, or why there are none."""
        return self._stacks.ask(self.workers[worker_id].pid)

    def died(self, worker_id: int, indices: tuple[object, ...], memory: str, why: str = "") -> WorkerDied:
        """The error for a dead process that held these index batches; it may have ``memory`` figures."""
        dead = self.workers[worker_id]
        pids = {"this one": os.getpid()} | {f"worker {one.worker_id}": one.pid for one in self.workers}
        dataset = self._make_arguments(0).dataset
        explain = functools.partial(explain_kill, self._oom_kills, dataset, pids, memory)
        return error_of(dead, indices, why, explain, self._stacks)

    def close(self, because: str = "its workers were stopped", grace_s: float = _STOP_S) -> None:
        """Stop all. Those still alive after ``grace_s`` are terminated, and killed a second later.

        A worker that is still starting has nothing to finish, and is terminated at once.
        """
        self.close_for(because)
        with HeldInterrupts() as interrupts:
            # A worker that is being replaced has been released already.
            workers = [worker for worker in self.workers if not worker.released]
            self.workers = []
            self._poller = None
            live.discard(self)
            self._note_ends(workers)
            forked = self._method == "fork"  # such a worker comes to its first line at once
            if self._readiness is not None:
                self._readiness.follow([])
                self._readiness.set()
            for worker in workers:
                worker.close_pipes()
                if not worker.heard and (
                    worker.worker_id in self._added or not (forked or answers(worker.pid))
                ):
                    worker.terminate()
            _wait_for(workers, grace_s, interrupts)
            self._end(workers)
            self._stacks.close()
            self._wake.close()
            self.closed = True

    def _note_ends(self, workers: list[ProcessWorker]) -> None:
        """Count the processor time of workers that a fork server has started: they are its children."""
        for worker in workers if self._method == "forkserver" else ():
            if not worker.is_dead():
                note_end(worker.pid)

    def _end(self, workers: list[ProcessWorker]) -> None:
        """End those processes that have not ended by themselves, and release all."""
        for order in (ProcessWorker.terminate, lambda worker: worker.process.kill()):
            stuck = [worker for worker in workers if not worker.is_dead()]
            for worker in stuck:
                order(worker)
            deadline = time.monotonic() + 1.0
            for worker in stuck:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.release()

    def leave_to_parent(self) -> None:
        """Close this object's descriptors in a forked child, where they would keep pipes open."""
        for worker in self.workers:
            worker.close_descriptors()
        # At a child's end multiprocessing ends all that it takes for the child's own.
        getattr(multiprocessing.process, "_children", set[Any]()).difference_update(self.processes)
        self.workers, self.processes = [], []
        self._wake.close()
        self.closed = True
        self.closed_because = "its workers belong to the process that this one was forked from"


def _wait_for(workers: list[ProcessWorker], grace_s: float, interrupts: HeldInterrupts) -> None:
    """Wait until processes have ended by themselves; not after a second Ctrl-C: the user will not wait."""
    deadline = time.monotonic() + grace_s
    for worker in workers:
        while not (worker.is_dead() or interrupts.came or time.monotonic() >= deadline):
            worker.process.join(_LOOK_S)
