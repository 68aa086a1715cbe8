"""Policies of ``dispatch``: the choice of the worker that makes the next batch.

The table of places says whether there is room for it. Main process only. docs/decisions/0019 has the reasons.
"""

from __future__ import annotations

import time

from shmloader.slots import Place, PlaceTable
from shmloader.torch_private import LIMITS_TASKS

_IN_HAND = 2  # tasks that keep a worker busy while its answer travels and the next one comes


class Turns:
    """``dispatch="static"``: workers take turns, by the steps of torch's ``_try_put_index``.

    Datasets that draw random numbers depend on which worker makes which batch. Out of order, a slow worker
    gets fewer tasks, if torch does that.
    """

    def __init__(self, table: PlaceTable, num_workers: int, *, in_order: bool) -> None:
        self._table = table
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
        share = self._table.budget.wanted_tasks // len(self._active)
        return [place.worker_id for place in self._table.unreturned.values()].count(worker_id) < share

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


class FreeWorkers:
    """``dispatch="dynamic"``: a free worker takes the next task.

    While the program waits for a slow batch, idle workers are sent tasks beyond ``most_tasks``, for which the
    table's window widens. Until the epoch ends, workers may then be so far ahead of the program.

    Args:
        table: The places.
        num_workers: Workers that are given tasks: the first ones.
        prefetch_factor: Tasks that each may have ahead.
        timeout_s: The loader's; 0 for none.
    """

    def __init__(
        self, table: PlaceTable, num_workers: int, prefetch_factor: int, timeout_s: float = 0.0
    ) -> None:
        self._table = table
        self._timeout_s = timeout_s
        self._waiting_for = -1
        self._waiting_since_s = 0.0
        self.serve(num_workers, prefetch_factor)

    def serve(self, num_workers: int, prefetch_factor: int) -> None:
        """Give tasks to more workers, or more tasks to each, from now on."""
        self.num_workers = num_workers
        self._prefetch_factor = prefetch_factor

    def choose(self) -> int:
        """The worker that gets the next task: the first of those that have the fewest unanswered ones."""
        unanswered = self._table.unanswered[: self.num_workers]
        return unanswered.index(min(unanswered))

    def may_refill(self) -> bool:
        """Whether to send a task beyond ``most_tasks`` although the program does not wait.

        Only if a worker has fewer than ``prefetch_factor``: a task that is sent early may be sent to a worker
        that is about to take long.
        """
        return self._fewest() < self._prefetch_factor and self._table.has_room()

    def is_stalled(self, due: Place) -> bool:
        """Whether a worker is idle while the program waits for another worker's batch, which is due.

        False once that wait has been longer than the loader's timeout: then a worker hangs, and further
        batches of the others would only delay the error.
        """
        if self._fewest() > 0:
            return False
        now_s = time.monotonic()
        if due.seq != self._waiting_for:
            self._waiting_for, self._waiting_since_s = due.seq, now_s
        return self._timeout_s <= 0 or now_s - self._waiting_since_s < self._timeout_s

    def may_widen(self) -> bool:
        """Whether to send a further task for a worker that was idle."""
        return self._fewest() < min(self._prefetch_factor, _IN_HAND) and self._table.widen()

    def _fewest(self) -> int:
        return min(self._table.unanswered[: self.num_workers])
