"""``dispatch="static"``: workers take turns, as torch's do. Main process only.

Follows ``_MultiProcessingDataLoaderIter._try_put_index`` of torch step by step: datasets that draw random
numbers depend on which worker makes which batch.
"""

from __future__ import annotations

from shmloader.slots import SlotPool
from shmloader.slots.task_ledger import Ledger
from shmloader.torch_private import LIMITS_TASKS


class Turns:
    """Chooses workers in turn. Out of order, a slow worker gets fewer tasks, if torch does that."""

    def __init__(self, ledger: Ledger, pool: SlotPool, num_workers: int, *, in_order: bool) -> None:
        self._ledger = ledger
        self._pool = pool
        self._num_workers = num_workers
        self._limits_each = not in_order and LIMITS_TASKS
        self.begin_epoch()

    def begin_epoch(self, first_worker: int = 0) -> None:
        """Begin an epoch with a worker; all workers may have batches again."""
        self._turn = first_worker
        self._active = set(range(self._num_workers))
        self._all_give = not self._limits_each  # no worker has to be left out

    def choose(self) -> int | None:
        """The worker that gets the next task; None if no worker can take one. See `end_turn`."""
        if self._all_give:
            return self._turn
        for number in range(self._turn, self._turn + self._num_workers):
            worker_id = number % self._num_workers
            if worker_id in self._active and (not self._limits_each or self._has_room(worker_id)):
                return worker_id
        return None

    def end_turn(self, worker_id: int) -> None:
        """Note that a worker was sent a task: it is the next one's turn."""
        self._turn = (worker_id + 1) % self._num_workers

    def _has_room(self, worker_id: int) -> bool:
        # Not `most_tasks`: short memory may leave less than one of those for each worker.
        return self._ledger.unreturned_of(worker_id) < self._pool.budget.wanted_tasks // len(self._active)

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
