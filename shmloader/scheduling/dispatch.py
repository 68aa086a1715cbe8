"""Which worker makes the next batch, and how far ahead of the program. Main process only.

With ``dispatch="static"`` workers take turns, as torch's do, and this module has no part in it. With
``dispatch="dynamic"`` a task goes to the worker that has the fewest to do, and while the program waits for a
slow batch the other workers are given further ones (docs/decisions/0019).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from typing import Any, Final

from torch.utils.data import IterableDataset

from shmloader import torch_private
from shmloader.arguments import Dispatch
from shmloader.scheduling.trials import AutoCount
from shmloader.slots import SlotPool

STATIC: Final = "static"
DYNAMIC: Final = "dynamic"
MODES = (STATIC, DYNAMIC)
"""What ``dispatch`` may be."""


def choose_dispatch(dispatch: Dispatch | None, dataset: object, num_workers: object) -> Dispatch:
    """The mode that a loader has.

    Args:
        dispatch: What was asked for; None for what suits the number of workers.
        dataset: The loader's dataset.
        num_workers: A number, or an `AutoCount`.

    Raises:
        ValueError: For another mode, the static one where the loader chooses the number of workers, or the
            dynamic one with an iterable-style dataset.
    """
    tunes = isinstance(num_workers, AutoCount)
    if tunes and isinstance(dataset, (IterableDataset, *torch_private.DATAPIPES)):
        raise ValueError(
            "num_workers='auto' needs a map-style dataset: each worker has a stream of its own from an "
            "iterable-style one, or a share of a DataPipe, so which samples come depends on how many workers "
            "there are. Pass a number"
        )
    if tunes and dispatch == STATIC:
        raise ValueError(
            "num_workers='auto' needs dispatch='dynamic', which is its default: where workers take turns, "
            "what samples draw would depend on how many workers were chosen. Leave dispatch out, or pass a "
            "number of workers"
        )
    if dispatch is None:
        return DYNAMIC if tunes else STATIC
    if dispatch not in MODES:
        raise ValueError(f"dispatch must be one of {', '.join(map(repr, MODES))}, not {dispatch!r}")
    if dispatch == DYNAMIC and isinstance(dataset, IterableDataset):
        raise ValueError(
            "dispatch='dynamic' needs a map-style dataset: each worker has a stream of its own from an "
            "iterable-style one, so which samples come, and in which order, would depend on which worker "
            "happened to be free. Leave dispatch='static'"
        )
    return dispatch


def is_dynamic(loader: Any) -> bool:
    """Whether a loader's attributes, which may have been changed, ask for dynamic dispatch."""
    return loader.dispatch == DYNAMIC or isinstance(loader.num_workers, AutoCount)


_IN_HAND = 2  # tasks that keep a worker busy while its answer travels and the next one comes


