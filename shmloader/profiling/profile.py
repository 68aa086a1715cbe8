"""`Profile`: switches the profiling of one loader on and off. Main process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, Self

from shmloader.errors import LoaderError
from shmloader.memory.limits import ProcessorUse, processor_use
from shmloader.profiling.recorder import BatchRecorder, Recorders, without
from shmloader.profiling.replay import Replay
from shmloader.profiling.report import ProfileReport
from shmloader.statistics import Counters, LoaderStatistics
from shmloader.verdict import Evidence

Tell = Callable[[ProfileReport], object]


class Profile:
    """The measurement of a loader's time, batch by batch: a context manager from ``loader.profile()``.

    Epochs that begin inside the block are measured, in the workers too, which send their times with the
    batches. ``print(profile)`` shows the table, at any moment and after the block. Blocks may
    lie in each other; each has a profile of its own.

    Args:
        counters: The loader's.
        statistics: Gives the loader's statistics.
        pids: Gives the ids of its worker processes.
        every_s: Seconds from one call of ``tell`` to the next.
        tell: Called with the report as ``next()`` begins, in the program's thread. What it raises comes from
            that call of ``next()``, and no batch is lost.
        replay: Whether each epoch's first batch comes again and again; see `Replay`.
    """

    def __init__(
        self,
        counters: Counters,
        statistics: Callable[[], LoaderStatistics],
        pids: Callable[[], Iterable[int | None]],
        every_s: float = 10.0,
        tell: Tell | None = None,
        *,
        replay: bool = False,
    ) -> None:
        self._counters, self._statistics, self._pids = counters, statistics, pids
        self._recorder = BatchRecorder(every_s, None if tell is None else lambda: tell(self.report()))
        self._replays = replay
        self._before: ProcessorUse | None = None
        self._first: LoaderStatistics | None = None
        self._report: ProfileReport | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring."""
        self._report = self.report()
        self._recorder.end()
        self._counters.record(without(self._counters.recorder, self._recorder))
        self._counters.end_replay(self._replay)

    def begin(self) -> None:
        """Measure the epochs that begin from now on; once, so that the figures are of one block."""
        if self._before is not None:
            raise LoaderError("this profile has measured a block already: call loader.profile() for each")
        self._before, self._first = processor_use(self._pids()), self._statistics()
        outer = self._counters.recorder
        if self._replays:  # workers, whose times would be those of one batch, are not asked
            self._counters.begin_replay(self._replay)
        else:
            self._counters.record(self._recorder if outer is None else Recorders(outer, self._recorder))

    def _replay(self, batches: Any, length: int | None) -> Replay:
        return Replay(batches, length, self._recorder)

    def report(self) -> ProfileReport:
        """The figures so far."""
        if self._report is not None:
            return self._report
        if self._before is None or self._first is None:
            raise LoaderError("the profile has not begun: use it as `with loader.profile() as profile:`")
        if self._replays:
            return ProfileReport.of(self._recorder, Evidence(0, 0.0, replays=True))
        now, first = self._statistics(), self._first
        shares: dict[str, Any] = processor_use(self._pids()).shares_since(self._before)
        evidence = replace(
            now.evidence(),
            first_s=now.wait_for_first_batches_s - first.wait_for_first_batches_s,
            start_s=now.wait_for_starts_s - first.wait_for_starts_s,
            in_process_s=now.in_process_s - first.in_process_s,
            made_s=now.workers_made_s - first.workers_made_s,  # also of epochs that were begun before it
            spills=now.spills - first.spills,
            **shares,
        )
        return ProfileReport.of(self._recorder, evidence)

    def save_picture(self, path: str | PathLike[str]) -> None:
        """Draw the batches over time: `ProfileReport.save_picture`."""
        self.report().save_picture(path)

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write Chrome trace events: `ProfileReport.save_trace`."""
        self.report().save_trace(path)

    def __str__(self) -> str:
        return str(self.report())
