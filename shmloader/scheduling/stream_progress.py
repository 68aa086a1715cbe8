"""Progress of one pass over an iterable-style dataset: how it is divided, and what was returned of it.

Main process only.
"""

from __future__ import annotations

import logging
from typing import Any

from shmloader.ranks import check_equal_ends, rank_and_ranks
from shmloader.worker.streams import OWN, STRIDE, StreamReport, StreamRules

_log = logging.getLogger("shmloader")
_told: set[str] = set()  # classes of datasets that divide themselves


class StreamProgress:
    """Progress of one pass.

    Args:
        loader: The loader.

    Attributes:
        rules: How the workers are to divide the stream.
    """

    def __init__(self, loader: Any) -> None:
        rank, ranks = rank_and_ranks()
        self.rules = StreamRules(
            shard=loader.shard is not None, rank=rank, ranks=ranks, batch_size=loader.batch_size or 1
        )
        self._dataset_name = type(loader.dataset).__name__
        self._timeout_s = float(loader.timeout)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch from the stream's start."""
        self._layout = OWN
        self._batches = 0
        self._ended = False

    def count(self) -> None:
        """Count a batch that is being returned, or what comes in its place."""
        self._batches += 1

    def take(self, report: StreamReport) -> None:
        """Take in what a worker said with the batch that was counted last."""
        self._layout = report.layout
        if self.rules.shard and report.layout == OWN and self._dataset_name not in _told:
            _told.add(self._dataset_name)
            _log.warning(
                "%s reads get_worker_info().num_workers, and so divides its stream itself: shard='auto' "
                "leaves that to it",
                self._dataset_name,
            )

    def end_epoch(self) -> None:
        """Compare the epoch's length with that of the other ranks, where ranks may have others.

        Raises:
            LoaderError: If it differs.
        """
        if self.rules.shard and self._layout != STRIDE and not self._ended:
            self._ended = True
            check_equal_ends(self._batches, self._timeout_s)
