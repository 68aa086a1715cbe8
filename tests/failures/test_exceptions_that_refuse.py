"""Exceptions that refuse attributes, or whose methods raise errors that end programs, still arrive."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    path: str


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class ExitsWhenShown(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Raises(Dataset):
    """Sample 1 raises an exception, or one that it is the cause of."""

    def __init__(self, kind: type[Exception], as_cause: bool = False) -> None:
        self.kind, self.as_cause = kind, as_cause

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            error = self.kind("a.png")
            if self.as_cause:
                raise ValueError("below") from error
            raise error
        return torch.tensor(index)


WAYS = {
    "no workers": {"num_workers": 0},
    "a process": {"num_workers": 1},
    "a thread": {"num_workers": 1, "worker_type": "thread"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_cause", [False, True])
def test_a_frozen_exception_arrives_and_the_loader_goes_on(way: str, as_cause: bool) -> None:
    iterator = iter(DataLoader(Raises(Frozen, as_cause), **WAYS[way]))
    assert next(iterator).tolist() == [0]
    with pytest.raises(ValueError if as_cause else Frozen) as caught:
        next(iterator)
    frozen = caught.value.__cause__ if as_cause else caught.value
    assert type(frozen) is Frozen
    assert frozen.path == "a.png"
    assert "raised by dataset[1]" in caught.value.__notes__
    assert [batch.item() for batch in iterator] == [2, 3, 4, 5]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
def test_a_frozen_exception_is_skipped_where_that_is_asked_for(way: str) -> None:
    loader = DataLoader(Raises(Frozen), batch_size=2, on_error="skip", **WAYS[way])
    assert [batch.tolist() for batch in loader] == [[0], [2, 3], [4, 5]]
    loader.close()


@pytest.mark.parametrize("way", ["a process", "a thread"])
@pytest.mark.parametrize("kind", [ExitsWhenPickled, ExitsWhenShown])
def test_what_an_exceptions_own_methods_raise_ends_no_worker(way: str, kind: type[Exception]) -> None:
    iterator = iter(DataLoader(Raises(kind), **WAYS[way]))
    assert next(iterator).tolist() == [0]
    with pytest.raises(kind) as caught:
        next(iterator)
    assert caught.value.args == ("a.png",)
    assert [batch.item() for batch in iterator] == [2, 3, 4, 5]
