"""Keys of all known types are found by hashes that are the same in every process."""

from __future__ import annotations

import datetime as dt
import enum
import multiprocessing
import uuid
from decimal import Decimal
from itertools import combinations
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import numpy as np

from shmloader import share
from shmloader.store.mapping import hash_of


class Colour(enum.Enum):
    RED = "red"
    BLUE: ClassVar = ["no", "hash"]


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Instant(dt.datetime):
    """Has a ``__hash__`` of its own, like pandas.Timestamp."""

    def __hash__(self) -> int:
        return super().__hash__()


class Odd(dt.datetime):
    """Is equal to other values than datetimes are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and self.year == other.year

    def __hash__(self) -> int:
        return self.year


EAST = dt.timezone(dt.timedelta(hours=9))
KEYS: list[Any] = [
    *("a", b"a", 1, 2.5, None, Decimal("0.1"), ("a", 1)),
    *(Path("a/b"), PurePosixPath("A/b"), PureWindowsPath("C:\\X")),
    *(uuid.UUID(int=7), uuid.UUID(int=1 << 127)),
    *(Colour.RED, Rights.READ, Rights.READ | Rights.WRITE, Rights(0)),
    *(frozenset(), frozenset({1, "a", Colour.BLUE}), frozenset({frozenset({Path("x")})})),
    (Path("a"), frozenset({uuid.UUID(int=3)})),
]
WITHOUT_HASH: list[Any] = [
    *(dt.date(2024, 2, 29), dt.datetime(2024, 2, 29), dt.datetime(2024, 2, 29, tzinfo=dt.UTC)),  # noqa: DTZ001
    *(dt.datetime.min.replace(tzinfo=EAST), dt.timedelta(days=-1, microseconds=1)),
    (Path("a"), frozenset({dt.date.min})),
]
EQUAL: list[Any] = [
    *(1, 1.0, True, Decimal(1)),
    *(PureWindowsPath("A\\b"), PureWindowsPath("a/B"), Path("a/b"), PurePosixPath("a//b")),
    *(dt.datetime(2024, 5, 1, 9, tzinfo=EAST), dt.datetime(2024, 5, 1, 0, tzinfo=dt.UTC)),
    *(dt.datetime(2024, 5, 1, fold=1), dt.datetime(2024, 5, 1)),  # noqa: DTZ001
    Instant(2024, 5, 1),
    *(frozenset({1, (2, "x")}), frozenset({(2.0, "x"), True})),
]


def find_all(shared: Any, found: Any) -> None:
    found.put([shared[key] for key in KEYS + WITHOUT_HASH])


def test_keys_are_found_in_a_process_of_another_interpreter(warm_helpers: None) -> None:
    shared = share({key: number for number, key in enumerate(KEYS + WITHOUT_HASH)})
    context = multiprocessing.get_context("forkserver")  # it hashes texts in another way
    found: Any = context.SimpleQueue()
    process = context.Process(target=find_all, args=(shared, found))
    process.start()
    assert found.get() == list(range(len(KEYS + WITHOUT_HASH)))
    process.join()


def test_no_process_needs_a_dict_of_such_keys() -> None:
    assert [key for key in KEYS if hash_of(key) is None] == []
    assert [key for key in WITHOUT_HASH if hash_of(key) is not None] == []


def test_keys_that_are_equal_have_equal_hashes() -> None:
    equal = [pair for pair in combinations(EQUAL, 2) if pair[0] == pair[1]]
    assert len(equal) == 13
    time, day = np.datetime64("2024-05-01T00:00:00.000000000"), np.timedelta64(1, "D")
    equal += [(time, dt.datetime(2024, 5, 1))]  # noqa: DTZ001
    if hash(day) == hash(dt.timedelta(hours=24)):  # not so with NumPy 1, where a dict does not find it either
        equal += [(day, dt.timedelta(hours=24))]
    assert all(hash_of(one) == hash_of(other) for one, other in equal)


def test_keys_of_a_class_with_an_equality_of_its_own_are_found_by_it() -> None:
    shared = share({Odd(2024, 5, 1): 1, dt.datetime(2024, 5, 1): 2})  # noqa: DTZ001
    assert (shared[Odd(2024, 6, 1)], shared[dt.datetime(2024, 5, 1)]) == (1, 2)  # noqa: DTZ001
