"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the rule. Arithmetic only; main process.

Workers are added while the program waits for them and they are busy; batches in advance are added while the
program waits although workers have time. Nothing is ever taken back, and after `MOST_BATCHES` batches nothing
is added any more. `auto_growth` measures, and carries out what this decides.
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
_SPARE = 1.1  # workers are counted for so much more than the program was seen to take
_BUSY = 0.25  # workers that wait for a smaller share of their time are busy
_HELPS = 0.5  # a step that gains less than such a share of what was expected is the last of its kind
_LEAST_GAIN = 1.05  # and so is one that makes the program less than so much faster


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
        self._may_add_prefetch = tunes_prefetch and prefetch_factor < MOST_PREFETCH
        self._why_workers = self._why_prefetch = self._figures = ""
        self._period: list[Measured] = []
        self._rate_wanted = 0.0  # batches per second that the last step had to bring
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
        self._why_workers, self._last_step = why, ""

    def refuse_tasks(self, num_workers: int, prefetch_factor: int, why: str) -> None:
        """Note that no more batches can be on their way than with this choice."""
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self._may_add_workers = self._may_add_prefetch = False
        self._why_prefetch, self._last_step = why, ""

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
            self._add_workers(min(_SPARE * busy_s / own_s, 1e6), total_s / own_s, rate)
        else:
            longest_s = max(one.wait_s for one in self._period)
            self._add_prefetch(min(longest_s * len(self._period) / max(busy_s, 1e-9), 1e6), rate)

    def _end_what_did_not_help(self, rate: float) -> None:
        helped = rate >= self._rate_wanted
        if self._last_step == "workers" and not helped:
            self._may_add_workers = False
            self._why_workers = f"no faster with {self.num_workers} workers than with fewer"
        elif self._last_step == "prefetch" and not helped:
            self._may_add_prefetch = False
            self._why_prefetch = f"no faster with {self.prefetch_factor} batches in advance than with fewer"
        self._last_step = ""

    def _add_workers(self, needed: float, most_gain: float, rate: float) -> None:
        """Add as many as are needed; the program may become ``most_gain`` times as fast by it."""
        if not self._may_add_workers:
            return
        if self.num_workers < self.most_workers:
            before = self.num_workers
            self.num_workers = min(max(before + 1, math.ceil(needed)), self.most_workers)
            self._why_workers = f"the program waited for {before} busy worker{'s' * (before > 1)}"
            self._step("workers", rate * self._gain_wanted(min(self.num_workers / before, most_gain)))
        if self.num_workers == self.most_workers:
            self._may_add_workers = False
            self._why_workers = f"one worker for each of {self.most_workers} usable cores"

    def _add_prefetch(self, needed: float, rate: float) -> None:
        """Add so many that other workers have enough to do while one batch takes its longest."""
        if not self._may_add_prefetch:
            return
        self.prefetch_factor = min(max(2 * self.prefetch_factor, math.ceil(needed) + 1), MOST_PREFETCH)
        self._why_prefetch = "the program waited although workers had time"
        self._may_add_prefetch = self.prefetch_factor < MOST_PREFETCH
        self._step("prefetch", rate * _LEAST_GAIN)

    def _gain_wanted(self, expected: float) -> float:
        return max(_LEAST_GAIN, 1 + _HELPS * (expected - 1))

    def _step(self, kind: str, rate_wanted: float) -> None:
        self._last_step, self._rate_wanted = kind, rate_wanted
        self._skip = self._batches_in_flight()
