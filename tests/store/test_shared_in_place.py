"""``share_dataset=True`` shares the program's own dataset: what is set later reaches workers."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import operator
import pickle
import types
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from shmloader import DataLoader, NotSharedWarning, share, unshare
from shmloader.store import MappingStore, SetStore, Store
from shmloader.store.attributes import share_for_loader
from shmloader.store.handles import is_shared, pack, unpack

ROWS = 20_000


def texts(rows: int = ROWS) -> list[str]:
    return [f"some text {number}" for number in range(rows)]


class Texts(Dataset[Any]):
    """Texts to share, and settings that the program changes."""

    def __init__(self, **more: Any) -> None:
        self.texts: Any = texts()
        self.epoch = 0
        self.transform: Callable[[str], int] = len
        vars(self).update(more)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.epoch, self.transform(self.texts[index]), type(self.texts) is not list

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Holder:
    """An object that is no dataset."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def shared(dataset: Any) -> Any:
    """Share a dataset as a loader does, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return share_for_loader(dataset)


def seven(_: str) -> int:
    return 7


# What the program sets reaches the workers.


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(4)), lambda d: ConcatDataset([d])])
def test_what_is_set_later_reaches_workers(start_method: str, wrap: Any) -> None:
    dataset = Texts()
    wrapped = wrap(dataset)
    loader = DataLoader(
        wrapped, batch_size=4, num_workers=1, share_dataset=True, multiprocessing_context=start_method
    )
    assert loader.dataset is wrapped
    assert isinstance(dataset.texts, Store)
    dataset.set_epoch(6)
    dataset.transform = seven
    ((epochs, lengths, are_shared),) = loader
    assert (epochs.tolist(), lengths.tolist(), are_shared.tolist()) == ([6] * 4, [7] * 4, [True] * 4)
    dataset.epoch = 8  # these workers are new ones
    assert next(iter(loader))[0].tolist() == [8] * 4


class Weights(Dataset[Any]):
    def __init__(self) -> None:
        self.weights: Any = torch.zeros(1 << 18)
        self.numbers = np.zeros(1 << 18)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.weights[index]


def test_what_is_written_to_a_shared_tensor_later_reaches_workers(start_method: str) -> None:
    dataset = Weights()
    loader = DataLoader(
        dataset, batch_size=4, num_workers=1, share_dataset=True, multiprocessing_context=start_method
    )
    assert is_shared(dataset.weights, None)
    dataset.weights[1] = 5
    dataset.weights.numpy()[2] = 6
    assert next(iter(loader)).tolist() == [0, 5, 6, 0]
    with pytest.raises(ValueError, match="read-only"):
        dataset.numbers[1] = 5


def test_conjugated_and_negated_tensors_are_shared_and_reach_workers(start_method: str) -> None:
    waves = torch.full((1 << 18,), 1 + 2j).conj()
    dataset, want = Weights(), [waves, waves.imag, waves[:2], waves.imag[:2]]
    dataset.weights = list(want)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, share_dataset=True, multiprocessing_context=start_method
    )
    assert [is_shared(one, None) for one in dataset.weights] == [True, True, False, False]
    assert all(map(torch.equal, loader, want))


class Numbers(Dataset[Any]):
    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.numbers[index]


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


VIEWS: dict[str, Callable[[Any], Any]] = {
    "writable": lambda a: a,
    "read-only": read_only,
    "windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, 8)[:, 0],
    "broadcast": lambda a: np.broadcast_to(a, (2, a.size))[1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_to_an_array_over_a_shared_tensor_reaches_workers(
    start_method: str, view: str
) -> None:
    numbers = share(torch.zeros(1 << 18)).numpy()
    numbers[1] = 5
    dataset = Numbers(VIEWS[view](numbers))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=start_method)
    assert next(iter(loader)).tolist() == [0, 5, 0, 0]
    packed, _ = pack(dataset.numbers)
    assert unpack(packed, [])[:4].tolist() == [0, 5, 0, 0]


class Progress(Weights):
    """Memory that the program shares with its workers by itself."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1 << 18).share_memory_()
        self.numbers = np.frombuffer(multiprocessing.RawArray("d", 1 << 18))

    def __getitem__(self, index: int) -> Any:
        self.numbers[index] = 1 + self.weights[index]
        return index


