"""How many workers, and how far ahead: ``num_workers="auto"`` and ``prefetch_factor="auto"``.

Only the choosing: measurements in, choices out, no clock, no process. `tuning` measures and carries out
what is chosen. Main process only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

from shmloader.scheduling.trials import Bounds, Choice, Sample, Trial
from shmloader.statistics import AutotuneReport

MOST_BATCHES = 200
"""The choice is made when so many batches were returned, whatever was measured."""
MOST_PREFETCH = 16
"""More batches in advance per worker are never chosen."""
_NO_LIMIT = 1 << 30
_SHORT, _LONG = 20, 60  # batches in a trial; the long ones see what one batch in twenty does
_LEAST = 10  # a trial of fewer says nothing
_LONG_ENOUGH_S = 0.1  # a short one goes on until it has taken so long
_TOO_QUICK_S = 0.03  # what took less was timed by how the machine switches between processes
_KEEPS_UP = 0.03  # a program that waits for a smaller share of its time has enough workers
_IDLE = 0.05  # workers that wait for a smaller share of theirs have nothing to do earlier
_HELPS = 1.07  # so much faster is faster, on a machine that does other things too
_AS_GOOD = 0.97  # and so little slower is not slower


class _Request(NamedTuple):
    """A trial that is wanted.

    Attributes:
        choice: Of what.
        batches: How long.
        otherwise: What is chosen if there is no time for it any more.
    """

    choice: Choice
    batches: int
    otherwise: Choice


_Search = Generator[_Request, Trial, Choice]
_Step = Generator[_Request, Trial, Trial]


def _nobody() -> None:
    return None


def _count(trial: Trial) -> str:
    """How many workers a trial had, for people."""
    number = trial.choice.num_workers
    return f"{number} worker" if number == 1 else f"{number} workers"


class Autotune:
    """Chooses for one loader, over all its epochs, until it has settled.

    The search is a sequence of trials: of what there is, of as many workers as the measurements ask for, of
    fewer if they have nothing to do, and of more batches in advance. What does not make the program faster is
    taken back. A trial's first batches, which still come from the choice before it, do not count.

    Args:
        start: What is begun with.
        workers: Whether the number of workers is to be chosen.
        prefetch: Whether the number of batches in advance is.
        most_workers: Most workers that may ever be chosen: the cores.

    Attributes:
        choice: What is wanted now.
        settled: Whether it stays so.
        batches: How many batches were returned until then.
        limit_tasks: Most tasks that may be on their way, as far as that has turned out.
        owner: Gives who measures; others carry out what is chosen.
    """

    def __init__(self, start: Choice, *, workers: bool, prefetch: bool, most_workers: int) -> None:
        self.tunes_workers = workers
        self.tunes_prefetch = prefetch
        self.most_workers = most_workers if workers else start.num_workers
        self.choice = start._replace(num_workers=min(start.num_workers, self.most_workers))
        self.settled = False
        self.batches = 0
        self.limit_tasks = _NO_LIMIT
        self.owner: Callable[[], object | None] = _nobody
        self._limit_workers = self.most_workers
        self._bounds: Callable[[], Bounds] | None = None  # while a batch is noted
        self._why_workers = ""
        self._why_prefetch = ""
        self._why_limit = ""
        self._figures = ""
        self._samples: list[Sample] = []
        self._skip = 0
        self._search = self._find()
        self._request = next(self._search)
        self._begin()

    @property
    def most_tasks(self) -> int:
        """Tasks of the largest choice there may be."""
        return self.most_workers * (MOST_PREFETCH if self.tunes_prefetch else self.choice.prefetch_factor)

    def report(self) -> AutotuneReport:
        """For `LoaderStatistics`."""
        parts = [self._why_workers, self._why_prefetch, self._why_limit, self._figures]
        if not self.settled:
            parts.insert(0, "still measuring")
        why = "; ".join(part for part in parts if part)
        return AutotuneReport(*self.choice, settled=self.settled, batches=self.batches, why=why)

    # --- measurements in

    def note(self, sample: Sample | None, bounds: Callable[[], Bounds]) -> None:
        """A batch was returned.

        Args:
            sample: What was measured since the one before; None if that was not of `choice`, or of more than
                loading.
            bounds: Asked for what may be chosen, before more is.
        """
        if self.settled:
            return
        self.batches += 1
        self._bounds = bounds
        self._take(sample)
        self._bounds = None

    def _take(self, sample: Sample | None) -> None:
        if sample is not None:
            if self._skip > 0:
                self._skip -= 1
            else:
                self._samples.append(sample)
            if len(self._samples) >= self._request.batches and self._is_long_enough():
                self._conclude()
        if self.batches >= MOST_BATCHES and not self.settled:
            self._run_out()

    def _is_long_enough(self) -> bool:
        if len(self._samples) >= _LONG:
            return True
        return sum(sample.own_s + sample.wait_s for sample in self._samples) >= _LONG_ENOUGH_S

    def limit(self, *, why: str, num_workers: int = _NO_LIMIT, tasks: int = _NO_LIMIT) -> None:
        """So much is the most from now on; what is chosen is made smaller if need be, at any time.

        Args:
            why: Why, for people.
            num_workers: Most workers.
            tasks: Most tasks on their way at once.
        """
        self._limit_workers = min(num_workers, self._limit_workers)
        self.limit_tasks = min(tasks, self.limit_tasks)
        fitting = self._fit(self.choice)
        if fitting != self.choice:
            self.choice = fitting
            self._why_limit = why
            self._samples.clear()

    # --- choices out

    def _begin(self) -> None:
        """Begin the requested trial, or settle if there is no time for it."""
        choice, batches, _ = self._request
        self._samples.clear()
        self._skip = min(choice.num_workers + 2, 34)
        left = MOST_BATCHES - self.batches - self._skip
        if left < _LEAST:
            self._settle(self._request.otherwise)
        else:
            self.choice = choice
            self._request = self._request._replace(batches=min(batches, left))

    def _conclude(self) -> None:
        """Go on with what the trial has shown."""
        trial = Trial.of(self.choice, self._samples)
        if trial.idles < 1.0:  # else what was measured is less than the last answer's wait
            self._figures = (
                f"a batch takes a worker {1e3 * trial.busy_s:.3g} ms and the program "
                f"{1e3 * trial.own_s / trial.batches:.3g} ms"
            )
        try:
            self._request = self._search.send(trial)
        except StopIteration as end:
            self._settle(end.value)
        else:
            self._begin()

    def _run_out(self) -> None:
        """No time is left: go by what the trial under way has shown, if that is enough to say anything."""
        if len(self._samples) >= _LEAST:
            self._conclude()  # a further trial is not begun any more
        if not self.settled:
            self._settle(self._request.otherwise)

    def _settle(self, choice: Choice) -> None:
        self.settled = True
        self.choice = self._fit(choice)
        self._samples.clear()
        self._search.close()

    def _fit(self, choice: Choice, bounds: Bounds | None = None) -> Choice:
        """As much of a choice as the bounds allow: fewer in advance rather than fewer workers."""
        workers, prefetch = choice
        most_workers, most_tasks = self._limit_workers, self.limit_tasks
        if bounds is not None:
            most_workers, most_tasks = min(most_workers, bounds.num_workers), min(most_tasks, bounds.tasks)
        if self.tunes_prefetch:
            prefetch = max(1, min(prefetch, most_tasks // workers))
        if self.tunes_workers:
            workers = max(1, min(workers, most_workers, most_tasks // prefetch))
        return Choice(workers, prefetch)

    def _fit_now(self, choice: Choice) -> Choice:
        return self._fit(choice, self._bounds() if self._bounds is not None else None)

    # --- the search; each step gives a request and gets its trial

    def _find(self) -> _Search:
        trial = yield self._try(self.choice, _SHORT if self.tunes_workers else _LONG)
        if self.tunes_workers:
            trial = yield from self._find_workers(trial)
        if self.tunes_prefetch:
            trial = yield from self._find_prefetch(trial)
        return trial.choice

    def _try(self, choice: Choice, batches: int, otherwise: Choice | None = None) -> _Request:
        fitting = self._fit(choice)
        return _Request(fitting, max(batches, min(2 * fitting.num_workers, 64)), otherwise or fitting)

    def _find_workers(self, trial: Trial) -> _Step:
        """As many workers as help; gives the trial of what was chosen."""
        while True:
            if trial.waits <= _KEEPS_UP and trial.batches < _LONG // 2:
                trial = yield self._try(trial.choice, _LONG)  # does it keep up in the long run?
            wanted = self._more_workers(trial)
            if wanted.num_workers <= trial.choice.num_workers:
                break
            # What the measurements ask for counts, too, if there is no time to try it.
            self._why_workers = f"as measured with {_count(trial)}"
            more = yield self._try(wanted, _SHORT, otherwise=wanted)
            if more.choice.num_workers <= trial.choice.num_workers:
                return more  # it could not be had
            if more.total_s < _TOO_QUICK_S:
                return more  # the trial cannot tell
            if more.rate < _HELPS * trial.rate:
                again = yield self._try(trial.choice, _SHORT)  # or was the machine busy meanwhile?
                if more.rate < _HELPS * again.rate:
                    self._why_workers = f"no faster with {_count(more)}"
                    return again
            if more.choice.prefetch_factor < trial.choice.prefetch_factor:
                self._why_limit = "no more batches in advance fit in the memory budget"
            enough = math.ceil(1.25 * trial.choice.num_workers * more.rate / trial.rate)
            trial = more
            if enough <= more.choice.num_workers // 2:
                trial = yield from self._fewer_workers(trial, enough)
                break
        if trial.waits <= _KEEPS_UP and trial.workers_needed < trial.choice.num_workers:
            trial = yield from self._fewer_workers(trial, trial.workers_needed)
        return trial

    def _more_workers(self, trial: Trial) -> Choice:
        """What the measurements ask for."""
        choice = trial.choice
        if trial.waits <= _KEEPS_UP:
            self._why_workers = "the workers keep up with the program"
            return choice
        self._why_workers = "the workers have time to spare"
        needed = trial.workers_needed
        if needed <= choice.num_workers and (trial.idles <= _IDLE or not self.tunes_prefetch):
            needed = choice.num_workers + 1
        if choice.num_workers >= self.most_workers:
            self._why_workers = f"one worker for each of {self.most_workers} usable cores"
        wanted = choice._replace(num_workers=min(needed, self.most_workers))
        if wanted.num_workers <= choice.num_workers:
            return choice
        fitting = self._fit_now(wanted)
        if fitting.num_workers < wanted.num_workers:
            self._why_workers = "no more workers fit in the memory"
        return fitting if fitting.num_workers > choice.num_workers else choice

    def _fewer_workers(self, trial: Trial, enough: int) -> _Step:
        """Fewer workers, if they are as good."""
        fewer = trial.choice._replace(num_workers=enough)
        less = yield self._try(fewer, _SHORT, otherwise=trial.choice)
        if less.rate < _AS_GOOD * trial.rate and less.waits > _KEEPS_UP:
            self._why_workers = f"slower with {_count(less)}"
            return trial
        self._why_workers = f"no faster with {_count(trial)}"
        return less

    def _find_prefetch(self, trial: Trial) -> _Step:
        """More in advance, if the program waits although the workers have time; gives what was chosen."""
        if trial.batches < _LONG // 2:
            trial = yield self._try(trial.choice, _LONG)
        choice = trial.choice
        self._why_prefetch = "no more batches in advance are needed"
        if trial.waits <= _KEEPS_UP or trial.idles <= _IDLE or trial.total_s < _TOO_QUICK_S:
            return trial
        # What the others must have to do while one batch, or the program, takes its longest.
        depth = max(2 * choice.prefetch_factor, math.ceil(min(trial.longest_s / trial.busy_s, 1e6)) + 1)
        wanted = choice._replace(prefetch_factor=min(depth, MOST_PREFETCH))
        fitting = self._fit_now(wanted)
        if fitting.prefetch_factor < wanted.prefetch_factor:
            self._why_prefetch = "no more batches fit in the memory budget"
        if fitting.num_workers < choice.num_workers or fitting.prefetch_factor <= choice.prefetch_factor:
            return trial
        deeper = yield self._try(fitting, _LONG, otherwise=choice)
        helped = deeper.rate >= _HELPS * trial.rate
        self._why_prefetch = (
            f"{fitting.prefetch_factor} batches in advance were {'' if helped else 'not '}faster"
        )
        return deeper if helped else trial
