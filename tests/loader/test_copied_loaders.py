"""Copies of a loader whose persistent workers run have workers, epochs and states of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.utils.data
from loading import Numbered
from wrapped_loaders import ARGUMENTS, Ours, Theirs, first

import shmloader


@pytest.mark.parametrize("kind", [shmloader.DataLoader, torch.utils.data.DataLoader, Ours, Theirs])
def test_each_has_epochs_of_its_own(kind: Any) -> None:
    with shmloader.install():
        loader = kind(Numbered(40), **ARGUMENTS)
        iterator = iter(loader)
        next(iterator)
        copied = copy.copy(loader)
        of_copy = iter(copied)
        assert [first(next(of_copy)) for _ in range(3)] == [0, 4, 8]
        assert first(next(iterator)) == 4
        assert (loader.statistics().batches, copied.statistics().batches) == (2, 3)
        copied.close()
        with pytest.raises(shmloader.LoaderClosed):
            next(of_copy)
        assert first(next(iterator)) == 8
        loader.close()


@pytest.mark.parametrize("kind", [shmloader.DataLoader, Ours])
def test_each_has_a_state_of_its_own(kind: Any) -> None:
    loader = kind(Numbered(40), **ARGUMENTS)
    iterator = iter(loader)
    next(iterator)
    with copy.copy(loader) as copied:
        of_copy = iter(copied)
        next(of_copy), next(of_copy), next(of_copy)
        assert (loader.state_dict()["batches"], copied.state_dict()["batches"]) == (1, 3)
        copied.load_state_dict(loader.state_dict())
        assert first(next(iter(copied))) == first(next(iterator)) == 4
    loader.close()


def test_a_copy_goes_on_for_an_original_that_is_gone() -> None:
    """With the same workers, and in the same order, as with torch's loader."""

    def orders(kind: Any, *, copies: bool) -> list[list[float]]:
        generator = torch.Generator().manual_seed(3)
        loader = kind(Numbered(40), shuffle=True, generator=generator, **ARGUMENTS)
        found = []
        for _ in range(3):
            found.append([first(batch) for batch in loader])
            loader = copy.copy(loader) if copies else loader
        if kind is shmloader.DataLoader:
            assert loader.statistics().batches == 30
            loader.close()
        return found

    theirs = orders(torch.utils.data.DataLoader, copies=True)
    assert orders(shmloader.DataLoader, copies=True) == theirs == orders(shmloader.DataLoader, copies=False)


@pytest.mark.parametrize("kind", [shmloader.DataLoader, Ours])
def test_a_copy_can_be_used_after_the_original_was_closed(kind: Any) -> None:
    loader = kind(Numbered(40), **ARGUMENTS)
    next(iter(loader))
    copied = copy.copy(loader)
    loader.close()
    assert len(list(copied)) == 10
    copied.close()
