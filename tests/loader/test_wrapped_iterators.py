"""Subclasses that wrap the iterator of persistent workers, as PyTorch Geometric's loaders do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from epoch_datasets import Tells
from loading import Ends, Numbered
from wrapped_loaders import ARGUMENTS, Ours, Theirs, first

import shmloader


@pytest.fixture(params=[Theirs, Ours])
def kind(request: pytest.FixtureRequest) -> Iterator[Any]:
    with shmloader.install():
        yield request.param


def test_the_workers_stay_from_epoch_to_epoch(kind: Any) -> None:
    loader = kind(Numbered(40), **ARGUMENTS)
    workers = [iter(loader).iterator._workers[0].pid for _ in range(2)]
    assert workers[0] == workers[1]
    assert [first(batch) for batch in loader] == list(range(0, 40, 4))
    loader.close()


def test_a_state_is_continued_from() -> None:
    """Under install(stateful=True) loaders with an iterator of their own have none."""
    loader = Ours(Numbered(40), **ARGUMENTS)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert first(next(iter(loader))) == 8
    with pytest.raises(shmloader.LoaderClosed, match="load_state_dict"):
        next(iterator)
    loader.close()


def test_a_loader_that_was_closed_starts_anew(kind: Any) -> None:
    loader = kind(Numbered(40), **ARGUMENTS)
    for _ in range(2):
        assert len(list(loader)) == 10
        loader.close()


def test_so_does_one_whose_worker_has_died(kind: Any) -> None:
    loader = kind(Ends(60, at=21, how=1), **ARGUMENTS)
    for _ in range(2):
        with pytest.raises(shmloader.WorkerDied):
            list(loader)


def test_set_epoch_reaches_the_workers_without_a_warning(kind: Any) -> None:
    loader = kind(Tells(), **ARGUMENTS)
    for epoch in range(3):
        shmloader.set_epoch(loader, epoch)
        assert list(loader) == [[str(epoch)] * 4]
    loader.close()


def test_a_wrapper_of_torchs_own_iterator_stays() -> None:
    """Also after an install() of which it knew nothing."""
    loader = Theirs(Tells(), **ARGUMENTS)
    wrapper = iter(loader)
    with shmloader.install():
        with pytest.warns(UserWarning, match=r"torch's own"):
            shmloader.set_epoch(loader, 1)
        assert iter(loader) is wrapper
        loader.close()  # type: ignore[attr-defined]
        assert iter(loader) is wrapper
    wrapper.iterator._shutdown_workers()  # type: ignore[attr-defined]
