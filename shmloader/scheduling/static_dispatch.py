"""``dispatch="static"``: workers take turns, as torch's do. Main process only.

Follows ``_MultiProcessingDataLoaderIter._try_put_index`` of torch step by step: datasets that draw random
numbers depend on which worker makes which batch.
"""

from __future__ import annotations

import itertools

from shmloader.scheduling.task_ledger import Ledger
from shmloader.torch_private import LIMITS_TASKS


class Turns:
    """Chooses workers in turn. Out of order, a slow worker gets fewer tasks, if torch does that."""

    def __init__(self, ledger: Ledger, num_workers: int, most_tasks: int, *, in_order: bool) -> None:
        self._ledger = ledger
        self._num_workers = num_workers
        self._most_tasks = most_tasks
        self._limits_each = not in_order and LIMITS_TASKS
        self.begin_epoch()

    def begin_epoch(self, first_worker: int = 0) -> None:
        """Begin an epoch with a worker; all workers may have batches again."""
        self._turn = itertools.islice(itertools.cycle(range(self._num_workers)), first_worker, None)
        self._active = set(range(self._num_workers))
        self._all_give = not self._limits_each  # no worker has to be left out

    def choose(self) -> int | None:
        """The worker that gets the next task; None if no worker can take one."""
        if self._all_give:
            return next(self._turn)
        for _ in range(self._num_workers):
            worker_id = next(self._turn)
            if worker_id in self._active and (not self._limits_each or self._has_room(worker_id)):
                return worker_id
        return None

    def _has_room(self, worker_id: int) -> bool:
        return self._ledger.unreturned_of(worker_id) < self._most_tasks // len(self._active)

    def is_active(self, worker_id: int) -> bool:
        """Whether a worker's iterable-style dataset is not exhausted in this epoch."""
        return worker_id in self._active

    def drop_out(self, worker_id: int) -> bool:
        """Give a worker no more tasks in this epoch; False if it had dropped out already."""
        if worker_id not in self._active:
            return False
        self._active.discard(worker_id)
        self._all_give = False
        return True
