"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the rule. Arithmetic only; main process.

Workers are added while the program waits for them and they are busy; batches in advance are added while the
program waits although workers have time. Nothing is ever taken back, and after `MOST_BATCHES` batches nothing
is added any more. `growth` measures, and carries out what this decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shmloader.statistics import AutotuneReport

MOST_BATCHES = 200
"""Batches after which the choice is settled."""
MOST_PREFETCH = 16
"""Most batches in advance per worker."""

_PERIOD = 20  # batches between two decisions, ...
_LONG_PERIOD = 60  # ... or so many, if fewer take less than
_LONG_ENOUGH_S = 0.1
_TOO_QUICK_S = 0.03  # a long period that takes less shows only how the system switches between processes
_KEEPS_UP = 0.03  # a program that waits for a smaller share of its time has enough workers
_BUSY = 0.25  # workers that wait for a smaller share of their time are busy
_HELPS = 1.05  # a step that makes the program less than so much faster is the last of its kind


class Measured(NamedTuple):
    """Seconds from one returned batch to the next.

    Attributes:
        own_s: Spent by the program, and by ``next()`` without waiting.
        wait_s: Spent by ``next()`` waiting for a batch.
        idle_s: Spent by workers, summed, waiting for a task.
    """

    own_s: float
    wait_s: float
    idle_s: float


class Auto:
    """Decides for one loader, over all its epochs, until it has settled.

    Args:
        num_workers: Workers to begin with.
        prefetch_factor: Batches in advance per worker to begin with.
        tunes_workers: Whether workers may be added.
        tunes_prefetch: Whether batches in advance may be added.
        most_workers: Most workers there may be.

    Attributes:
        num_workers: Workers that are wanted.
        prefetch_factor: Batches in advance per worker that are wanted.
        tunes_workers: As above.
        tunes_prefetch: As above.
        most_workers: As above.
        batches: Batches returned until it settled.
    """

    def __init__(
        self,
        num_workers: int,
        prefetch_factor: int,
        *,
        tunes_workers: bool,
        tunes_prefetch: bool,
        most_workers: int,
    ) -> None:
        self.most_workers = most_workers if tunes_workers else num_workers
        self.num_workers = min(num_workers, self.most_workers)
        self.prefetch_factor = prefetch_factor
        self.tunes_workers = tunes_workers
        self.tunes_prefetch = tunes_prefetch
        self.batches = 0
        self._may_add_workers = tunes_workers
        self._may_add_prefetch = tunes_prefetch
        self._why_workers = self._why_prefetch = self._figures = ""
        self._period: list[Measured] = []
        self._rate_before = 0.0  # batches per second before the last step
        self._last_step = ""
        self._skip = self._batches_in_flight()

    @property
    def settled(self) -> bool:
        """Whether nothing is added any more."""
        return self.batches >= MOST_BATCHES or not (self._may_add_workers or self._may_add_prefetch)

    def report(self) -> AutotuneReport:
        """The choice and its reasons, for `LoaderStatistics`."""
        parts = [
            "" if self.settled else "still measuring",
            self._why_workers,
            self._why_prefetch,
            self._figures,
        ]
        why = "; ".join(filter(None, parts))
        return AutotuneReport(
            self.num_workers, self.prefetch_factor, settled=self.settled, batches=self.batches, why=why
        )

    def note(self, measured: Measured | None) -> None:
        """Note that a batch was returned; may change what is wanted.

        Args:
            measured: The seconds since the one before; None if they show something else than the present
                choice, such as the start of a worker.
        """
        if self.settled:
            return
        self.batches += 1
        if measured is None:
            return
        if self._skip:
            self._skip -= 1
            return
        self._period.append(measured)
        if len(self._period) >= _PERIOD and self._is_long_enough():
            self._decide()
            self._period.clear()

    def refuse_workers(self, num_workers: int, why: str) -> None:
        """Note that no more than so many workers can be had."""
        self.num_workers = num_workers
        self._may_add_workers = False
        self._why_workers = why

    def refuse_tasks(self, num_workers: int, prefetch_factor: int, why: str) -> None:
        """Note that no more batches can be on their way than with this choice."""
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self._may_add_workers = self._may_add_prefetch = False
        self._why_prefetch = why

    def _is_long_enough(self) -> bool:
        total_s = sum(one.own_s + one.wait_s for one in self._period)
        return total_s >= _LONG_ENOUGH_S or len(self._period) >= _LONG_PERIOD

    def _batches_in_flight(self) -> int:
        """Batches after a step that were still made as before it."""
        return min(self.num_workers + 2, 34)

    def _decide(self) -> None:
        own_s = max(sum(one.own_s for one in self._period), 1e-9)
        total_s = own_s + sum(one.wait_s for one in self._period)
        waits = 1 - own_s / total_s
        idles = min(1.0, sum(one.idle_s for one in self._period) / (self.num_workers * total_s))
        rate = len(self._period) / total_s
        busy_s = self.num_workers * total_s * (1 - idles)
        self._figures = (
            f"a batch takes a worker {1e3 * busy_s / len(self._period):.3g} ms and the program "
            f"{1e3 * own_s / len(self._period):.3g} ms"
        )
        self._end_what_did_not_help(rate)
        if waits <= _KEEPS_UP:
            self._why_workers = "the workers keep up with the program"
        elif total_s < _TOO_QUICK_S:
            self._why_workers = "batches are too quick for more workers to help"
        elif idles <= _BUSY:
            self._add_workers(math.ceil(min(busy_s / own_s, 1e6)), rate)
        else:
            self._add_prefetch(rate)

    def _end_what_did_not_help(self, rate: float) -> None:
        helped = rate >= _HELPS * self._rate_before
        if self._last_step == "workers" and not helped:
            self._may_add_workers = False
            self._why_workers = f"no faster with {self.num_workers} workers than with fewer"
        elif self._last_step == "prefetch" and not helped:
            self._may_add_prefetch = False
            self._why_prefetch = f"no faster with {self.prefetch_factor} batches in advance than with fewer"
        self._last_step = ""

    def _add_workers(self, needed: int, rate: float) -> None:
        """Add as many as are needed to keep up, at most as many again as there are."""
        if not self._may_add_workers:
            return
        if self.num_workers >= self.most_workers:
            self._why_workers = f"one worker for each of {self.most_workers} usable cores"
            return
        wanted = max(self.num_workers + 1, min(needed, 2 * self.num_workers))
        self.num_workers = min(wanted, self.most_workers)
        self._why_workers = f"the program waited for {'one busy worker' if wanted == 2 else 'busy workers'}"
        self._step("workers", rate)

    def _add_prefetch(self, rate: float) -> None:
        if not self._may_add_prefetch or self.prefetch_factor >= MOST_PREFETCH:
            return
        self.prefetch_factor = min(2 * self.prefetch_factor, MOST_PREFETCH)
        self._why_prefetch = "the program waited although workers had time"
        self._step("prefetch", rate)

    def _step(self, kind: str, rate: float) -> None:
        self._last_step, self._rate_before = kind, rate
        self._skip = self._batches_in_flight()
