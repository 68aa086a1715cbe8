"""The restart policy: which dead or silent workers are replaced. Main process only."""

from __future__ import annotations

from shmloader.scheduling.ledger import Task

_MOST_DEATHS = 2  # a batch that has ended so many workers is not tried again


class RestartPolicy:
    """Counts restarts of one iterator, and deaths per task.

    Args:
        restarts: Workers that may be replaced.
        timeout_s: Seconds after which silent workers are treated as dead ones; 0 for never.

    Attributes:
        restarts_left: Workers that may still be replaced.
        timeout_s: As above, None for never.
    """

    def __init__(self, restarts: int, timeout_s: float) -> None:
        self.restarts_left = restarts
        self.timeout_s = timeout_s if timeout_s > 0 else None

    def may_replace(self, culprit: Task | None) -> bool:
        """Whether a worker may be replaced.

        Args:
            culprit: The task that it was working on, if any; one that has ended two is not tried again.
        """
        return self.restarts_left > 0 and (culprit is None or culprit.deaths + 1 < _MOST_DEATHS)

    def note_replacement(self, culprit: Task | None) -> None:
        """Count a worker that is replaced."""
        self.restarts_left -= 1
        if culprit is not None:
            culprit.deaths += 1

    def why_not(self, culprit: Task | None, *, died: bool) -> str:
        """A sentence on the workers that have ended at a task before; "" if none has.

        Args:
            culprit: The task.
            died: Whether the present worker has ended as well, or is silent.
        """
        if culprit is None or not culprit.deaths:
            return ""
        if died:
            return f"{culprit.deaths + 1} workers have ended at the first of its index batches."
        return f"{culprit.deaths} worker(s) have ended at the first of its index batches before."
