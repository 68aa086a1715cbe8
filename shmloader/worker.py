"""The worker's loop. Runs in the worker process and knows nothing of the main process's objects.

One task at a time: read a record, fetch samples, collate them into the granted slot, publish. The worker
ends when its task pipe is closed, and when the main process dies, however that happens.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmloader import torch_private, watch
from shmloader.bad_samples import Reported
from shmloader.codec import Encoder
from shmloader.collate import install_slot_collate
from shmloader.failures import capture, forget_frames
from shmloader.fetch import Fetcher, FetchRules, make_fetcher
from shmloader.messages import (
    BATCH,
    CONTINUE,
    DETACHED,
    END,
    FAILURE,
    INLINE_NBYTES,
    PART,
    REPORTED,
    RESUME,
    RESUMED,
    SPILLED,
    SPIN_NS,
    TASK_NBYTES,
    Task,
    pack_done,
    unpack_fields,
    unpack_task,
)
from shmloader.seeding import numpy_seed, worker_seed
from shmloader.segment import Descriptor, Segment
from shmloader.slot_writer import SlotWriter, set_current_writer
from shmloader.stacks import answer_with_stacks

_PART_NBYTES = 16 << 20, 1 << 20, 1 << 16  # what a slot is grown to for parts, or less if that cannot be had


@dataclass(frozen=True)
class WorkerArguments:
    """All that a worker is started with; crosses the process boundary once.

    Attributes:
        worker_id: 0 to ``num_workers - 1``.
        num_workers: Workers of this iterator.
        main_pid: Process id of the main process, which the worker outlives by no more than a moment.
        tasks: Read end of the pipe that brings `Task` records.
        dones: Write end of the pipe that takes `Done` records.
        stacks: The file that takes this worker's Python stack when the main process asks for it.
        segment: The iterator's shared memory, to attach to.
        dataset: The dataset.
        rules: How to fetch from it.
        base_seed: The iterator's base seed.
        shared_seed: Seed that all workers share (torch's DataPipes), or None.
        init_fn: The user's ``worker_init_fn``, called after seeding.
    """

    worker_id: int
    num_workers: int
    main_pid: int
    tasks: Descriptor
    dones: Descriptor
    stacks: Descriptor
    segment: Segment
    dataset: Any
    rules: FetchRules
    base_seed: int
    shared_seed: int | None
    init_fn: Callable[[int], None] | None


def run(arguments: WorkerArguments) -> None:
    """Entry point of a worker process."""
    # SIGTERM ends a worker whatever a fork has inherited.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    watch.begin(arguments.main_pid)
    answer_with_stacks(arguments.stacks)
    torch.set_num_threads(1)
    seed = worker_seed(arguments.base_seed, arguments.worker_id)
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(arguments.base_seed, arguments.worker_id))  # noqa: NPY002 - what torch seeds
    collate_fn = install_slot_collate(arguments.rules.collate_fn)
    worker = _Worker(arguments, arguments.rules._replace(collate_fn=collate_fn))
    with contextlib.suppress(BrokenPipeError):  # the main process closed its end: nobody waits
        worker.start(seed)
        worker.serve()


class _Worker:
    """State of one worker process."""

    def __init__(self, arguments: WorkerArguments, rules: FetchRules) -> None:
        self._arguments = arguments
        self._rules = rules
        self._dataset = arguments.dataset
        self._writer = SlotWriter(arguments.segment)
        self._encoder = Encoder(self._writer)
        self._tasks_fd = arguments.tasks.fd
        os.set_blocking(self._tasks_fd, False)
        self._poller = select.poll()
        self._poller.register(self._tasks_fd, select.POLLIN)
        self._dones_fd = arguments.dones.fd
        self._fetcher: Fetcher | None = None
        self._start_error: BaseException | None = None
        self._ended = False  # the iterable dataset is exhausted in this epoch
        self._wait_ns = 0
        self._later: deque[bytes] = deque()

    def start(self, seed: int) -> None:
        """Everything that torch does between seeding and the first task, in torch's order."""
        arguments = self._arguments
        self._dataset = torch_private.seed_datapipe(self._dataset, arguments.shared_seed)
        torch_private.set_worker_info(
            worker_id=arguments.worker_id,
            num_workers=arguments.num_workers,
            seed=seed,
            dataset=self._dataset,
        )
        try:
            if arguments.init_fn is not None:
                arguments.init_fn(arguments.worker_id)
            self._fetcher = make_fetcher(self._dataset, self._rules)
        except BaseException as error:  # noqa: BLE001 - raised in the main process, with the first batch
            self._start_error = error

    def serve(self) -> None:
        """Answer tasks until the main process closes the pipe."""
        clock_ns = time.perf_counter_ns
        while True:
            began_ns = clock_ns()
            record = self._later.popleft() if self._later else self._receive()
            self._wait_ns = clock_ns() - began_ns
            task = Task._make(unpack_fields(record))
            if task.kind == RESUME:
                self._resume(task)
            else:
                self._work(task)

    def _resume(self, task: Task) -> None:
        """Begin a new epoch with the same dataset object, as torch's persistent workers do."""
        self._ended = False
        self._dataset = torch_private.seed_datapipe(self._dataset, pickle.loads(task.payload))
        try:
            self._fetcher = make_fetcher(self._dataset, self._rules)
        except BaseException as error:  # noqa: BLE001 - raised in the main process, with the first batch
            self._start_error = error
        self._send(task, RESUMED)

    def _work(self, task: Task) -> None:
        """Make one batch, or what takes its place, and publish it."""
        _, _, _, slot, version, slot_nbytes, hint_nbytes, limit_nbytes, payload_nbytes, payload = task
        writer = self._writer
        index_batch: Any = None
        flags = 0
        try:
            writer.begin(slot, version, slot_nbytes, limit_nbytes)
            if payload_nbytes > INLINE_NBYTES:
                payload = writer.read(payload_nbytes)
            writer.prepare(hint_nbytes)
            index_batch = pickle.loads(payload)  # padding behind a pickle's end is not read
            batch = self._make(index_batch)
            if self._ended:
                writer.release()
                self._send(task, END)
                return
            if type(batch) is Reported:
                flags = REPORTED
            kind, encoded = BATCH, self._encoder.encode(batch)
            del batch
        except BaseException as error:  # noqa: BLE001 - raised in the main process
            kind, (encoded, flags) = FAILURE, self._encode_failure(error, index_batch)
        header_offset, header_nbytes, image = encoded
        if image is not None:
            if writer.restart():  # the parts are written over what the user's code may keep
                flags |= DETACHED
            self._send_parts(task, image)
            flags |= SPILLED
        if writer.release():
            flags |= DETACHED
        self._send(task, kind, flags, header_offset, header_nbytes)

    def _make(self, index_batch: Any) -> Any:
        """Fetch and collate, allocating in the slot; sets ``_ended`` instead of returning a batch."""
        if self._start_error is not None:
            error, self._start_error = self._start_error, None
            raise error
        if self._ended:
            return None
        if self._fetcher is None:
            raise RuntimeError("this worker's dataset could not be started; its first batch says why")
        set_current_writer(self._writer)
        try:
            return self._fetcher.fetch(index_batch)
        except StopIteration:
            if not self._rules.iterable:
                raise
            self._ended = True
            return None
        finally:
            set_current_writer(None)

    def _encode_failure(self, error: BaseException, index_batch: Any) -> tuple[Any, int]:
        """Put an exception into the slot in the batch's place; gives what ``encode`` does, and flags."""
        where = (
            f"Raised in shmloader worker {self._arguments.worker_id} (pid {os.getpid()}), "
            f"while it made the batch of indices {_shorten(index_batch)}"
        )
        failure = capture(error, where, self._fetcher.take_bad_samples() if self._fetcher else b"")
        forget_frames(error)  # they hold the samples, and leaves in the slot
        flags = DETACHED if self._writer.restart() else 0
        return self._encoder.encode(failure), flags

    def _send_parts(self, task: Task, image: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Send a batch larger than its slot: piece by piece, through the slot."""
        writer = self._writer
        for most_nbytes in _PART_NBYTES:
            if writer.ensure(min(writer.limit_nbytes, most_nbytes, len(image)), 0):
                break
        view = writer.view()
        for begin in range(0, len(image), len(view)):
            piece = image[begin : begin + len(view)]
            view[: len(piece)] = piece.data
            self._send(task, PART, 0, len(image), len(piece))
            self._await_continue()

    def _await_continue(self) -> None:
        """Wait until the part was copied out; tasks that were sent meanwhile are kept for later."""
        while unpack_task(record := self._receive()).kind != CONTINUE:
            self._later.append(record)

    def _receive(self) -> bytes:
        """The next record; sleeps until there is one, unless the last ones came quickly.

        Going to sleep and being woken costs more than a small batch does, on both sides. While records
        come quickly the worker therefore looks again for a moment, letting others have the processor.
        """
        spin_until_ns = time.perf_counter_ns() + SPIN_NS if self._wait_ns < SPIN_NS else 0
        while True:
            try:
                record = os.read(self._tasks_fd, TASK_NBYTES)
            except BlockingIOError:
                if spin_until_ns and time.perf_counter_ns() < spin_until_ns:
                    os.sched_yield()
                else:
                    self._poller.poll()
            else:
                if not record:
                    raise BrokenPipeError("the main process closed the task pipe")
                return record

    def _send(
        self, task: Task, kind: int, flags: int = 0, header_offset: int = 0, header_nbytes: int = 0
    ) -> None:
        writer = self._writer
        record = pack_done(
            kind,
            flags,
            task.generation,
            task.seq,
            task.slot,
            writer.version,
            writer.nbytes,
            header_offset,
            header_nbytes,
            self._wait_ns,
        )
        os.write(self._dones_fd, record)


def _shorten(index_batch: Any, most: int = 200) -> str:
    try:
        text = repr(index_batch)
    except Exception as reason:  # noqa: BLE001 - the user's indices
        return f"<repr() raises {type(reason).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
