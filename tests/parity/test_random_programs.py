"""Random programs get torch's batches, exceptions and generators; ``SHMLOADER_LONG=1`` runs 3,000."""

from __future__ import annotations

import os
from collections.abc import Iterator

import program_runs
import pytest
import torch
from forced_growth import grow_at

from .run import descriptors_for_torch

PROGRAMS = 3000 if os.environ.get("SHMLOADER_LONG") == "1" else 30
AT_ONCE = 10


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with descriptors_for_torch():
        yield
    torch.set_num_threads(threads)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_random_programs_are_torchs(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grow_at(monkeypatch, {2, 6, 11})
    for seed in range(first, first + AT_ONCE):
        assert not program_runs.differences(seed)