def test_memory_that_the_program_shares_by_itself_is_still_written_to_from_both_sides() -> None:
    dataset = Progress()
    weights, numbers = dataset.weights, dataset.numbers
    loader = DataLoader(
        dataset, num_workers=1, share_dataset=True, persistent_workers=True, multiprocessing_context="fork"
    )
    next(iter(loader))
    weights[:4] = 2
    assert [*map(int, loader)] == [0, 1, 2, 3]
    assert numbers[:4].tolist() == [3] * 4
    assert dataset.weights is weights
    assert dataset.numbers is numbers


@pytest.mark.filterwarnings("ignore:Texts has set_epoch")
def test_persistent_workers_keep_what_they_were_started_with_as_torchs_do() -> None:
    dataset = Texts()
    with DataLoader(
        dataset, batch_size=4, num_workers=1, persistent_workers=True, share_dataset=True
    ) as loader:
        assert next(iter(loader))[0].tolist() == [0] * 4
        dataset.epoch = 5
        assert next(iter(loader))[0].tolist() == [0] * 4
        loader.set_epoch(6)
        assert next(iter(loader))[0].tolist() == [6] * 4


def test_functions_over_the_dataset_read_the_shared_texts() -> None:
    dataset = Texts()
    dataset.read = lambda: dataset.texts  # type: ignore[attr-defined]
    dataset.cached = functools.lru_cache(dataset.__getitem__)  # type: ignore[attr-defined]
    dataset.bound = dataset.__getitem__  # type: ignore[attr-defined]
    shared(dataset)
    assert isinstance(dataset.read(), Store)  # type: ignore[attr-defined]
    assert dataset.cached(0)[2] is dataset.bound(0)[2] is True  # type: ignore[attr-defined]


def test_two_loaders_of_one_dataset_share_it_once_with_the_option_or_without() -> None:
    dataset = Texts()
    DataLoader(dataset, share_dataset=True)
    store = dataset.texts
    other, without = DataLoader(dataset, share_dataset=True), DataLoader(dataset)
    assert other.dataset is without.dataset is dataset
    assert dataset.texts is store
    assert shared(Subset(dataset, [1])).dataset.texts is store


def test_the_list_that_was_shared_is_freed() -> None:
    class List(list[str]):
        pass

    dataset = Texts(texts=List(texts()))
    original = weakref.ref(dataset.texts)
    shared(dataset)
    gc.collect()
    assert original() is None


def test_a_copy_holds_the_same_store_and_settings_of_its_own() -> None:
    dataset = shared(Texts())
    for other in (copy.copy(dataset), copy.deepcopy(dataset)):
        other.epoch = 3
        assert other.texts is dataset.texts
        assert dataset.epoch == 0


def test_a_pickle_for_the_disk_is_an_error_that_names_the_way_back() -> None:
    dataset = shared(Texts())
    with pytest.raises(pickle.PicklingError, match="unshare"):
        pickle.dumps(dataset)
    assert pickle.loads(pickle.dumps(unshare(dataset))).texts == texts()


# Where it is written.


def test_what_datasets_own_is_written_to_at_any_depth() -> None:
    inner = Texts()
    dataset = Texts(
        parts={"train": texts(), "names": ["a"]},
        several=[texts(), texts()],
        helper=Holder(queue=deque([texts()]), table=np.array([texts(), None], object)),
        space=types.SimpleNamespace(texts=texts()),
        inner=[(inner,)],
    )
    parts, several, helper, pair = dataset.parts, dataset.several, dataset.helper, dataset.inner[0]  # type: ignore[attr-defined]
    del parts, several, helper
    before = {name: id(value) for name, value in vars(dataset).items()}
    shared(dataset)
    vars_ = vars(dataset)
    assert isinstance(vars_["parts"]["train"], Store)
    assert vars_["parts"]["names"] == ["a"]
    assert all(isinstance(one, Store) for one in vars_["several"])
    assert isinstance(vars_["helper"].queue[0], Store)
    assert isinstance(vars_["helper"].table[0], Store)
    assert isinstance(vars_["space"].texts, Store)
    assert isinstance(inner.texts, Store)
    assert vars_["inner"][0] is pair
    assert [name for name, value in vars_.items() if id(value) != before[name]] == ["texts"]


def test_tuples_and_frozen_classes_are_copied_into_the_dataset() -> None:
    @dataclass(frozen=True)
    class Fixed:
        texts: Any

    fixed, pair = Fixed(texts()), (texts(), 1)
    dataset = shared(Texts(fixed=fixed, pair=pair, call=functools.partial(len, texts())))
    assert type(fixed.texts) is list
    assert type(pair[0]) is list
    assert isinstance(dataset.fixed.texts, Store)
    assert isinstance(dataset.pair[0], Store)
    assert isinstance(dataset.call.args[0], Store)
    arrays = TensorDataset(torch.zeros(ROWS, 16), torch.arange(ROWS))
    assert shared(arrays) is arrays
    assert is_shared(arrays.tensors[0], None)


