"""Index batches reach a worker as the sampler gave them, by every transport."""

from __future__ import annotations

import pickle
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import shmloader
from shmloader import DataLoader
from shmloader.indices.packed_indices import (
    PackedInts,
    int_array,
    pack_index_batch,
    unpack_index_batch,
)
from shmloader.messages import shown


class Number(IntEnum):
    ONE = 1


def arrives(index_batch: Any) -> Any:
    got = travelled(index_batch)
    return got.tolist() if type(got) is PackedInts else got


def travelled(index_batch: Any) -> Any:
    """The index batch that a worker reads; padding follows a record's payload."""
    payload = pack_index_batch(index_batch)
    return unpack_index_batch(payload + bytes(11), len(payload))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=100))
@example([-(2**31), 2**31 - 1] * 50)
@example([0])
def test_ints_of_32_bits_are_packed(numbers: list[int]) -> None:
    array = int_array(numbers)
    assert array is not None
    packed = PackedInts(array)
    assert packed.tolist() == numbers
    assert set(map(type, packed.tolist())) == {int}
    assert (len(packed), shown(packed, 10_000), list(packed)) == (len(numbers), repr(numbers), numbers)
    assert travelled(packed).tolist() == numbers
    assert len(travelled(packed)) == len(numbers)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=100))
def test_arrays_of_a_sampler_travel_as_they_are(numbers: list[int]) -> None:
    chunk = np.array([7, *numbers, 7], np.int64)
    got = travelled(PackedInts(chunk[1:-1]))
    assert type(got) is PackedInts
    assert got.tolist() == numbers
    assert (len(got), shown(got, 10_000)) == (len(numbers), repr(numbers))
    assert got.readonly


OTHERS = [
    True,
    None,
    2**31,
    -(2**31) - 1,
    2**200,
    1.0,
    "1",
    b"1234",
    np.int64(1),
    Number.ONE,
    [1],
    1j,
    (),
    object,
]


@pytest.mark.parametrize("other", OTHERS, ids=repr)
@pytest.mark.parametrize("place", [0, 17, 39])
def test_a_list_with_anything_else_in_it_is_pickled(other: Any, place: int) -> None:
    numbers: list[Any] = list(range(40))
    numbers[place] = other
    got = arrives(numbers)
    assert got == numbers
    assert list(map(type, got)) == list(map(type, numbers))
    array = int_array(numbers)
    if type(other) is int and abs(other) < 2**63:
        assert array is not None
        assert array.tolist() == numbers
    else:
        assert array is None


@pytest.mark.parametrize(
    "numbers", [[], (), (1, 2), range(100), tuple(range(100)), np.arange(100), list(range(5))]
)
def test_other_index_batches_are_pickled(numbers: Any) -> None:
    got = travelled(numbers)
    assert type(got) is type(numbers)
    assert list(got) == list(numbers)


@pytest.mark.parametrize("length", [3, 500])
@pytest.mark.parametrize("dtype", ["<i8", ">i4"])
def test_arrays_arrive_as_from_torchs_queue(dtype: str, length: int) -> None:
    """Writable and in native byte order, although the sampler's are not."""
    numbers = np.arange(length).astype(dtype)
    numbers.flags.writeable = False
    got = travelled(numbers)
    assert got.flags.writeable
    assert got.dtype.isnative
    assert got.tolist() == numbers.tolist()


class Asked(Dataset[Any]):
    """Its samples are their indices, which must come as a list of plain ints."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)

    def __getitems__(self, indices: Any) -> Any:
        assert type(indices) is list
        assert set(map(type, indices)) == {int}
        return [self[index] for index in indices]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_dataset_gets_a_list_of_plain_ints(on_error: str) -> None:
    batches = list(DataLoader(Asked(), 300, num_workers=2, on_error=on_error))
    assert torch.cat(batches).tolist() == list(range(1000))


class FirstOf(Dataset[Any]):
    """Takes indices that are sequences."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: Any) -> int:
        return 10 * int(index[0])


STORE = shmloader.share(list(range(40)))
SHARED: dict[str, tuple[Any, Any]] = {
    "store": (STORE, torch.arange(40)),
    "slice": (STORE[5:9], torch.arange(40)),
    "of an array": (shmloader.share(np.arange(8)), torch.arange(40)),
    "of a tensor": (shmloader.share(torch.arange(8)), torch.arange(40)),
    "inside": ([STORE[5:7], STORE[9:]], FirstOf()),
    "inside a tuple, long": ((STORE[5:7], *[STORE] * 50), FirstOf()),
}


@pytest.mark.parametrize("how", [{}, {"worker_type": "thread"}], ids=["process", "thread"])
@pytest.mark.parametrize("name", SHARED)
def test_what_lies_in_shared_memory_may_be_an_index_batch(name: str, how: dict[str, Any]) -> None:
    index_batch, dataset = SHARED[name]
    (expected,) = TorchLoader(dataset, batch_sampler=[index_batch])
    (got,) = DataLoader(dataset, batch_sampler=[index_batch], num_workers=1, **how)
    assert torch.equal(got, expected)
    payload = pack_index_batch(index_batch)
    for _ in range(2):  # each reader has its own: no descriptor that can be taken only once
        assert len(unpack_index_batch(payload, len(payload))) == len(index_batch)


class Unpicklable:
    """Cannot be pickled, and says why."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(f"it is {id(self)}")


@pytest.mark.parametrize("beside", [[], [STORE]])
def test_an_index_batch_that_has_no_pickle_says_why(beside: list[Any]) -> None:
    one = Unpicklable()
    with pytest.raises(pickle.PicklingError, match=f"it is {id(one)}") as raised:
        pack_index_batch([one, *beside])
    assert raised.value.__context__ is None
