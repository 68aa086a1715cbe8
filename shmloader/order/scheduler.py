"""The scheduler of one iterator: asks the sampler for index batches, and chooses their workers.

Main process only. With ``dispatch="static"`` it follows torch's ``_MultiProcessingDataLoaderIter`` step by
step; with ``dispatch="dynamic"`` `FreeWorkers` decides (docs/decisions/0019). The table of places says
whether there is room for a batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import RandomSampler

from shmloader.exchange.exchange import Exchange
from shmloader.indices.epoch_prefetch import NOTHING, NextEpoch
from shmloader.indices.samplers import GeneratorStates, sampler_of_indices
from shmloader.order.auto import Auto, Growth
from shmloader.settings import DYNAMIC, Settings
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
        self._turn = self._before = first_worker
        self._active = set(range(self._num_workers))
        self._all_give = not self._limits_each  # no worker has to be left out

    def choose(self) -> int | None:
        """The worker that gets the next task, which ends its turn; None if no worker can take one."""
        self._before = turn = self._turn
        if not self._all_give:
            in_turn = (number % self._num_workers for number in range(turn, turn + self._num_workers))
            found = next(filter(self._may_have_one, in_turn), None)
            if found is None:
                return None
            turn = found
        self._turn = (turn + 1) % self._num_workers
        return turn

    def undo(self) -> None:
        """Undo the last `choose`: there was no task."""
        self._turn = self._before

    def _may_have_one(self, worker_id: int) -> bool:
        if worker_id not in self._active or not self._limits_each:
            return worker_id in self._active
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
        self.num_workers = num_workers  # that are given tasks: the first ones
        self._prefetch_factor = prefetch_factor  # tasks that each may have ahead

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


class Scheduler:
    """Sends tasks for one iterator, epoch after epoch."""

    def __init__(
        self, settings: Settings, exchange: Exchange, auto: Auto | None, next_epoch: NextEpoch | None = None
    ) -> None:
        # The policy of dynamic dispatch; None with static dispatch.
        self.free_workers: FreeWorkers | None = None
        self._exchange, self._counters = exchange, exchange.counters
        self._table = table = exchange.table
        # It draws once more at its end. The time of that draw must not depend on how far workers ran ahead.
        is_random = type(sampler_of_indices(settings.index_sampler)) is RandomSampler
        self._random_sampler = settings.index_sampler if is_random else None
        self._length = -1  # index batches of such a sampler
        self._next_epoch = next_epoch
        self._sampler_iter: Iterator[Any] = iter(())
        self._sent = 0  # index batches of this epoch that were sent, or are not to be
        self._sent_early = 0  # tasks of the next epoch
        num_workers, self._persists = settings.num_workers, settings.persistent_workers
        self.turns = Turns(table, num_workers, in_order=settings.in_order)
        if settings.dispatch == DYNAMIC:
            self.free_workers = FreeWorkers(table, num_workers, settings.prefetch_factor, settings.timeout)
        self._policy: Turns | FreeWorkers = self.free_workers or self.turns
        serve = None if self.free_workers is None else self.free_workers.serve
        self._growth = None if auto is None else Growth(auto, num_workers, exchange, serve)

    # --- epochs

    def begin_epoch(
        self, sampler_iter: Iterator[Any], done: tuple[int, ...] = (0,), first_worker: int = 0
    ) -> None:
        """Begin an epoch without a task, and send its first ones; ``done`` is that of `Progress`."""
        self._sent, *behind = done
        if behind:  # no generator: one that a sampler's exception has passed has ended
            positions = set(behind)
            sampler_iter = itertools.filterfalse(lambda _: self._passes_over(positions), sampler_iter)
        self.turns.begin_epoch(first_worker)
        self._fill(sampler_iter)

    def _passes_over(self, positions: set[int]) -> bool:
        """Pass over the next index batch if it has one of some positions; returns whether it has."""
        is_one = self._sent in positions
        self._sent += is_one
        return is_one

    def take_early(self, *, discard: bool) -> Iterator[Any] | None:
        """Begin the next epoch with its early batches, or discard them: always with ``discard``.

        Returns the iterator over the epoch's further index batches, for `go_on`; None if the epoch has to
        begin in the usual way.
        """
        if self._next_epoch is None or not self._sent_early:
            return None
        early = self._next_epoch.take(discard=discard or self._table.due() is not None)
        self._counters.add("epochs_in_vain" if early is None else "epochs_prefetched")
        return early

    def discard_early(self) -> None:
        """Set the sampler back if it drew early for the next epoch; the early batches are not used."""
        if self._next_epoch is not None:
            self._next_epoch.take(discard=True)

    @property
    def states_before_early(self) -> GeneratorStates | None:
        """States of the generators before the next epoch was begun early; None if it was not."""
        return None if self._next_epoch is None else self._next_epoch.before

    def go_on(self, sampler_iter: Iterator[Any]) -> None:
        """Begin an epoch whose first tasks were sent early; see `take_early`."""
        self._table.begin_epoch()
        self._sent = self._sent_early
        self._fill(sampler_iter)

    def _fill(self, sampler_iter: Iterator[Any]) -> None:
        self._sampler_iter = sampler_iter
        self._sent_early = 0
        if self._random_sampler is not None and self.free_workers is not None:
            self._length = len(self._random_sampler)
        if self._next_epoch is not None:
            self._next_epoch.begin_epoch()
        if self._growth is not None:
            self._growth.begin_epoch()
        for _ in range(self._table.budget.most_tasks - len(self._table.unreturned)):
            self._send_task()

    # --- tasks

    def _send_task(self) -> bool:
        """Send the next index batch to a worker; return whether a task of this epoch was sent."""
        worker_id = self._policy.choose()  # first: an index batch that was drawn must be sent
        if worker_id is None:
            return False
        try:
            index_batch = next(self._sampler_iter)
        except Exception as error:
            self.turns.undo()
            if isinstance(error, StopIteration):
                if not self._persists:
                    self._exchange.stop_renewing()
                self._send_early_task()
                return False
            lifecycle = self._exchange.lifecycle
            if not lifecycle.is_from_outside(error):
                lifecycle.expect(error)  # the sampler's own: as in torch, the next call goes on
            raise
        self._exchange.send(worker_id, self._table.epoch, self._sent, index_batch)
        self._sent += 1
        return True

    def _send_early_task(self) -> None:
        """Send a task of the next epoch, if it may begin early."""
        if self._next_epoch is None:
            return
        index_batch = self._next_epoch.draw()
        if index_batch is NOTHING:
            return
        if not self._sent_early:
            self.turns.begin_epoch()
        worker_id = self._policy.choose()
        assert worker_id is not None  # batches come in order
        self._exchange.send(worker_id, self._table.epoch + 1, self._sent_early, index_batch)
        self._sent_early += 1

    def send_more(self) -> None:
        """Send the tasks that are due after a batch was taken."""
        table, free_workers = self._table, self.free_workers
        if len(table.unreturned) < table.budget.most_tasks:
            self._send_task()
        elif free_workers is not None:
            while free_workers.may_refill() and self._send_ahead():
                pass
        if self._growth is not None:
            self._growth.note_return()
            while len(table.unreturned) < table.budget.most_tasks and self._send_task():
                pass

    def note_wait(self, due: Place) -> None:
        """Give idle workers further tasks while the program waits for a slow batch."""
        free_workers = self.free_workers
        if free_workers is not None and free_workers.is_stalled(due):
            while free_workers.may_widen() and self._send_ahead():
                pass

    def _send_ahead(self) -> bool:
        """Send a task beyond ``most_tasks``, if the sampler has one."""
        if self._sent == self._length:  # its end is asked for as early as with static dispatch
            return False
        sent = self._send_task()
        self._counters.add("tasks_ahead", sent)
        return sent

    # --- workers whose iterable-style dataset is exhausted

    def drop_out(self, worker_id: int) -> None:
        """Give a worker no more tasks in this epoch; the next one gets its turn."""
        if self.turns.drop_out(worker_id):
            self._send_task()
