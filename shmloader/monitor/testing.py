"""Holds a dataset to a bound in tests: how much of it each forked worker copies.

With ``pytest_plugins = ["shmloader.monitor.testing"]`` in ``conftest.py`` it is the fixture ``check_growth``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.utils.data

from shmloader.memory.process_memory import read_memory
from shmloader.monitor.findings import cure, megabytes
from shmloader.monitor.inside import Report, listen


def check_growth(dataset: Any, most_nbytes: int, *, num_workers: int = 2, batch_size: int = 64) -> None:
    """Read a random epoch with torch's loader in forked workers, and check what each of them copies.

    Args:
        dataset: A map-style dataset.
        most_nbytes: Most bytes by which the private memory of a worker may grow. A few MB are its own.
        num_workers: Workers.
        batch_size: Samples in each batch. Batches are dropped in the workers.

    Raises:
        AssertionError: If a worker grows by more, with the largest object in the dataset and the cure.
    """
    private: Any = multiprocessing.get_context("fork").Array("q", num_workers)  # before the first samples

    def note_private(worker: int) -> None:
        private[worker] = _private_nbytes(os.getpid())

    loader: Any = torch.utils.data.DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=len,
        worker_init_fn=note_private,
        multiprocessing_context="fork",
        persistent_workers=True,  # so that they can be read when the epoch is over
    )
    reports: list[Report] = []
    stop = listen(reports.append)
    try:
        batches = iter(loader)
    finally:
        stop()
    for _ in batches:
        pass
    (report,) = reports
    growths = [_private_nbytes(pid) - before for pid, before in zip(report.workers, private, strict=True)]
    if max(growths) > most_nbytes:
        raise AssertionError(
            f"a worker's private memory has grown by {megabytes(max(growths))} in one epoch, which is more "
            f"than {megabytes(most_nbytes)}. The largest object that workers copy is `{report.owner}`, with "
            f"{megabytes(report.nbytes)}. {cure(report)}"
        )


def _private_nbytes(pid: int) -> int:
    return read_memory(pid).get("Private_Dirty", 0)


try:
    import pytest
except ImportError:  # then there is no fixture, and the function is as good
    pass
else:

    @pytest.fixture(name="check_growth")
    def _check_growth() -> Callable[..., None]:
        """`check_growth`, for tests that would rather not import it."""
        return check_growth
