"""Growth of ``"auto"`` at moments that a test chooses, since its own depend on time."""

from __future__ import annotations

import pytest

from shmloader.memory.limits import Cores
from shmloader.order.auto import MOST_PREFETCH, Auto


def grow_at(patch: pytest.MonkeyPatch, moments: set[int]) -> None:
    """Let ``"auto"`` want more after certain numbers of batches: twice the tasks, and one worker."""

    def note(auto: Auto, measured: object) -> None:
        auto.batches += 1
        if auto.batches in moments:
            auto.num_workers = min(auto.num_workers + 1, auto.most_workers)
            if auto.given[1] is None:
                auto.prefetch_factor = min(2 * auto.prefetch_factor, MOST_PREFETCH)

    patch.setattr(Auto, "note", note)
    patch.setattr("shmloader.order.auto.cores", lambda: Cores(3, 3, None))
