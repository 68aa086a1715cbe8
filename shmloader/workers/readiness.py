"""A descriptor to wait for in an event loop, in place of those of all worker processes. Main process."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from typing import Any

from shmloader.memory.segment import OwnDescriptor
from shmloader.worker.links import Wakeup


class Readiness:
    """An epoll of all descriptors that end a wait for batches: itself a descriptor that is readable then.

    It needs no thread. It is closed when the object dies, not with the workers: an event loop may be waiting.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()  # closes itself when it dies
        self.fd: int = self._epoll.fileno()
        self._watched: dict[int, int] = {}  # events, by descriptor
        self._end = OwnDescriptor(os.eventfd(0))  # readable for good once the workers are closed
        # For whoever waits while another thread or task takes batches; at first nothing is watched yet.
        self.news = Wakeup()
        for own in (self._end, self.news):
            self._epoll.register(own.fd, select.EPOLLIN)

    def follow(self, workers: Iterable[Any]) -> None:
        """Watch these worker processes alone; call it before a descriptor of one of the others is closed.

        A full pipe is watched for room: a worker may be waiting for what it had no room for.
        """
        wanted: dict[int, int] = {}
        for worker in workers:
            wanted[worker.answers_fd] = wanted[worker.death_fd] = select.EPOLLIN
            if not worker.flush():
                wanted[worker.requests_fd] = select.EPOLLOUT
        # It may be done already: an interrupt, which ends the iterator, may have come before the last line.
        for fd in self._watched.keys() - wanted.keys():
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)
        for fd in wanted.keys() - self._watched.keys():
            with contextlib.suppress(FileExistsError):
                self._epoll.register(fd, wanted[fd])
        self._watched = wanted

    def set(self) -> None:
        """Make it readable for good."""
        os.eventfd_write(self._end.fd, 1)
