"""Sharing the contents of a dataset: attributes that are replaced, others that stay, and the original."""

from __future__ import annotations

import functools
import multiprocessing.context
import os
import pickle
import subprocess
from collections import defaultdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, random_split
from torch.utils.data import DataLoader as TorchLoader
from walk_datasets import (
    ROWS,
    Everything,
    Frozen,
    FrozenSlots,
    Images,
    Slotted,
    Stream,
    WithMethod,
    make_samples,
    mapped_stores,
)
from warm_python import warm_python

from shmloader import DataLoader, NotSharedWarning, SharedMemoryExhausted, share
from shmloader.store import SharedObject, Store, attributes
from shmloader.store.attributes import share_for_loader


class Pair(NamedTuple):
    left: Any
    right: Any


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def is_shared_array(value: Any) -> bool:
    """Whether an array or tensor lies in shared memory."""
    address = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin <= address < end:
            return "shmloader-store" in name
    return False


# Attributes that are replaced.


def test_a_large_list_becomes_a_store_and_the_original_stays_as_it_was() -> None:
    original = Images()
    samples = original.samples
    shared = share(original)
    assert type(shared) is Images
    assert isinstance(shared.samples, Store)
    assert shared.samples == samples
    assert original.samples is samples
    assert type(samples) is list


def test_what_is_small_stays_the_same_object() -> None:
    original = Images()
    shared = share(original)
    assert shared.classes is original.classes
    assert shared.size is original.size


def test_tuples_and_dicts_of_data_become_stores() -> None:
    rows = tuple(make_samples())
    table = {f"key {number}": number for number in range(ROWS)}
    shared = share(Holder(rows=rows, table=table))
    assert isinstance(shared.rows, Store)
    assert shared.rows == rows
    assert isinstance(shared.table, SharedObject)
    assert shared.table == table
    assert shared.table["key 77"] == 77


def test_arrays_stay_arrays_and_read_only() -> None:
    array = np.arange(1 << 18, dtype=np.float64).reshape(-1, 4)
    shared = share(Holder(array=array)).array
    assert isinstance(shared, np.ndarray)
    assert shared.dtype == array.dtype
    assert np.array_equal(shared, array)
    assert type(shared[3]) is type(array[3])
    assert is_shared_array(shared)
    with pytest.raises(ValueError, match="read-only"):
        shared[0] = 1
    with pytest.raises(TypeError, match="item assignment"):
        share(Images()).samples[0] = None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_stays_as_it_is() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1 << 20), torch.zeros(3)])
    with pytest.warns(NotSharedWarning, match="only dense tensors"):
        assert share(Holder(tensor=nested)).tensor is nested


def test_a_tensor_dataset_holds_tensors_over_shared_memory() -> None:
    original = TensorDataset(torch.randn(ROWS, 16), torch.arange(ROWS))
    shared = share(original)
    assert type(shared.tensors) is tuple
    features, numbers = shared.tensors
    assert isinstance(features, torch.Tensor)
    assert torch.equal(features, original.tensors[0])
    assert is_shared_array(features)
    assert not is_shared_array(original.tensors[0])
    assert numbers is original.tensors[1]  # 160 kB are not worth it
    assert len(shared) == ROWS
    assert all(map(torch.equal, shared[5], original[5]))
    assert type(shared[5][0]) is torch.Tensor


# Places that are walked.


@pytest.mark.parametrize(
    ("wrap", "find"),
    [
        (lambda d: Subset(d, range(5)), lambda w: w.dataset),
        (lambda d: ConcatDataset([Images(1), d]), lambda w: w.datasets[1]),
        (lambda d: StackDataset(d, d), lambda w: w.datasets[0]),
        (lambda d: StackDataset(one=d), lambda w: w.datasets["one"]),
        (lambda d: random_split(d, [0.5, 0.5])[0], lambda w: w.dataset),
        (lambda d: Holder(by_name={"train": [d]}), lambda w: w.by_name["train"][0]),
        (lambda d: Holder(pair=Pair(1, d)), lambda w: w.pair.right),
        (lambda d: Holder(call=functools.partial(getattr, d, name=1)), lambda w: w.call.args[0]),
        (lambda d: Holder(read=d.__getitem__), lambda w: w.read.__self__),
        (lambda d: Holder(deep=Holder(deep=Holder(deep=d))), lambda w: w.deep.deep.deep),
    ],
    ids="subset concat stack stack-dict split dict-of-lists namedtuple partial method deep".split(),
)
def test_nested_datasets_are_found(wrap: Any, find: Any) -> None:
    original = wrap(Images())
    shared = share(original)
    assert type(shared) is type(original)
    assert isinstance(find(shared).samples, Store)
    assert type(find(original).samples) is list
    assert find(shared)[7] == find(original)[7]


def test_the_indices_of_a_subset_are_shared_too() -> None:
    shared = share(Subset(Images(10), list(range(10)) * ROWS))
    assert isinstance(shared.indices, Store)
    assert shared[11] == Images(10)[1]