class Vocabulary:
    """A tokenizer, say, which more than the dataset uses."""

    def __init__(self) -> None:
        self.numbers = {text: number for number, text in enumerate(texts(100_000))}


@pytest.mark.parametrize(
    "hold",
    [
        lambda one: Texts(words=one),
        lambda one: Texts(words=[one]),
        lambda one: Texts(words=Holder(one=one)),
        lambda one: Subset(Texts(words=(one,)), [0]),
    ],
)
def test_what_something_else_holds_too_stays_as_it_is_and_is_named(hold: Any) -> None:
    words = Vocabulary()
    dataset = hold(words)
    with pytest.warns(
        NotSharedWarning, match=r"numbers, a dict of .* bytes: its holder .*words.*, a Vocabulary, stays as"
    ):
        share_for_loader(dataset)
    assert type(words.numbers) is dict
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    assert isinstance(inner.texts, Store)


def test_the_warning_points_to_the_programs_line() -> None:
    words = Vocabulary()
    with pytest.warns(NotSharedWarning) as caught:
        DataLoader(Texts(words=words), num_workers=1, share_dataset=True)
    assert [one.filename for one in caught] == [__file__]


def test_what_others_reach_through_an_object_that_they_hold_stays_as_it_is() -> None:
    words = Vocabulary()
    registry = {"tokenizer": Holder(words=words)}
    dataset = Texts(registry=registry)
    del words
    with pytest.warns(NotSharedWarning, match="its holder .*words"):
        share_for_loader(dataset)
    assert type(registry["tokenizer"].words.numbers) is dict
    del registry
    assert isinstance(shared(dataset).registry["tokenizer"].words.numbers, MappingStore)


def test_a_list_that_a_kept_object_holds_too_is_shared_for_the_dataset_and_named() -> None:
    rows = texts(100_000)
    other = Holder(rows=rows)
    dataset = Texts(rows=rows, other=other)
    with pytest.warns(NotSharedWarning, match="its holder .*other"):
        share_for_loader(dataset)
    assert isinstance(dataset.rows, Store)  # type: ignore[attr-defined]
    assert other.rows is rows


class Key:
    """Counts the calls of its hash, and fails at one of them."""

    calls, fails_at = 0, 0

    def __hash__(self) -> int:
        Key.calls += 1
        if Key.calls == Key.fails_at:
            raise RuntimeError("no hash")
        return 1


def test_if_one_place_cannot_be_written_to_none_is() -> None:
    first, second, fourth = texts(), texts(), texts()
    dataset = Texts(texts=first, parts={"a": second, Key(): texts(), "b": fourth})
    Key.fails_at = Key.calls + 1
    with pytest.raises(RuntimeError, match="no hash"):
        share_for_loader(dataset)
    assert dataset.texts is first
    assert dataset.parts["a"] is second  # type: ignore[attr-defined]
    assert dataset.parts["b"] is fourth  # type: ignore[attr-defined]
    assert isinstance(shared(dataset).parts["a"], Store)


class Strict(Texts):
    """A dataset that may not be changed from outside, with slots besides."""

    __slots__ = ("hidden",)

    def __init__(self) -> None:
        object.__setattr__(self, "hidden", texts())
        object.__setattr__(self, "texts", texts())

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def test_a_dataset_that_allows_no_setting_is_written_to_without_its_code() -> None:
    dataset = shared(Strict())
    assert isinstance(dataset.texts, Store)
    assert isinstance(dataset.hidden, Store)


def test_a_list_of_arrays_as_dataset_is_written_to_and_a_list_of_texts_is_copied() -> None:
    arrays, rows = [np.zeros(1 << 18), np.ones(1 << 18)], texts()
    assert shared(arrays) is arrays
    assert all(is_shared(array, None) for array in arrays)
    store = shared(rows)
    assert isinstance(store, Store)
    assert type(rows) is list


def test_share_itself_never_writes_to_the_original() -> None:
    dataset = Texts(inner=Texts(), parts={"train": texts()})
    other = share(dataset)
    assert other is not dataset
    assert type(dataset.texts) is type(dataset.inner.texts) is type(dataset.parts["train"]) is list  # type: ignore[attr-defined]


# The way back.

