"""Shared objects work as before: files that they hold stay open, and types stay the same."""

from __future__ import annotations

import array
import gc
import subprocess
import sys
import weakref
from collections import UserDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Subset

from shmloader import DataLoader, NotSharedWarning, share
from shmloader.store import MappingStore, Store
from shmloader.store.handles import MappedFiles, is_shared

ROWS = 30_000


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Reads:
    """A file, and texts to share."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.texts = [f"text {n}" for n in range(ROWS)]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> str:
        self.file.seek(0)
        return self.file.read().decode() + self.texts[index]


class Closes(Reads):
    def __del__(self) -> None:
        self.file.close()


class ClosesWithoutWeakReferences:
    __slots__ = ("file", "texts")
    __init__, __getitem__, __del__ = Reads.__init__, Reads.__getitem__, Closes.__del__


class Finalized(Reads):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        weakref.finalize(self, self.file.close)


class Part:
    def __init__(self, whole: Any) -> None:
        self.whole = weakref.ref(whole)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("from the file, ")
    return path


@pytest.mark.parametrize("kind", [Closes, ClosesWithoutWeakReferences, Finalized])
def test_a_file_that_dies_with_its_object_stays_open_after_sharing(kind: Any, path: Path) -> None:
    shared = share(kind(path))
    held = share(Holder(inner=kind(path)))
    gc.collect()
    for one in (shared, held.inner):
        assert isinstance(one.texts, Store)
        assert one[7] == "from the file, text 7"


@pytest.mark.parametrize("method", ["fork", None])
def test_a_loader_s_dataset_with_a_del_lives_as_long_as_the_loader(path: Path, method: str | None) -> None:
    workers = {"num_workers": 1, "multiprocessing_context": method} if method else {}
    loader = DataLoader(Closes(path), batch_size=2, share_dataset=True, **workers)
    gc.collect()
    assert next(iter(loader)) == ["from the file, text 0", "from the file, text 1"]
    file = loader.dataset.file
    del loader
    gc.collect()
    assert file.closed


def test_an_object_with_a_del_and_its_copy_end_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shmloader\n"
        "class Ends:\n"
        "    def __init__(self): self.texts = [f'text {n}' for n in range(30_000)]\n"
        "    def __del__(self): print(type(self.texts).__name__)\n"
        "shared = shmloader.share(Ends())\n"
    )
    # An interpreter of its own: a warm program does not collect at its end what the template had.
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert (sorted(out.stdout.split()), out.stderr) == (["RowStore", "list"], "")


def test_what_refers_weakly_to_a_shared_object_finds_it() -> None:
    whole = Holder(texts=[f"text {n}" for n in range(ROWS)])
    whole.part = Part(whole)
    shared = share(whole)
    del whole
    gc.collect()
    assert shared.part.whole().texts[3] == "text 3"


def test_an_object_without_a_del_is_free_once_it_is_shared() -> None:
    held = Holder(texts=[f"text {n}" for n in range(ROWS)], part=Holder())
    part = weakref.ref(held.part)
    shared = share(held)
    del held
    assert part() is shared.part
    del shared
    assert part() is None


def originals() -> int:
    gc.collect()
    return sum(type(one) is Holder and type(getattr(one, "texts", None)) is list for one in gc.get_objects())


def test_a_loader_that_shared_a_dataset_before_keeps_no_original() -> None:
    before = originals()
    dataset = Holder(texts=[f"text {n}" for n in range(ROWS)])
    loader = DataLoader(dataset, share_dataset=True)  # type: ignore[arg-type]
    shared, part = share(dataset), DataLoader(Subset(dataset, range(9)), share_dataset=True)  # type: ignore[arg-type]
    del dataset
    assert originals() == before
    assert shared.texts[3] == loader.dataset.texts[3] == part.dataset.dataset.texts[3] == "text 3"


class Randoms(Sequence[Any]):
    """A dataset that is a sequence, whose samples differ from access to access."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(ROWS, 20)
        self.given = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        self.given += 1
        return self.numbers[index, 0] + self.given


class RandomsByName(Mapping[Any, Any]):
    __init__, __len__, __getitem__ = Randoms.__init__, Randoms.__len__, Randoms.__getitem__

    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.parametrize("kind", [Randoms, RandomsByName])
def test_a_loader_asks_a_sequence_s_own_class_for_each_sample(kind: Any) -> None:
    loader = DataLoader(kind(), batch_size=8, share_dataset=True)
    assert type(loader.dataset) is kind
    assert is_shared(loader.dataset.numbers, MappedFiles())
    first, second = next(iter(loader)), next(iter(loader))
    assert first.tolist() == list(range(1, 9))
    assert second.tolist() == list(range(9, 17))


class ListOfItems(UserDict[str, int]):
    def items(self) -> Any:
        return sorted(super().items(), reverse=True)


