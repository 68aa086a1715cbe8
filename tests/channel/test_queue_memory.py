"""Shared memory of a queue when there is little of it, and when much is kept."""

from __future__ import annotations

import multiprocessing
import os
import queue
import warnings
from typing import Any

import psutil
import pytest
import torch
from robustness.confined import memory_cgroup
from robustness.processes import python

from shmloader import Queue, SharedMemoryExhausted, SpillWarning
from shmloader.channel.consumer import Consumer
from shmloader.memory import PAGE_NBYTES

MIB = 1 << 20


def test_an_object_larger_than_its_share_is_refused_and_the_queue_goes_on() -> None:
    one = Queue(2, memory_budget_nbytes=16 * MIB)  # 4 MiB for each of 2 + 2
    one.put(torch.zeros(3 * MIB, dtype=torch.uint8))
    with pytest.raises(
        SharedMemoryExhausted, match=r"5,242,9\d\d bytes does not fit .* may have 4,194,304 bytes"
    ):
        one.put(torch.zeros(5 * MIB, dtype=torch.uint8))
    assert len(one.get()) == 3 * MIB
    for _ in range(5):
        one.put(torch.zeros(4 * MIB - PAGE_NBYTES, dtype=torch.uint8))
        one.put(1)
        assert len(one.get()) == 4 * MIB - PAGE_NBYTES
        assert one.get() == 1
    one.close()


def test_an_object_may_have_its_share_after_many_small_ones() -> None:
    """A loader's slots may grow to a few times a typical batch; what a queue has no room for is refused."""
    one = Queue(2, memory_budget_nbytes=64 * MIB)
    for _ in range(50):
        one.put(torch.zeros(10_000))
        one.get()
    one.put(torch.zeros(15 * MIB, dtype=torch.uint8))
    assert len(one.get()) == 15 * MIB
    one.close()


def test_objects_that_are_kept_beyond_the_budget_are_copied_with_a_warning() -> None:
    one, kept = Queue(2, memory_budget_nbytes=8 * MIB), []
    with pytest.warns(
        SpillWarning, match=r"keeps \d+ objects, .* this queue's slots .* a smaller maxsize"
    ) as given:
        for number in range(20):
            one.put(torch.full((MIB,), number, dtype=torch.uint8))
            kept.append(one.get())
    assert len(given) == 1
    assert given[0].filename == __file__
    assert all((got == number).all() for number, got in enumerate(kept))
    kept.clear()
    with warnings.catch_warnings(action="error"):
        one.put(torch.full((MIB,), 3, dtype=torch.uint8))
        assert (one.get() == 3).all()
    one.close()


def test_memory_of_large_objects_is_given_back() -> None:
    process, one = psutil.Process(), Queue(4)
    for _ in range(4):
        one.put(torch.ones(16 * MIB, dtype=torch.uint8))
    assert process.memory_info().shared > 64 * MIB
    for _ in range(4):
        one.get()
    for _ in range(60):
        one.put(torch.ones(10_000))
        one.get()
    consumer: Any = one._ends[Consumer]
    table = consumer._table
    assert sum(place.nbytes for place in table.places) < 8 * MIB
    one.close()


def test_what_is_filled_stays_where_the_queue_is_closed_and_only_what_is_kept_takes_memory() -> None:
    one = Queue(4)
    slots = os.dup(one._parts.segment.fileno())
    with pytest.raises(queue.Empty):
        one.get_nowait()  # so the consumer's end is closed first
    for number in range(3):
        one.put(torch.full((MIB,), number, dtype=torch.uint8))
    kept = one.get()
    one.get()
    given = one.new_empty(MIB, torch.uint8).fill_(7)
    one.close()
    assert (given == 7).all()
    assert (kept == 0).all()
    assert os.fstat(slots).st_blocks * 512 < 2 * MIB
    os.close(slots)


def test_what_is_filled_stays_where_another_process_closes_and_the_next_is_private() -> None:
    one = Queue(4)
    slots = os.dup(one._parts.segment.fileno())

    def consumes() -> None:
        one.get()
        one.close()

    one.put(torch.ones(MIB, dtype=torch.uint8))
    one.put(torch.ones(MIB, dtype=torch.uint8))
    given = one.new_empty(MIB, torch.uint8).fill_(7)
    process = multiprocessing.get_context("fork").Process(target=consumes)
    process.start()
    process.join()
    process.close()
    assert (given == 7).all()
    assert MIB <= os.fstat(slots).st_blocks * 512 < 2 * MIB
    one.put(given)
    assert os.fstat(slots).st_blocks * 512 < MIB  # nobody gets what is put now
    later = one.new_empty(MIB, torch.uint8).fill_(8)
    one.put(torch.ones(MIB, dtype=torch.uint8))
    one.close()
    assert (later == 8).all()
    assert os.fstat(slots).st_blocks == 0
    os.close(slots)


def test_without_memory_for_views_that_are_left_nothing_is_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Queue(2)
    rows, more = one.new_empty((50, 900)), one.new_empty((20,), torch.int64)
    rows.copy_(torch.arange(50.0)[:, None])
    more.fill_(7)
    view = rows[3]

    def fails(_: object) -> None:
        raise SharedMemoryExhausted("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("shmloader.memory.mapping.Extent.detach", fails)
        with pytest.raises(SharedMemoryExhausted):
            one.put({"rows": rows, "more": more})
    assert (rows == torch.arange(50.0)[:, None]).all()
    assert (view == 3).all()
    rows[4].fill_(-1)
    one.put({"rows": rows, "more": more})
    assert list(rows.shape) == list(more.shape) == [0]
    got = one.get()
    assert got["rows"][:, 0].tolist() == [0, 1, 2, 3, -1, *range(5, 50)]
    assert (got["more"] == 7).all()
    got["rows"].zero_()
    assert (view == 3).all()
    one.close()


def test_a_limit_of_file_sizes_is_an_error_and_no_signal() -> None:
    """Shared memory is a file."""
    python(
        """
        import resource, pytest, torch
        from shmloader import Queue, SharedMemoryExhausted

        one = Queue(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(SharedMemoryExhausted, match="ulimit -f"):
            one.put(torch.ones(10 << 20))
        one.put(5)
        assert one.get() == 5
        """
    )


def test_an_object_for_which_the_machine_has_no_memory_is_an_error_and_no_kill() -> None:
    with memory_cgroup(400 * MIB) as group:
        python(
            """
            import warnings, pytest, torch
            from shmloader import Queue, SharedMemoryExhausted

            warnings.simplefilter("ignore")
            one, kept = Queue(4, memory_budget_nbytes=1 << 40), []
            value = torch.ones(40 << 20, dtype=torch.uint8)
            with pytest.raises(SharedMemoryExhausted):
                for _ in range(20):
                    one.put_nowait(value)
                    kept.append(one.get())
            kept.clear()
            one.put(5)
            assert one.get() == 5
            """,
            wrap=group.wrap,
        )
        assert group.oom_kills() == 0