@pytest.mark.parametrize("kind", [Frozen, FrozenSlots])
def test_frozen_dataclasses_are_copied(kind: Any) -> None:
    shared = share(kind(make_samples()))
    assert type(shared) is kind
    assert isinstance(shared.samples, Store)
    assert shared.name == "frozen"


class Samples(list[Any]):
    pass


def test_a_list_of_a_class_that_was_pickled_before_is_shared() -> None:
    """Pickling writes the names of slots into the class."""
    pickle.dumps(Samples())
    assert "__slotnames__" in vars(Samples)
    assert isinstance(share(SimpleNamespace(rows=Samples(map(str, range(100_000))))).rows, Store)


class Checked:
    """A descriptor that stores every value as a list."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return instance.__dict__["rows"]  # access through the class fails

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__["rows"] = list(value)


class Behind(Holder):
    scale = 1.0
    rows = Checked()


class Both:
    __slots__ = ("__dict__", "rows")


def test_an_attribute_of_an_objects_own_may_have_a_name_that_its_class_has() -> None:
    original = Behind(rows=list(map(str, range(100_000))), scale=2.0, more=3)
    vars(original)[7] = "seven"
    shared = share(original)
    assert isinstance(shared.rows, Store)
    assert vars(shared) == {"rows": shared.rows, "scale": 2.0, "more": 3, 7: "seven"}


def test_a_slot_may_have_the_name_of_an_attribute() -> None:
    original = Both()
    original.rows = list(map(str, range(100_000)))
    vars(original)["rows"] = "own"
    shared = share(original)
    assert isinstance(shared.rows, Store)
    assert vars(shared) == {"rows": "own"}


def test_slots_are_followed_hidden_and_unset_ones_too() -> None:
    original = Slotted()
    shared = share(original)
    assert isinstance(shared.samples, Store)
    assert isinstance(shared.hidden(), Store)
    assert shared.hidden() == original.hidden()
    assert not hasattr(shared, "empty")


def test_a_bound_method_is_bound_to_the_copy() -> None:
    """The original's method would keep the original's list alive, and take it to every worker."""
    shared = share(WithMethod())
    assert shared.read.__self__ is shared
    assert shared.read(3) == "folder/image-3.jpeg"


def test_a_few_large_containers_are_shared_one_by_one() -> None:
    """A mapping of two long lists as one store would rebuild a list at each access."""
    splits = {"train": make_samples(), "valid": make_samples(), "name": "images"}
    arrays = [np.zeros(1 << 18), np.ones(1 << 18)]
    shared = share(Holder(splits=splits, arrays=arrays))
    assert type(shared.splits) is dict
    assert isinstance(shared.splits["train"], Store)
    assert shared.splits["name"] == "images"
    assert type(shared.arrays) is list
    assert all(map(is_shared_array, shared.arrays))


# References.


def test_what_is_referred_to_twice_is_shared_once() -> None:
    samples = make_samples()
    dataset = Images()
    shared = share(Holder(a=samples, b=samples, c=dataset, d=[dataset]))
    assert shared.a is shared.b
    assert shared.c is shared.d[0]


def test_cycles_are_followed_once() -> None:
    one, other = Holder(samples=make_samples()), Holder()
    one.other, other.one = other, one
    one.everything = [one, (other, {"one": one})]
    shared = share(one)
    assert isinstance(shared.samples, Store)
    assert shared.other.one is shared
    assert shared.everything[0] is shared
    assert shared.everything[1][0] is shared.other
    assert shared.everything[1][1]["one"] is shared
    assert one.other.one is one


def test_a_tuple_in_a_cycle_is_copied_once() -> None:
    one = Holder(samples=make_samples())
    one.pair = Pair((one,), one)
    one.again = one.pair
    shared = share(one)
    assert shared.pair is shared.again
    assert shared.pair.left[0] is shared


def test_what_leads_to_nothing_shared_is_not_copied() -> None:
    beside = Holder(numbers=[1, 2, 3])
    shared = share(Holder(images=Images(), beside=beside))
    assert shared.beside is beside


def test_sharing_again_changes_nothing() -> None:
    shared = share(Everything())
    assert share(shared) is shared


# Attributes that stay.


class Text(list):  # type: ignore[type-arg]
    pass


def test_want_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is not mistaken for a container that cannot be represented."""

    def exhausted(*_: Any, **__: Any) -> Any:
        raise SharedMemoryExhausted("too big")

    monkeypatch.setattr(attributes, "write_rows", exhausted)
    with pytest.raises(SharedMemoryExhausted):
        share(Images())


@pytest.mark.parametrize("root", [5, "text", None, print, np.float32(3), Images])
def test_what_has_no_attributes_to_look_at_is_refused(root: Any) -> None:
    with pytest.raises(TypeError, match="share takes sequences"):
        share(root)


# To workers.