SET_CHANGES = "ior iand isub ixor".split()


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda rows: rows.append("one more"), AttributeError),
        (lambda rows: rows.extend(["more"]), AttributeError),
        (lambda rows: rows.sort(), AttributeError),
        (lambda rows: operator_setitem(rows, 0, "x"), TypeError),
        (lambda rows: operator.iadd(rows, ["more"]), TypeError),
    ],
    ids="append extend sort setitem iadd".split(),
)
def test_changing_a_shared_list_is_an_error_that_names_the_way_back(write: Any, error: Any) -> None:
    dataset = shared(Texts())
    with pytest.raises(error, match=r"shmloader\.unshare"):
        write(dataset.texts)
    unshare(dataset)
    write(dataset.texts)
    assert type(dataset.texts) is list


def test_methods_of_every_class_that_is_shared_name_the_way_back() -> None:
    queue = shared(Texts(texts=deque(texts()))).texts
    counts = shared(Texts(texts=Counter(texts()))).texts
    for store, name in ((queue, "rotate"), (queue, "appendleft"), (counts, "most_common")):
        with pytest.raises(AttributeError, match=r"shmloader\.unshare"):
            getattr(store, name)


@pytest.mark.parametrize(
    ("plain", "change"),
    [
        (texts(), lambda data: operator.imul(data, 2)),
        (dict.fromkeys(texts(), 1), lambda data: operator.ior(data, {"more": 1})),
        *[
            (set(texts()), lambda data, name=name: getattr(operator, name)(data, {"more"}))
            for name in SET_CHANGES
        ],
    ],
    ids=["imul", "ior of a dict", *SET_CHANGES],
)
def test_an_operator_that_would_change_the_data_makes_no_copy_of_it(plain: Any, change: Any) -> None:
    """Python would take ``|`` for ``|=``, and put a dict of this process in the place of the shared one."""
    with pytest.raises(TypeError, match=r"does not support .=: .*shmloader\.unshare"):
        change(share(plain))


def operator_setitem(rows: Any, index: int, value: Any) -> None:
    rows[index] = value


def test_unshare_gives_back_what_python_has() -> None:
    counts = Counter(texts())
    dataset = Texts(
        inner=(Texts(),),
        table={text: n for n, text in enumerate(texts())},
        groups=defaultdict(list, {text: [n] for n, text in enumerate(texts())}),
        counts=counts,
        names=set(texts()),
        array=np.arange(1 << 18),
        tensor=torch.arange(1 << 18),
    )
    reference = copy.deepcopy(vars(dataset))
    assert unshare(shared(dataset)) is dataset
    back = vars(dataset)
    assert type(back["texts"]) is type(back["inner"][0].texts) is list
    assert type(back["table"]) is dict
    assert type(back["groups"]) is defaultdict
    assert back["groups"].default_factory is list
    assert type(back["names"]) is set
    assert back["array"].flags.writeable
    assert not is_shared(back["tensor"], None)
    for name in ("texts", "table", "groups", "counts", "names"):
        assert back[name] == reference[name]
    assert np.array_equal(back["array"], reference["array"])
    assert torch.equal(back["tensor"], reference["tensor"])
    assert unshare(share(texts())) == texts()
    assert unshare(share(set(texts()))) == set(texts())
    assert isinstance(share(set(texts())), SetStore)


class Names(list[Any]):
    """A list with a method of its own."""

    def first(self) -> Any:
        return self[0]


def test_unshare_looks_at_every_element() -> None:
    """Sharing looks at some, and not at those of long lists."""
    rows = [{"words": ["x"] * (3000 if number % 100 == 7 else 1)} for number in range(1000)]
    read = list(share(rows))
    assert type(read[7]["words"]) is not list
    assert unshare(read) is read
    assert all(type(row["words"]) is list for row in read)
    assert read == rows
    holders: list[Any] = [Holder(label=number) for number in range(12_000)]
    holders[7777].data = share(texts())
    holders[8888] = (Names([share(np.zeros(1 << 18))]),)
    unshare({"holders": holders})
    assert type(holders[7777].data) is list
    assert holders[8888][0].first().flags.writeable


def test_what_was_unshared_is_shared_anew() -> None:
    dataset = unshare(shared(Texts()))
    dataset.texts.append("one more")
    assert shared(dataset).texts[-1] == "one more"


def test_wrappers_of_torch_stay_the_programs_own() -> None:
    one, other = Texts(), Texts()
    for wrapped in (StackDataset(one, other), ConcatDataset([one, other]), Subset(one, list(range(4)))):
        assert shared(wrapped) is wrapped
    assert isinstance(one.texts, Store)
    assert isinstance(other.texts, Store)
