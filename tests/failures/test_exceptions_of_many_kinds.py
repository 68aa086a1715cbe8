"""Exceptions of all kinds that a sample raises arrive, in every epoch and under every start method."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from exception_kinds import MAKERS, Coded, Plain
from loading import make_error
from torch.utils.data import Dataset

import shmloader
from shmloader import DataLoader

NAMES = (
    "KeyError UnicodeDecodeError CalledProcessError FourArguments Unpicklable ExceptionGroup SystemExit "
    "KeyboardInterrupt OSError"
).split()


def make(index: int) -> BaseException:
    return MAKERS[index]() if index < len(MAKERS) else make_error(NAMES[index - len(MAKERS)])


class RaisesAll(Dataset):
    """Sample i raises the i-th of all kinds, from another and while yet another is handled."""

    def __len__(self) -> int:
        return len(MAKERS) + len(NAMES) + 1

    def __getitem__(self, index: int) -> int:
        if index == len(self) - 1:
            return index
        try:
            raise ConnectionError("context")
        except ConnectionError:
            error = make(index)
            error.add_note("a note of its own")
            raise error from Coded(9)


def shown(value: Any) -> Any:
    """An argument in a form that can be compared: objects without equality by type, functions by repr."""
    if isinstance(value, BaseException):
        return type(value), [shown(arg) for arg in value.args]
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if callable(value) or (isinstance(value, str) and value.startswith("<function ")):
        return "a function"
    return type(value) if isinstance(value, Plain) else value


def assert_arrived(error: BaseException, expected: BaseException, index: int) -> None:
    assert type(error) is type(expected)
    if expected.args[1:] != [[expected]] and not hasattr(expected, "me"):
        assert shown(error.args) == shown(expected.args)
    assert type(error.__cause__) is Coded
    assert error.__cause__.code == 9
    assert type(error.__context__) is ConnectionError
    assert error.__suppress_context__
    own, sample, where = error.__notes__
    assert own == "a note of its own"
    assert sample == f"raised by dataset[{index}]"
    assert where.startswith("Raised in shmloader worker ")
    assert f"while it made the batch of indices [{index}]" in where
    assert "exception_kinds.Coded: code 9" in where
    assert "raise error from Coded(9)" in where
    assert own not in where


def epoch(loader: Any) -> list[BaseException]:
    """The exceptions of one epoch, in its order; the loader continues after each."""
    iterator, errors = iter(loader), []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return errors
        except BaseException as error:
            errors.append(error)
        else:
            assert batch.tolist() == [len(RaisesAll()) - 1]


@pytest.mark.parametrize("persistent", [True, False])
def test_every_kind_arrives_in_every_epoch(persistent: bool) -> None:
    loader = DataLoader(RaisesAll(), batch_size=1, num_workers=2, persistent_workers=persistent)
    with loader:
        for _ in range(2):
            errors = epoch(loader)
            assert len(errors) == len(RaisesAll()) - 1
            for index, error in enumerate(errors):
                assert_arrived(error, make(index), index)
        assert loader.statistics().failures == 2 * len(errors)
        assert loader.statistics().detached == 0


def test_every_kind_arrives_under_every_start_method(start_method: str) -> None:
    loader = DataLoader(RaisesAll(), batch_size=1, num_workers=1, multiprocessing_context=start_method)
    errors = epoch(loader)
    assert len(errors) == len(RaisesAll()) - 1
    for index, error in enumerate(errors):
        assert_arrived(error, make(index), index)


class Held(Dataset):
    """Its exceptions refer to frames that hold memory of the slot."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        leaf = shmloader.empty(4)
        if index % 4 == 3:
            try:
                raise ConnectionError(leaf.data_ptr())
            except ConnectionError as error:
                kept = error  # a circle: frame, error, traceback, frame
                raise ExceptionGroup("one", [kept]) from kept
        return leaf.fill_(index)


def test_a_failed_batch_holds_nothing_of_its_slot() -> None:
    loader = DataLoader(Held(), batch_size=4, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    for _ in range(10):
        with pytest.raises(ExceptionGroup):
            next(iterator)
    assert loader.statistics().failures == 10
    assert loader.statistics().detached == 0


def collate_refused(samples: list[int]) -> dict[str, object]:
    return {"leaf": shmloader.empty(len(samples)).zero_(), "cannot be pickled": lambda: None}


def test_nor_does_a_batch_that_cannot_be_sent() -> None:
    loader = DataLoader(range(40), batch_size=4, num_workers=1, collate_fn=collate_refused)
    iterator = iter(loader)
    for _ in range(10):
        with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
            next(iterator)
    assert loader.statistics().failures == 10
    assert loader.statistics().detached == 0
