"""Counts and epochs that a program has as NumPy's or torch's numbers, and numbers that are no count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from epoch_datasets import Tells
from resume_loaders import build, take, values
from resume_settings import by_json
from torch.utils.data import DistributedSampler, Sampler

from shmloader import DataLoader, ResumeError, ShardedSampler, skip_batches


class Shuffled(Sampler[int]):
    """An order by the epoch alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(int(self.epoch)).sample(range(12), 12))


@pytest.mark.parametrize("three", [np.int64(3), torch.tensor(3)])
def test_a_count_and_an_epoch_may_be_any_whole_number(three: Any) -> None:
    loader = build(0)
    iterator = iter(loader)
    take(iterator, 3)
    assert by_json(loader.state_dict(taken=three)) == loader.state_dict()
    data: Any = range(12)
    samplers: list[Sampler[int]] = [DistributedSampler(data, 1, 0), ShardedSampler(data, 1, 0)]
    for sampler in samplers:
        sharded = DataLoader(data, batch_size=2, sampler=sampler)
        sharded.set_epoch(three)
        batches = values(sharded)
        assert sharded.batch(three, three).tolist() == batches[3]
    told = DataLoader(Tells())
    told.set_epoch(three)
    next(iter(told))
    assert by_json(told.state_dict())["set_epoch"] == 3


def test_a_sampler_may_be_told_of_epochs_by_numpys_numbers() -> None:
    sampler = Shuffled()
    loader = DataLoader(range(12), batch_size=2, sampler=sampler)
    sampler.set_epoch(np.int64(3))  # type: ignore[arg-type]
    iterator = iter(loader)
    take(iterator, 2)
    again = DataLoader(range(12), batch_size=2, sampler=Shuffled())
    again.load_state_dict(by_json(loader.state_dict()))
    assert values(again) == values(iterator)


def test_what_is_no_whole_number_is_refused() -> None:
    loader = build(0)
    list(loader)
    for call in (loader.set_epoch, lambda number: loader.state_dict(taken=number)):
        for wrong in (1.5, "1"):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                call(wrong)
    with pytest.raises(ResumeError, match="no state after -1 batches"):
        loader.state_dict(taken=-1)
    with pytest.raises(TypeError, match=r"a range, such as range\(80, 100\), and not \[2, 5\]"):
        skip_batches(loader.state_dict(), [2, 5])  # type: ignore[arg-type]
