"""The descriptors that stand for all workers of a loader: of processes after an interrupt, and of threads."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from interrupted_lines import interrupted_at

from shmloader.worker.links import Wakeup
from shmloader.workers.readiness import Readiness


class Worker(SimpleNamespace):
    """The descriptors of one, whose pipe of requests is full or not."""

    def flush(self) -> bool:
        return not self.is_full


@pytest.fixture
def worker() -> Iterator[Worker]:
    pipes = [os.pipe() for _ in range(3)]
    (requests, death, answers) = (pipes[0][1], pipes[1][0], pipes[2][0])
    yield Worker(requests_fd=requests, death_fd=death, answers_fd=answers, is_full=True)
    for fd in sum(pipes, ()):
        os.close(fd)


@pytest.mark.parametrize("is_full", [True, False], ids=["begins", "leaves"])
def test_an_interrupt_at_any_line_keeps_nothing_from_following_later(worker: Worker, is_full: bool) -> None:
    for line in range(100):
        readiness = Readiness()
        if not is_full:
            worker.is_full = True
            readiness.follow([worker])
            worker.is_full = False
        was_cut = interrupted_at(line, readiness.follow, [worker])
        readiness.follow([worker])
        readiness.follow([])
        poller = select.poll()
        poller.register(readiness.fd, select.POLLIN)
        assert poller.poll(0), "at first there may be something already"
        readiness.news.clear()
        assert poller.poll(0) == []
        readiness.set()
        assert poller.poll(0)
        if not was_cut:
            assert line > 5
            return
    raise AssertionError("it never ends")


def test_a_ring_that_comes_with_another_or_after_a_clear_is_not_lost() -> None:
    wakeup, poller = Wakeup(), select.poll()
    poller.register(wakeup.fd, select.POLLIN)
    assert poller.poll(0), "at first there may be something already"
    for rings in (0, 1, 2):
        wakeup.clear()
        assert not poller.poll(0)
        for _ in range(rings):
            wakeup.ring()
        assert bool(poller.poll(0)) == bool(rings)