class Balance:
    """Spreads tasks over workers that are free, and lets them run ahead of a slow batch.

    The **window** is how many batches may be on their way: sent, and not returned by ``next()`` yet. It
    begins at the pool's ``most_tasks``. It widens whenever the program waits while a worker has nothing to do
    and the pool has a slot for more within its memory budget; and it narrows by one whenever a whole window
    of batches has been returned since it last changed.

    Args:
        pool: The slots.
        num_workers: How many workers there are.
        prefetch_factor: Tasks per worker that the user wants sent in advance.
        timeout_s: The loader's ``timeout``, or 0.
        outstanding: The numbers of the tasks that were sent and whose batches were not returned yet.
        arrived: The numbers of those of them whose batch is here.

    Attributes:
        window: As above.
        serving: How many workers are given tasks: the first ones.
    """

    def __init__(
        self,
        pool: SlotPool,
        num_workers: int,
        prefetch_factor: int,
        timeout_s: float,
        outstanding: Container[int],
        arrived: Container[int],
    ) -> None:
        self._pool = pool
        self._outstanding = outstanding
        self._arrived = arrived
        self._prefetch_factor = prefetch_factor
        self._enough = min(prefetch_factor, _IN_HAND)
        self._timeout_s = timeout_s
        # By worker, in the order in which it does them. Those at the front may have been answered.
        self._sent: list[deque[int]] = [deque() for _ in range(num_workers)]
        self.serving = num_workers
        self._unchanged = 0  # batches returned since the window changed
        self.begin()

    def begin(self) -> None:
        """Begin an epoch, in which nothing has been sent."""
        for sent in self._sent:
            sent.clear()
        self._set_window(self._pool.most_tasks)
        self._waiting_for = -1
        self._waiting_since_s = 0.0

    def serve(self, num_workers: int, prefetch_factor: int) -> None:
        """Give tasks to another number of workers, or another number of tasks to each, from now on."""
        self._sent += [deque() for _ in range(num_workers - len(self._sent))]
        self.serving = num_workers
        self._prefetch_factor = prefetch_factor
        self._enough = min(prefetch_factor, _IN_HAND)
        self._set_window(self._pool.most_tasks)

    def is_done(self, worker_id: int) -> bool:
        """Whether a worker has answered all tasks that it was sent in this epoch."""
        self._forget_answered()
        return worker_id >= len(self._sent) or not self._sent[worker_id]

    def choose(self, seq: int) -> int:
        """The worker to send a task to: one of those that have the fewest that are not done.

        Args:
            seq: The task's number.
        """
        sent = self._sent
        to_do = self._to_do()
        worker_id = to_do.index(min(to_do))
        sent[worker_id].append(seq)
        return worker_id

    def _to_do(self) -> list[int]:
        """How many tasks each worker that is given some has not answered."""
        self._forget_answered()
        return [len(sent) for sent in self._sent[: self.serving]]

    def _forget_answered(self) -> None:
        arrived, outstanding = self._arrived, self._outstanding
        for sent in self._sent:
            # A worker answers in the order of its tasks.
            while sent and (sent[0] in arrived or sent[0] not in outstanding):
                sent.popleft()

    def note_return(self) -> None:
        """A batch has been returned while at least ``most_tasks`` others are on their way."""
        self._unchanged += 1
        if self._unchanged >= self.window > self._pool.most_tasks:
            self._set_window(self.window - 1)

    def may_refill(self, on_their_way: int) -> bool:
        """Whether a task beyond ``most_tasks`` is to be sent though nobody waits.

        Only what a worker needs to have ``prefetch_factor`` of them: a task that is sent early may be sent
        to a worker that is about to take long.

        Args:
            on_their_way: Tasks sent and not returned yet.
        """
        if on_their_way >= self.window or min(self._to_do()) >= self._prefetch_factor:
            return False
        return self._pool.has_room_for_more()

    def is_stalled(self, seq: int) -> bool:
        """Whether a worker has nothing to do, while the program waits for a batch of another.

        Not when that wait has been longer than the loader's timeout: then somebody hangs, and further
        batches of the others would only put off the error.

        Args:
            seq: The number of the batch that is waited for.
        """
        if min(self._to_do()) > 0:
            return False
        if self._timeout_s > 0:
            now_s = time.monotonic()
            if seq != self._waiting_for:
                self._waiting_for, self._waiting_since_s = seq, now_s
            return now_s - self._waiting_since_s < self._timeout_s
        return True

    def may_widen(self, on_their_way: int) -> bool:
        """Whether a further task is to be sent for a worker that had nothing to do.

        Args:
            on_their_way: Tasks sent and not returned yet.
        """
        if min(self._to_do()) >= self._enough or not self._pool.has_room_for_more():
            return False
        if on_their_way >= self.window:
            self._set_window(on_their_way + 1)
        return True

    def _set_window(self, window: int) -> None:
        self.window = window
        self._unchanged = 0
        self._pool.warm_slots = max(self._pool.base_slots, window + 2)
