"""Tasks whose slot cannot have memory for their indices: they are sent once there is some."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loading import Numbered
from torch.utils.data import IterableDataset

from shmloader import DataLoader, SharedMemoryExhausted
from shmloader.memory import Segment

BATCH = 600  # so many indices do not fit in a record


class Refusal:
    """Refuses the main process memory, a number of times."""

    def __init__(self, segment: Any, times: int) -> None:
        self._reserve, self.left = segment.reserve, times
        segment.reserve = self

    def __call__(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        if self.left:
            self.left -= 1
            raise SharedMemoryExhausted("refused", needed_nbytes=nbytes)
        return self._reserve(slot, held_nbytes, nbytes)


@pytest.mark.parametrize(("times", "in_order"), [(1, True), (20, True), (20, False)])
def test_no_batch_is_lost_and_nothing_waits_for_ever(times: int, in_order: bool) -> None:
    """The task comes when there is memory. A call that has nothing else to wait for raises meanwhile."""
    indices = [[(batch * 7 + 31 * k) % 1000 for k in range(BATCH)] for batch in range(12)]
    loader = DataLoader(
        Numbered(1000, items=1),
        batch_sampler=indices,
        num_workers=2,
        timeout=60,
        persistent_workers=True,
        in_order=in_order,
    )
    with loader:
        iterator = iter(loader)
        kept = [next(iterator)]  # all are kept, so that slots are made and need memory
        refusal = Refusal(iterator.table.segment, times)
        refused = 0
        while True:
            try:
                kept.append(next(iterator))
            except StopIteration:
                break
            except SharedMemoryExhausted:
                refused += 1
        assert (refusal.left, refused > 0) == (0, times > 12)
        came = [batch[:, 0].tolist() for batch in kept]
        assert (came if in_order else sorted(came)) == (indices if in_order else sorted(indices))
        assert sorted(batch[:, 0].tolist() for batch in loader) == sorted(indices)


def test_a_worker_that_dies_meanwhile_is_replaced_and_gets_them_in_order() -> None:
    indices = [[(batch * 7 + 31 * k) % 1000 for k in range(BATCH)] for batch in range(12)]
    loader = DataLoader(Numbered(1000, items=1), batch_sampler=indices, num_workers=2, worker_restarts=1)
    with loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        Refusal(iterator.table.segment, 20)
        while len(kept) < len(indices):
            if len(kept) == 4 and loader.statistics().worker_restarts == 0:
                os.kill(iterator._workers[0].pid, signal.SIGKILL)
            with contextlib.suppress(SharedMemoryExhausted):
                kept.append(next(iterator))
        assert [batch[:, 0].tolist() for batch in kept] == indices
        assert loader.statistics().worker_restarts == 1


@pytest.mark.filterwarnings("ignore::shmloader.SpillWarning")  # of a batch that came before memory was there
def test_a_worker_that_ends_before_its_only_task_that_was_sent_has_begun_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for memory are not in its pipe either: they are no batch that it has ended at."""
    reserve, calls = Segment.reserve, 0

    def refuse(segment: Segment, slot: int, held_nbytes: int, nbytes: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 1 and loader.statistics().worker_restarts < 2:
            raise SharedMemoryExhausted("refused", needed_nbytes=nbytes)
        return reserve(segment, slot, held_nbytes, nbytes)

    monkeypatch.setattr(Segment, "reserve", refuse)
    indices = [list(range(BATCH))] * 4

    def end_twice(_: int) -> None:
        done = len(list(tmp_path.iterdir()))
        if done < 2:
            (tmp_path / str(done)).touch()
            os._exit(3)

    loader = DataLoader(
        Numbered(BATCH),
        batch_sampler=indices,
        num_workers=1,
        worker_restarts=3,
        worker_init_fn=end_twice,
        multiprocessing_context="fork",
    )
    with loader:
        iterator, found = iter(loader), 0
        while found < len(indices):
            with contextlib.suppress(SharedMemoryExhausted):
                next(iterator)
                found += 1
        assert loader.statistics().worker_restarts == 2


class Count(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_those_of_an_epoch_that_was_left_take_nothing_from_the_next_epoch_of_a_stream() -> None:
    with DataLoader(Count(), 2, num_workers=1, prefetch_factor=4, persistent_workers=True) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        refusal = Refusal(iterator.table.segment, 100)
        with pytest.raises(SharedMemoryExhausted):
            while True:
                kept.append(next(iterator))
        refusal.left = 0
        assert [batch.tolist() for batch in loader] == [[k, k + 1] for k in range(0, 20, 2)]
