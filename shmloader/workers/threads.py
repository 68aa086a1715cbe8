"""Worker threads: the same loop, slots and records as worker processes, without a process and its pipes.

A thread cannot be ended from outside. It is told that its batches are no longer wanted, and ends after its
present sample. Until then it writes to memory that it maps itself, by a descriptor of its own.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import math
import os
import select
import sys
import threading
import time
import traceback
import weakref
from typing import Any

from torch.utils.data import Dataset

from shmloader.errors import WorkerDied
from shmloader.failures.exceptions import add_note, forget_frames
from shmloader.interrupts import HeldInterrupts
from shmloader.messages import shown
from shmloader.torch_private import use_one_core_in_this_thread
from shmloader.worker.epoch_settings import datasets_in
from shmloader.worker.links import ThreadLink, Wakeup
from shmloader.worker.loop import Loop, WorkerArguments
from shmloader.workers.base import MOST_WAIT_S, BaseWorkers, MakeArguments, describe_held, live, name_worker

_CLOSE_S = 0.5  # how long `close` waits for threads to end
_LEAST_CLOSE_S = 0.1  # also if there is nothing to wait for: threads without a task end at once
_EXIT_S = 2.0  # how long the end of the program waits for them
_MOST_CHARACTERS = 8000  # of a thread's stack

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class ThreadWorker:
    """One worker thread, which runs in this process, and its two queues."""

    def __init__(self, worker_id: int, arguments: WorkerArguments, wakeup: Wakeup) -> None:
        self.worker_id = worker_id
        self.link = ThreadLink(wakeup)
        name = f"shmloader-worker-{worker_id}"
        self.thread = threading.Thread(target=_run, args=(arguments, self.link), name=name, daemon=True)
        self.pid = os.getpid()
        self.place = f"thread {name!r}"
        _started.add(self.thread)
        self.thread.start()

    def send(self, record: bytes) -> None:
        """Put a packed request into the thread's queue."""
        self.link.requests.put(record)

    def receive(self) -> bytes:
        """The records in the queue of answers, b"" for none."""
        answers = self.link.answers
        return b"".join([answers.popleft() for _ in range(len(answers))])

    def has_begun(self, unanswered: int) -> bool:
        """Say yes: a thread is not replaced, so nothing depends on it."""
        return True

    def is_dead(self) -> bool:
        """Whether the thread has ended and its answers are taken."""
        return self.link.ended and not self.link.answers


class ThreadWorkers(BaseWorkers):
    """All worker threads of one iterator.

    It has no ``processes``: frameworks end those, and a thread cannot be ended. It never looks again before
    it waits, since that would hold the interpreter lock that the workers need.
    """

    workers: list[ThreadWorker]

    def __init__(self, make_arguments: MakeArguments, num_workers: int) -> None:
        self.workers = []
        self.processes = []
        self._make_arguments = make_arguments
        self._wakeup, self._poller = Wakeup(), select.poll()
        self._poller.register(self._wakeup.fd, select.POLLIN)
        live.add(self)
        try:
            for worker_id in range(num_workers):
                with HeldInterrupts():
                    self._start(worker_id)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _start(self, worker_id: int) -> ThreadWorker:
        arguments = self._make_arguments(worker_id)
        segment, dataset = arguments.segment.duplicate(), _copy_dataset(arguments.dataset)
        own = dataclasses.replace(arguments, segment=segment, dataset=dataset)
        worker = ThreadWorker(worker_id, own, self._wakeup)
        self.workers.append(worker)
        return worker

    def add(self) -> ThreadWorker:
        """Start one more, without a task."""
        with HeldInterrupts():
            return self._start(len(self.workers))

    def renew_datasets(self) -> None:
        """Copy the dataset for each thread."""
        for worker in self.workers:
            worker.link.renew(_copy_dataset(self._make_arguments(worker.worker_id).dataset))

    def restart(self, worker_id: int, *, has_left: bool = False) -> ThreadWorker:
        """Refuse: a thread cannot be replaced, and ``worker_restarts`` is not possible with threads."""
        raise NotImplementedError(f"worker thread {worker_id} cannot be replaced")

    def wait(self, timeout_s: float | None) -> list[ThreadWorker]:
        """Wait for the one descriptor by which all threads wake this one."""
        deadline = None if timeout_s is None else time.monotonic() + min(timeout_s, MOST_WAIT_S)
        while True:
            if not self.interrupted:
                self._wakeup.clear()
            spoke = [worker for worker in self.workers if worker.link.answers or worker.link.ended]
            if spoke or self.interrupted:
                return spoke
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poller.poll(left_s and math.ceil(left_s * 1000)):
                return []

    def ready(self) -> list[ThreadWorker]:
        """The workers that have sent something or ended, without a wait."""
        self._wakeup.clear()
        return [worker for worker in self.workers if worker.link.answers or worker.link.ended]

    def fileno(self) -> int:
        """A descriptor that is readable once `ready` finds more than it did last, and after `close`."""
        return self._wakeup.fd

    def tell(self) -> None:
        """Make `fileno` readable until `ready` or `wait` looks for records."""
        self._wakeup.ring()

    def interrupt(self) -> None:
        """Wake `wait`, for good."""
        self.interrupted = True
        self._wakeup.ring()

    def stack_of(self, worker_id: int) -> str:
        """The stack of the thread."""
        thread = self.workers[worker_id].thread
        frame = sys._current_frames().get(thread.ident or -1)  # noqa: SLF001 - documented
        if frame is None:
            return "(it has ended)"
        return "".join(traceback.format_stack(frame)).rstrip()[-_MOST_CHARACTERS:]

    def died(self, worker_id: int, indices: tuple[object, ...], memory: str, why: str = "") -> WorkerDied:
        """The error for a thread that has ended, from the exception that ended it."""
        dead = self.workers[worker_id]
        cause = dead.link.error
        error = WorkerDied(
            f"shmloader worker {worker_id} ({dead.place}) ended: {shown(cause)}." + describe_held(indices),
            worker_id=worker_id,
            pid=dead.pid,
            indices=indices,
        )
        error.__cause__ = cause
        return error

    def close(self, because: str = "its workers were stopped", grace_s: float = _CLOSE_S) -> None:
        """Tell all to end. A thread in the middle of a batch ends by itself later; nothing depends on it.

        May run in a worker thread, if the iterator is found to be garbage there.
        """
        self.close_for(because)
        with HeldInterrupts() as interrupts:
            workers, self.workers = self.workers, []
            live.discard(self)
            for worker in workers:
                worker.link.close()
            _join([worker.thread for worker in workers], max(grace_s, _LEAST_CLOSE_S), interrupts)
            self.closed = True

    def leave_to_parent(self) -> None:
        """Forget the threads, which a forked child does not have."""
        self.workers = []
        self.closed = True
        self.closed_because = "its workers are threads of the process that this one was forked from"