def test_a_shared_dataset_is_a_small_message_to_a_spawned_worker() -> None:
    class Popen:
        """The object that pickling asks for while a process is being started."""

        DupFd = staticmethod(int)

        def duplicate_for_child(self, fd: int) -> int:
            return fd

    shared = share(Everything())
    multiprocessing.context.set_spawning_popen(Popen())
    try:
        assert len(ForkingPickler.dumps(shared)) < 16_000
    finally:
        multiprocessing.context.set_spawning_popen(None)


# torch warns of any read-only array that becomes a tensor.
may_warn_of_read_only = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@may_warn_of_read_only
def test_workers_read_the_same_memory_and_batches_are_torchs(start_method: str) -> None:
    inherited = mapped_stores() if start_method == "fork" else 0
    original = Everything()
    loader = DataLoader(
        original,
        batch_size=ROWS // 4,
        num_workers=1,
        multiprocessing_context=start_method,
        share_dataset=True,
    )
    expected = TorchLoader(
        [{"path": p, "label": n} for p, n in map(Images().__getitem__, range(ROWS))], ROWS // 4
    )
    memory = os.fstat(loader.dataset.samples.buffer.fd).st_ino
    for number, (batch, wanted) in enumerate(zip(loader, expected, strict=True)):
        rows = slice(number * (ROWS // 4), (number + 1) * (ROWS // 4))
        assert torch.equal(batch["path"], wanted["path"])
        assert torch.equal(batch["label"], wanted["label"])
        assert torch.equal(batch["feature"], torch.from_numpy(original.features[rows]))
        assert torch.equal(batch["weight"], original.weights[rows])
        assert batch["memory"][0] == memory
        # One mapping, and one descriptor, for all three attributes; others were there before.
        assert batch["mapped"][0] == 1 + inherited
    loader.close()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_hundred_attributes_take_one_descriptor(start_method: str) -> None:
    script = str(Path(__file__).parents[1] / "few_descriptors.py")
    command = [*warm_python(), script, start_method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["limit", "64", "descriptors", "1", "read", "True"], done.stderr


def test_a_loader_shares_its_dataset_when_it_is_made() -> None:
    original = Images()
    loader = DataLoader(original, batch_size=100, share_dataset=True)
    assert loader.dataset is original
    assert isinstance(original.samples, Store)
    assert all(map(torch.equal, next(iter(loader)), next(iter(TorchLoader(Images(), 100)))))
    assert DataLoader(original).dataset is original


@may_warn_of_read_only
@pytest.mark.parametrize("dataset", [make_samples(), np.zeros((ROWS, 8)), torch.zeros(ROWS, 8)])
def test_a_plain_container_as_dataset_is_shared(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=7, share_dataset=True)
    shared = loader.dataset
    assert isinstance(shared, Store) if isinstance(dataset, list) else is_shared_array(shared)
    assert len(loader.dataset) == len(dataset)
    assert str(next(iter(loader))) == str(next(iter(TorchLoader(dataset, 7))))


def test_a_dataset_without_anything_to_share_is_taken_as_it_is() -> None:
    numbers = range(10)
    assert DataLoader(numbers, share_dataset=True).dataset is numbers


def test_an_iterable_dataset_is_shared_too() -> None:
    loader = DataLoader(
        Stream(), batch_size=ROWS, num_workers=1, share_dataset=True, multiprocessing_context="fork"
    )
    assert isinstance(loader.dataset.samples, Store)
    (batch,) = loader
    assert batch.tolist() == [number % 10 for number in range(ROWS)]


def test_a_loader_made_from_the_attributes_of_another_shares_nothing_again() -> None:
    """ignite and Lightning rebuild loaders from their public attributes."""
    loader = DataLoader(Images(), share_dataset=True)
    public = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    assert public["share_dataset"] is True
    for name in ("sampler", "batch_size", "drop_last"):
        del public[name]
    assert DataLoader(**public).dataset is loader.dataset


@pytest.mark.parametrize(
    "row",
    [
        lambda i: {"image": i, "objects": [{"outline": [[[1.0 * i, 2.0], [1.0, 2.0]]], "box": [1, 2, 3, 4]}]},
        lambda i: {"a": {"b": {"c": {"d": {"e": [i] * 20}}}}},
        lambda i: {"tags": {i, i + 1}, "kinds": frozenset({i})},
    ],
)
def test_rows_of_nested_data_are_shared(row: Any) -> None:
    dataset = Subset([row(i) for i in range(9000)], range(10))
    shared = share_for_loader(dataset)
    assert isinstance(shared.dataset, Store)
    assert shared.dataset[8999] == row(8999)


def test_what_cannot_be_shared_takes_nothing_of_what_can() -> None:
    """The rows before it stay shared, although they take no bytes until everything is written."""
    numbers = {number: number for number in range(100_000)}
    with pytest.warns(NotSharedWarning, match="factory"):
        shared = share(SimpleNamespace(rows=[None] * 300_000, counts=defaultdict(lambda: 0, numbers)))
    assert isinstance(shared.rows, Store)
    assert list(shared.rows[:3]) == [None] * 3
    assert len(shared.rows) == 300_000
    assert shared.counts == numbers
