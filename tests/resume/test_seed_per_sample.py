"""``seed_per_sample``: draws depend on seed, epoch and place alone, and the program's draws stay the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from resume_datasets import Drawing
from torch.utils.data import IterableDataset

from shmloader import DataLoader


def batches(**options: Any) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(3)
    with DataLoader(Drawing(30), 4, shuffle=True, generator=generator, **options) as loader:
        return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 2, "dispatch": "dynamic"},
        {"num_workers": 2, "dispatch": "dynamic", "seed_per_sample": None},
        {"num_workers": "auto", "seed_per_sample": None},
        {"dispatch": "dynamic", "seed_per_sample": None},
    ],
    ids=str,
)
def test_draws_are_those_without_workers(options: dict[str, Any]) -> None:
    assert batches(**{"seed_per_sample": True} | options) == batches(seed_per_sample=True)


def test_none_and_false_leave_static_dispatch_as_torch_has_it() -> None:
    """A worker draws from one stream for all its batches."""
    assert batches(num_workers=1) == batches(num_workers=1, seed_per_sample=False)
    assert batches(num_workers=1) != batches(num_workers=1, seed_per_sample=True)


def test_without_workers_the_programs_generators_stay_as_they_were() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    random.gauss(0, 1), np.random.standard_normal()  # each generator holds one number back
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    batches(seed_per_sample=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert repr(np.random.get_state()) == before[2]


def test_they_stay_so_where_a_sample_raises() -> None:
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Drawing(30, bad=(0,)), 4, generator=generator, seed_per_sample=True)
    with pytest.raises(ValueError, match="sample 0 is bad"):
        list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_and_other_values_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ValueError, match="seed_per_sample=True needs a map-style dataset"):
        DataLoader(Stream(), seed_per_sample=True)
    with pytest.raises(TypeError, match="seed_per_sample must be True or False, not 1"):
        DataLoader(Drawing(3), seed_per_sample=1)  # type: ignore[arg-type]
