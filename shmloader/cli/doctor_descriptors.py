"""What a loader takes of the main process's descriptors. Arithmetic only: what it knows is given to it."""

from __future__ import annotations

from dataclasses import dataclass

from shmloader.cli.doctor_trial import Trial

USUAL_PER_WORKER = 5
USUAL_FIXED = 3
_TO_START = 12  # both ends of the worker's two pipes, and eight that `workers.launch` wants free besides
_PICKLE = 1  # what workers are given is held open while they start, except under fork


@dataclass(frozen=True)
class Descriptors:
    """Descriptors that can still be opened, and what a loader takes of them.

    The defaults are docs/robustness.md's figures, for where nothing could be measured.

    Attributes:
        left: How many can still be opened; None for no limit.
        fixed: What a loader takes, however many workers it has.
        per_worker: What each worker takes besides.
        to_start: What must be free when a worker is started, those that it keeps among them.
    """

    left: int | None = None
    fixed: int = USUAL_FIXED
    per_worker: int = USUAL_PER_WORKER
    to_start: int = _TO_START

    def held(self, num_workers: int) -> int:
        """What a loader with so many workers takes while it loads."""
        return self.fixed + num_workers * self.per_worker

    def needed(self, num_workers: int) -> int:
        """What must be free for it: the last worker's start takes more than the worker keeps."""
        return self.fixed + (num_workers - 1) * self.per_worker + max(self.to_start, self.per_worker)

    @property
    def most_workers(self) -> int | None:
        """Workers that what is left is enough for; None for no limit."""
        if self.left is None:
            return None
        beyond_one = self.left - self.needed(1)
        return 0 if beyond_one < 0 else 1 + beyond_one // self.per_worker


def count_descriptors(
    left: int | None, start_method: str, one: Trial | None, two: Trial | None
) -> Descriptors:
    """Tell what a worker takes from what the loader takes, by a trial with one worker and one with two.

    One trial cannot: what a loader takes once, and under spawn the resource tracker, would be counted for
    every worker. Where the second trial did not work (the limit may be too low for it), a worker is taken
    to cost what it usually does.

    Args:
        left: How many can still be opened; None for no limit.
        start_method: How the workers of both trials were started.
        one: The trial with one worker; None if nothing works.
        two: The trial with two workers; None if it was not made.
    """
    to_start = _TO_START + (_PICKLE if start_method != "fork" else 0)
    with_one, with_two = (trial.answer.get("descriptors") if trial else None for trial in (one, two))
    if with_one is None:
        return Descriptors(left, to_start=to_start)
    per_worker = USUAL_PER_WORKER if with_two is None else max(1, with_two - with_one)
    return Descriptors(left, max(0, with_one - per_worker), per_worker, to_start)