def test_a_mapping_whose_items_are_a_list_is_shared_by_its_keys() -> None:
    numbers = {str(n): n for n in range(100)}
    shared = share(ListOfItems(numbers))
    assert isinstance(shared, MappingStore)
    assert list(shared.items()) == list(numbers.items())
    assert all(shared[key] == number for key, number in numbers.items())


@pytest.mark.parametrize("value", [np.zeros((), [("a", "i4", (300_000,))]), np.array("x" * 300_000)])
def test_one_large_value_in_an_array_without_dimensions_is_shared(value: Any) -> None:
    for shared in (share(Holder(value=value)).value, share(value)):
        assert is_shared(shared, MappedFiles())
        assert (shared.dtype, shared.shape) == (value.dtype, ())
        assert shared.tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_an_array_of_few_large_tensors_has_them_shared(dtype: torch.dtype) -> None:
    tensors = np.empty(3, object)
    for number in range(3):
        tensors[number] = torch.full((1 << 20,), number).to(dtype)
    shared = share(Holder(tensors=tensors)).tensors
    assert type(shared) is np.ndarray
    assert shared.shape == (3,)
    for one, other in zip(shared, tensors, strict=True):
        assert is_shared(one, MappedFiles())
        assert one.dtype is dtype
        assert torch.equal(one.float(), other.float())


class Plain:
    """A dataset without a base class, with more than data in it."""

    def __init__(self) -> None:
        self.texts = [f"text {n}" for n in range(ROWS)]


class PlainSlots:
    __slots__ = ("texts",)
    __init__ = Plain.__init__


@pytest.mark.parametrize("kind", [Plain, PlainSlots])
def test_objects_in_a_dict_or_a_list_are_shared_as_they_would_be_alone(kind: Any) -> None:
    for data in ({"train": kind(), "val": kind()}, [kind()] * 40, (kind(), 5)):
        shared = share(data)
        assert type(shared) is type(data)
        first = next(iter(shared.values())) if isinstance(shared, dict) else shared[0]
        assert type(first) is kind
        assert isinstance(first.texts, Store)
        assert list(first.texts) == kind().texts
    with pytest.raises(TypeError, match="a set of datasets"):
        share({kind()})


def test_large_arrow_tables_in_a_dict_are_shared() -> None:
    table = pa.table({"n": np.arange(1 << 18)})
    shared = share({"train": table, "few": table.slice(0, 3)})
    assert type(shared) is dict
    assert type(shared["train"]) is pa.Table
    assert shared["train"] == table
    assert is_shared(shared["train"]["n"].chunk(0).to_numpy(), MappedFiles())


def test_a_loader_reads_no_samples_to_share_a_dataset_without_weak_references() -> None:
    class Counts(PlainSlots):
        __slots__ = ("reads",)

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> str:
            self.reads += 1
            return self.texts[index]

    dataset = Counts()
    dataset.reads = 0
    loader = DataLoader(dataset, share_dataset=True)
    assert isinstance(loader.dataset.texts, Store)
    assert dataset.reads == loader.dataset.reads == 0


class Settings(dict[str, Any]):
    """A class with a method of its own, which does not even raise AttributeError."""

    __getattr__ = dict.__getitem__


def test_a_short_mapping_of_ones_own_class_is_shared_value_by_value() -> None:
    texts = Plain().texts
    for data in (
        Settings(train=texts, seed=3),
        UserDict(train=texts, seed=3),
        MappingProxyType({"train": texts}),
    ):
        shared = share(data)
        assert type(shared) is dict
        assert isinstance(shared["train"], Store)
        assert shared == dict(data)
    assert isinstance(share(UserDict(a=1)), MappingStore)


class Names(list[str]):
    def first(self) -> str:
        return self[0]


@pytest.mark.parametrize(
    "kind",
    [
        Names,
        lambda texts: Settings(texts=texts),
        lambda texts: MappingProxyType(dict(enumerate(texts))),
        lambda texts: "".join(texts * 5),
        lambda texts: "".join(texts * 5).encode(),
        lambda texts: bytearray("".join(texts * 5), "ascii"),
        lambda texts: array.array("l", range(len(texts) * 10)),
    ],
    ids="list settings mappingproxy str bytes bytearray array".split(),
)
def test_what_is_large_and_cannot_be_shared_is_named(kind: Any) -> None:
    data = kind([f"text {n}" for n in range(100_000)])
    with pytest.warns(NotSharedWarning, match=r"Holder\.data, a .*: its class is none that can be shared"):
        assert share(Holder(data=data)).data is data


@pytest.mark.parametrize("kind", [deque, frozenset, Names])
def test_a_dataset_that_cannot_be_shared_is_named(kind: Any) -> None:
    data = kind([f"text {n}" for n in range(100_000)])
    with pytest.warns(NotSharedWarning, match=r"(deque|frozenset|Names), a .* of about [\d,]{9,} bytes"):
        assert DataLoader(data, share_dataset=True, sampler=[0]).dataset is data
