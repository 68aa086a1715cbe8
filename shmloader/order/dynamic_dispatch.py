"""``dispatch="dynamic"``: tasks go to free workers, which run ahead of a slow batch. Main process only.

docs/decisions/0019 has the reasons.
"""

from __future__ import annotations

import time

from shmloader.slots import SlotPool
from shmloader.slots.task_ledger import Ledger, Task

_IN_HAND = 2  # tasks that keep a worker busy while its answer travels and the next one comes


class FreeWorkers:
    """Chooses the worker that has the fewest tasks, and decides when further tasks are sent.

    The **window** is the number of batches that may be on their way: sent, and not returned by ``next()``
    yet. It begins at the pool's ``most_tasks``. It widens whenever the program waits while a worker is idle
    and the pool has room for one more slot. It narrows by one whenever a whole window of batches has been
    returned since it last changed.

    Attributes:
        num_workers: Workers that are given tasks: the first ones.
        window: As above.
    """

    def __init__(
        self, ledger: Ledger, pool: SlotPool, num_workers: int, prefetch_factor: int, timeout_s: float
    ) -> None:
        self.num_workers = num_workers
        self._ledger = ledger
        self._pool = pool
        self._prefetch_factor = prefetch_factor
        self._timeout_s = timeout_s
        self._unchanged = 0  # batches returned since the window changed
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch, in which nothing has been sent."""
        self._set_window(self._pool.most_tasks)
        self._waiting_for = -1
        self._waiting_since_s = 0.0

    def serve(self, num_workers: int, prefetch_factor: int) -> None:
        """Give tasks to more workers, or more tasks to each, from now on."""
        self.num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._set_window(self._pool.most_tasks)

    def choose(self) -> int:
        """The worker that gets the next task: the first of those that have the fewest unanswered ones."""
        unanswered = self._ledger.unanswered[: self.num_workers]
        return unanswered.index(min(unanswered))

    def note_return(self) -> None:
        """Note that a batch was returned while at least ``most_tasks`` others are on their way."""
        self._unchanged += 1
        if self._unchanged >= self.window > self._pool.most_tasks:
            self._set_window(self.window - 1)

    def may_refill(self) -> bool:
        """Whether to send a task beyond ``most_tasks`` although the program does not wait.

        Only if a worker has fewer than ``prefetch_factor``: a task that is sent early may be sent to a worker
        that is about to take long.
        """
        if len(self._ledger.tasks) >= self.window or self._fewest() >= self._prefetch_factor:
            return False
        return self._pool.has_room_for_more()

    def is_stalled(self, due: Task) -> bool:
        """Whether a worker is idle while the program waits for another worker's batch, which is due.

        False once that wait has been longer than the loader's timeout: then a worker hangs, and further
        batches of the others would only delay the error.
        """
        if self._fewest() > 0:
            return False
        if self._timeout_s <= 0:
            return True
        now_s = time.monotonic()
        if due.seq != self._waiting_for:
            self._waiting_for, self._waiting_since_s = due.seq, now_s
        return now_s - self._waiting_since_s < self._timeout_s

    def may_widen(self) -> bool:
        """Whether to send a further task for a worker that was idle."""
        enough = min(self._prefetch_factor, _IN_HAND)
        if self._fewest() >= enough or not self._pool.has_room_for_more():
            return False
        if len(self._ledger.tasks) >= self.window:
            self._set_window(len(self._ledger.tasks) + 1)
        return True

    def _fewest(self) -> int:
        return min(self._ledger.unanswered[: self.num_workers])

    def _set_window(self, window: int) -> None:
        self.window = window
        self._unchanged = 0
        self._pool.warm_slots = max(self._pool.base_slots, window + 2)
