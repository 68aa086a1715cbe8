"""A worker process: its end of the two pipes, and its way into the loop. Main side: `workers.processes`."""

from __future__ import annotations

import gc
import os
import select
import time
from typing import NamedTuple

import torch

from shmloader.codec.slot_allocator import set_current_allocator
from shmloader.memory import Descriptor
from shmloader.wire.records import REQUEST_NBYTES, SPIN_NS
from shmloader.worker.heap import warm_heap
from shmloader.worker.loop import Loop, WorkerArguments
from shmloader.worker.random_state import seed_worker_process


class Pipes(NamedTuple):
    """A worker process's ends, and the file for its stacks; crosses the process boundary once."""

    requests: Descriptor  # read end of the pipe that brings requests
    answers: Descriptor  # write end of the pipe that takes answers
    stacks: Descriptor  # the file that takes this worker's Python stack when the main process asks for it


class ProcessLink:
    """The `Link` of a worker process."""

    in_thread = closed = False  # reading the pipe tells
    dataset = None

    def __init__(self, pipes: Pipes) -> None:
        self.wait_ns = self.received_ns = 0
        self._requests_fd = pipes.requests.fd
        os.set_blocking(self._requests_fd, False)
        self._poller = select.poll()
        self._poller.register(self._requests_fd, select.POLLIN)
        self._answers_fd = pipes.answers.fd

    def receive(self) -> bytes:
        """The next record; after records that came quickly it looks for ``SPIN_NS`` before it sleeps."""
        began_ns = time.perf_counter_ns()
        spin_until_ns = began_ns + SPIN_NS if self.wait_ns < SPIN_NS else 0
        while True:
            try:
                record = os.read(self._requests_fd, REQUEST_NBYTES)
            except BlockingIOError:
                if spin_until_ns and time.perf_counter_ns() < spin_until_ns:
                    os.sched_yield()
                else:
                    self._poller.poll()
            else:
                if not record:
                    raise BrokenPipeError("the main process closed the task pipe")
                self.received_ns = now_ns = time.perf_counter_ns()
                self.wait_ns = now_ns - began_ns
                return record

    def send(self, record: bytes) -> None:
        """Send a record."""
        os.write(self._answers_fd, record)


def run_in_process(arguments: WorkerArguments, pipes: Pipes) -> None:
    """Entry point of a worker process, once its first steps are taken (`shmloader.workers.launch`)."""
    gc.freeze()  # a collection would visit, and so copy, every object that a fork shares with its parent
    set_current_allocator(None)  # of a worker thread that forked this process
    torch.set_num_threads(1)
    seed_worker_process(arguments.base_seed, arguments.worker_id)
    Loop(arguments, ProcessLink(pipes), warm_heap(arguments.num_workers)).run()