def _copy_dataset(dataset: Any) -> Any:
    """A dataset for one worker: an assignment to ``self`` is seen by that worker only, as in a process.

    Datasets that it wraps are copied too. All else is shared, and so is a dataset that is not torch's.
    """
    if not isinstance(dataset, Dataset):
        return dataset
    try:
        copies = {id(one): copy.copy(one) for one in datasets_in(dataset) if isinstance(one, Dataset)}
    except Exception as error:
        advice = "a __copy__ that returns self would have the threads share it."
        add_note(
            error, f"raised by copy.copy(): each worker thread has a shallow copy of the dataset; {advice}"
        )
        raise
    for twin in copies.values():
        attributes = getattr(twin, "__dict__", {})
        for name, value in attributes.items():
            if id(value) in copies:
                attributes[name] = copies[id(value)]
            elif type(value) in (list, tuple) and any(id(one) in copies for one in value):
                attributes[name] = type(value)(copies.get(id(one), one) for one in value)
    return copies[id(dataset)]


def _run(arguments: Any, link: ThreadLink) -> None:
    """Run a worker thread. The program's global generators are left alone."""
    ended_by: BaseException | None = None
    pid = os.getpid()
    try:
        name_worker(arguments.worker_id, arguments.dataset)
        use_one_core_in_this_thread()
        Loop(arguments, link).run()
    except BaseException as error:  # noqa: BLE001 - the main process raises it
        if os.getpid() != pid:
            # In a process that the dataset forked this is the only thread: its end aborts the interpreter.
            traceback.print_exc()
            os._exit(1)
        forget_frames(error)
        ended_by = error
    finally:
        del arguments
        link.end(ended_by)


def _join(threads: list[threading.Thread], grace_s: float, interrupts: HeldInterrupts | None = None) -> None:
    deadline = time.monotonic() + grace_s
    for thread in threads:
        while thread is not threading.current_thread() and thread.is_alive():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (interrupts is not None and interrupts.came):
                return
            thread.join(min(left_s, _LEAST_CLOSE_S))


@atexit.register
def _end_with_program() -> None:
    """Give worker threads time to end before the program does.

    The interpreter stops a daemon thread wherever it is. Some versions unwind its stack, which not all of
    torch's C++ functions survive.
    """
    for workers in list(live):
        if isinstance(workers, ThreadWorkers):
            workers.interrupt()
            workers.close("the program ends", grace_s=0.0)
    _join(list(_started), _EXIT_S)
