"""The scheduler of one iterator: asks the sampler for index batches, and chooses their workers.

Main process only. With ``dispatch="static"`` it follows torch's ``_MultiProcessingDataLoaderIter`` step by
step; with ``dispatch="dynamic"`` `FreeWorkers` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import RandomSampler

from shmloader.exchange.exchange import Exchange
from shmloader.indices.epoch_prefetch import NOTHING, NextEpoch
from shmloader.indices.samplers import GeneratorStates, sampler_of_indices
from shmloader.order.auto import Auto, Growth
from shmloader.order.policies import FreeWorkers, Turns
from shmloader.settings import DYNAMIC, Settings
from shmloader.slots import Place


class Scheduler:
    """Sends tasks for one iterator, epoch after epoch."""

    def __init__(
        self,
        settings: Settings,
        exchange: Exchange,
        auto: Auto | None,
        next_epoch: NextEpoch | None = None,
    ) -> None:
        # The policy of dynamic dispatch; None with static dispatch.
        self.free_workers: FreeWorkers | None = None
        self._exchange = exchange
        self._table = table = exchange.table
        self._counters = exchange.counters
        # It draws once more at its end. The time of that draw must not depend on how far workers ran ahead.
        is_random = type(sampler_of_indices(settings.index_sampler)) is RandomSampler
        self._random_sampler = settings.index_sampler if is_random else None
        self._length = -1  # index batches of such a sampler
        self._next_epoch = next_epoch
        self._sampler_iter: Iterator[Any] = iter(())
        self._sent = 0  # index batches of this epoch that were sent, or are not to be
        self._sent_early = 0  # tasks of the next epoch
        num_workers = settings.num_workers
        self._turns = Turns(table, num_workers, in_order=settings.in_order)
        if settings.dispatch == DYNAMIC:
            self.free_workers = FreeWorkers(table, num_workers, settings.prefetch_factor, settings.timeout)
        self._policy: Turns | FreeWorkers = self.free_workers or self._turns
        self._growth = None if auto is None else Growth(auto, num_workers, exchange, self.free_workers)

    # --- epochs

    def begin_epoch(
        self, sampler_iter: Iterator[Any], done: int | tuple[int, ...] = 0, first_worker: int = 0
    ) -> None:
        """Begin an epoch without a task, and send its first ones.

        Args:
            sampler_iter: Iterates over the epoch's index batches.
            done: Index batches that are done with: see `Progress`.
            first_worker: Whose turn it is first, with static dispatch.
        """
        if isinstance(done, tuple):
            done, *behind = done
            sampler_iter = self._without(sampler_iter, set(behind))
        self._sent = done
        self._turns.begin_epoch(first_worker)
        self._fill(sampler_iter)

    def _without(self, sampler_iter: Iterator[Any], done: set[int]) -> Iterator[Any]:
        """Leave out the index batches at certain positions."""
        for index_batch in sampler_iter:
            if self._sent in done:
                self._sent += 1
            else:
                yield index_batch

    def take_early(self, *, discard: bool) -> Iterator[Any] | None:
        """Begin the next epoch with its early batches, or discard them: always with ``discard``.

        Returns the iterator over the epoch's further index batches, for `go_on`; None if the epoch has to
        begin in the usual way.
        """
        if self._next_epoch is None or not self._sent_early:
            return None
        early = self._next_epoch.take(discard=discard or self._table.due() is not None)
        if early is None:
            self._counters.epochs_in_vain += 1
            return None
        self._counters.epochs_prefetched += 1
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
        except StopIteration:
            self._send_early_task()
            return False
        except Exception as error:
            self._exchange.lifecycle.expect(error)  # the sampler's own: as in torch, the next call goes on
            raise
        self._turns.end_turn(worker_id)
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
            self._turns.begin_epoch()
        worker_id = self._policy.choose()
        assert worker_id is not None  # batches come in order
        self._turns.end_turn(worker_id)
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
        self._counters.tasks_ahead += sent
        return sent

    # --- workers whose iterable-style dataset is exhausted

    def is_active(self, worker_id: int) -> bool:
        """Whether a worker may still have batches in this epoch."""
        return self._turns.is_active(worker_id)

    def drop_out(self, worker_id: int) -> None:
        """Give a worker no more tasks in this epoch; the next one gets its turn."""
        if self._turns.drop_out(worker_id):
            self._send_task()
