"""User code in a worker may keep batches that it made: they do not change, and arrive as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity.datasets import Rows, identity, row
from parity.keepers import KEEPERS, WIDTH, CollatingDataset, WritesAfterwards
from parity.run import Build, assert_plays
from shmloader import DataLoader

KEPT = 40


@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_a_collate_function_keeps_never_changes(keeper: type) -> None:
    """Over far more batches than slots; the caller drops some batches and holds others."""

    def play(build: Build) -> list[Any]:
        loader = build(Rows(2 * KEPT, WIDTH), 2, num_workers=1, collate_fn=keeper())
        return [batch for index, batch in enumerate(loader) if index % 3 == 0 or index > 30]

    assert all(batch["intact"] for batch in assert_plays(play))


def test_what_a_collate_function_keeps_survives_between_epochs() -> None:
    """Persistent workers keep its memory, and go on using the slots again."""

    def play(build: Build) -> list[Any]:
        given = {"num_workers": 2, "persistent_workers": True, "collate_fn": KEEPERS[2]()}
        loader = build(Rows(24, WIDTH), 2, **given)
        return [[batch["x"].sum() for batch in loader], list(loader), list(loader)]

    assert all(batch["intact"] for batch in assert_plays(play)[2])


def test_a_dataset_may_collate_and_cache_by_itself() -> None:
    """There is no automatic batching, and every index is fetched several times."""

    def play(build: Build) -> list[Any]:
        indices = [k * k % 11 for k in range(60)]  # no more than are kept in slots
        given = {"batch_size": None, "sampler": indices, "collate_fn": identity}
        return list(build(CollatingDataset(11), num_workers=2, **given))

    assert all(batch["intact"] for batch in assert_plays(play))


def test_a_sent_batch_is_out_of_its_datasets_reach() -> None:
    """A dataset with one buffer for all samples cannot change what was sent (in torch it does)."""
    given = {"batch_size": None, "collate_fn": identity, "multiprocessing_context": "fork"}
    held = list(DataLoader(WritesAfterwards(60), num_workers=1, **given))
    assert all(torch.equal(batch[0], row(index, WIDTH)) for index, batch in enumerate(held))


def test_the_callers_writes_stay_out_of_the_workers_reach() -> None:
    """Writing into a received batch does not change the parts that the worker keeps."""
    given = {"batch_size": None, "collate_fn": identity, "multiprocessing_context": "fork"}
    loader = DataLoader(CollatingDataset(5), sampler=[k % 5 for k in range(80)], num_workers=1, **given)
    for index, batch in enumerate(loader):
        assert batch["intact"]
        assert torch.equal(batch["x"][0], row(index % 5, WIDTH))
        batch["x"].fill_(-1.0)
