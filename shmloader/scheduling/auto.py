"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the rule. Arithmetic only; main process.

Workers are added while the program waits for them and they are busy; batches in advance are added while the
program waits although workers have time. Nothing is ever taken back, and after `MOST_BATCHES` batches nothing
is added any more. `auto_growth` measures, and carries out what this decides.
"""

from __future__ import annotations

import math

from shmloader.statistics import AutotuneReport

MOST_BATCHES = 200
"""Batches after which the choice is settled."""
MOST_PREFETCH = 16
"""Most batches in advance per worker."""

# A decision is made of so many batches, and of so many seconds: quicker batches show how the system switches
# between processes, and those under half a millisecond never come to a decision within `MOST_BATCHES`.
_PERIOD = 20
_PERIOD_S = 0.1
_KEEPS_UP = 0.03  # a program that waits for a smaller share of its time has enough workers
_BUSY = 0.25  # workers that wait for a smaller share of their time are busy
_SPARE = 1.1  # workers are counted for so much more than the program was seen to take
_HELPS = 0.5  # a step that gains a smaller share of what was expected is the last one of workers


class Auto:
    """Decides for one loader, over all its epochs, until it has settled.

    Args:
        num_workers: Workers to begin with.
        prefetch_factor: Batches in advance per worker to begin with.
        given: The program's numbers of both, which stay; None for what is chosen.
        most_workers: Most workers there may be, where their number is chosen.

    Attributes:
        num_workers: Workers that are wanted.
        prefetch_factor: Batches in advance per worker that are wanted.
        given: As above.
        most_workers: Most workers there may be.
        batches: Batches returned until it settled.
        settled: Whether nothing is added any more.
    """

    def __init__(
        self,
        num_workers: int,
        prefetch_factor: int,
        given: tuple[int | None, int | None],
        most_workers: int,
    ) -> None:
        self.given = given
        self.most_workers = most_workers if given[0] is None else num_workers
        self.num_workers = min(num_workers, self.most_workers)
        self.prefetch_factor = prefetch_factor
        self.batches = 0
        self._most_prefetch = prefetch_factor if given[1] is not None else max(prefetch_factor, MOST_PREFETCH)
        self._why = self._figures = ""
        self._rate_wanted = 0.0  # batches per second that the last step has to bring
        self._period: list[tuple[float, float, float]] = []
        self._look_at_bounds()

    def _look_at_bounds(self) -> None:
        self.settled = (self.num_workers, self.prefetch_factor) == (self.most_workers, self._most_prefetch)
        if self.given[0] is None and self.num_workers == self.most_workers:
            self._why = f"one worker for each of {self.most_workers} usable cores"

    def report(self) -> AutotuneReport:
        """The choice and its reasons, for `LoaderStatistics`."""
        figures = self._figures or "batches were too quick, or epochs too short, to measure"
        why = "; ".join(filter(None, ["" if self.settled else "still measuring", self._why, figures]))
        return AutotuneReport(self.num_workers, self.prefetch_factor, self.settled, self.batches, why)

    def note(self, measured: tuple[float, float, float] | None) -> None:
        """Note that a batch was returned; may change what is wanted.

        Args:
            measured: Seconds since the batch before: those of the program, and of ``next()`` without waiting;
                those that ``next()`` waited; those that workers, summed, waited for tasks. None if they show
                something else than the present choice.
        """
        if self.settled:
            return
        self.batches += 1
        if measured is not None:
            self._period.append(measured)
            if len(self._period) >= _PERIOD:
                self._decide(*map(sum, zip(*self._period, strict=True)))
        self.settled |= self.batches >= MOST_BATCHES

    def settle(self, num_workers: int, prefetch_factor: int, why: str) -> None:
        """Settle on a choice, because more cannot be had or does not help."""
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.settled, self._why = True, why

    def _decide(self, own_s: float, wait_s: float, idle_s: float) -> None:
        batches, workers, own_s = len(self._period), self.num_workers, max(own_s, 1e-9)
        total_s = own_s + wait_s
        if total_s < _PERIOD_S:
            return
        self._period.clear()
        busy_s = max(workers * total_s - idle_s, 0.0)
        self._figures = (
            f"a batch takes a worker {1e3 * busy_s / batches:.3g} ms and the program "
            f"{1e3 * own_s / batches:.3g} ms"
        )
        rate, rate_wanted, self._rate_wanted = batches / total_s, self._rate_wanted, 0.0
        if rate < rate_wanted:
            self.settle(workers, self.prefetch_factor, f"no faster with {workers} workers than with fewer")
        elif wait_s <= _KEEPS_UP * total_s:
            self._why = "the workers keep up with the program"
        elif idle_s > _BUSY * workers * total_s:
            self._why = "the program waited although workers had time"
            self.prefetch_factor = min(2 * self.prefetch_factor, self._most_prefetch)
        elif workers < self.most_workers:
            self._why = f"the program waited for {workers} busy worker(s)"
            needed = math.ceil(min(_SPARE * busy_s / own_s, self.most_workers))
            self.num_workers = max(workers + 1, needed)
            expected = min(self.num_workers / workers, total_s / own_s)
            self._rate_wanted = rate * (1 + _HELPS * (expected - 1))
        if not self.settled:
            self._look_at_bounds()
